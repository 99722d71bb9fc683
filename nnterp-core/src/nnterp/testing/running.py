"""Every value in the other ways of running a model: generation, gradients, stored edits, sessions, padded batches."""

import warnings
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nnterp import StandardizedTransformer
from nnterp.testing import checkpoint
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.edits import edit_of, moved, noise, only_row, rows
from nnterp.testing.facts import ROOT_VALUES, Facts
from nnterp.testing.oracles import greedy

STEPS = 4
GREEDY = greedy(STEPS)
#: Two prompts of different lengths.
PROMPTS = ["The quick brown fox jumps over", "Paris is"]


class Running(Facts):
    def place(self, value: str) -> tuple[str, int | None]:
        return value, None if value in ROOT_VALUES else self.EDITED

    def stepwise(self) -> Any:
        """A generation of the bare model with the logits of each step."""
        return self.bare.generate(**self.inputs(), **GREEDY, return_dict_in_generate=True, output_logits=True)

    # -- generation ---------------------------------------------------------------------------------------------------

    def test_every_step_of_generation(self, value: str) -> None:
        host, name = self.host(value, self.EDITED)
        expected = self.recorded(value, STEPS)
        with self.model.generate(self.ids, **GREEDY) as tracer:
            read = [].save()
            for _ in tracer.iter[0:STEPS]:
                read.append(getattr(host, name).clone())
            tokens = tracer.result.save()
        assert_same(tokens, expected.output)
        steps = expected.calls[self.place(value)]
        assert len(read) == len(steps) == STEPS
        for got, bare in zip(read, steps, strict=True):
            assert_close(got, bare, ULPS_AFTER_MODEL)

    def test_first_read_at_a_late_step(self, value: str) -> None:
        """Of a model that was never traced, after another read at an earlier step."""
        model = self.loaded.load()
        host, name = self.host(value, self.EDITED, model)
        streams = self.recorded("layer_output", STEPS).calls["layer_output", self.EDITED]
        expected = self.recorded(value, STEPS).calls[self.place(value)]
        with model.generate(self.ids, **GREEDY) as tracer:
            for _ in tracer.iter[1]:
                early = model.layers[self.EDITED].layer_output.clone().save()
            for _ in tracer.iter[2]:
                late = getattr(host, name).clone().save()
        assert_close(early, streams[1], ULPS_AFTER_MODEL)
        assert_close(late, expected[2], ULPS_AFTER_MODEL)

    def test_edit_at_one_step_by_one_invoke(self, value: str) -> None:
        """Of two that generate together: one reads and is untouched, the other edits its row at the second step."""
        host, name = self.host(value, self.EDITED)
        dims, edit, place = self.dims(value), edit_of(value), self.place(value)
        expected = self.edited_run(*place, only_row(1, 2, dims, edit), at_call=1, call=self.stepwise).output
        with self.model.generate(**GREEDY) as tracer:
            with tracer.invoke(self.ids[:1]):
                read, untouched = [].save(), [].save()
                for _ in tracer.iter[0:STEPS]:
                    read.append(getattr(host, name).clone())
                    untouched.append(self.model.logits[:, -1].clone())
            with tracer.invoke(self.ids[1:]):
                logits = [].save()
                for step in tracer.iter[0:STEPS]:
                    if step == 1:
                        setattr(host, name, edit(getattr(host, name)))
                    logits.append(self.model.logits[:, -1].clone())
        clean = self.recorded(value, STEPS).calls[place]
        for step, bare in enumerate(expected.logits):
            assert_close(read[step], rows(clean[step], dims, 2, 0), ULPS_AFTER_MODEL)
            assert_close(untouched[step], bare[:1], ULPS_AFTER_MODEL)
            assert_close(logits[step], bare[1:], ULPS_AFTER_MODEL)

    def test_in_place_edit_of_what_is_cached_stays(self, value: str) -> None:
        """In the key/value cache, for the steps to come, where an assignment acts on its own call alone."""
        if self.FORMULA is None or value in self.SITES:
            return
        host, name = self.host(value, self.EDITED)

        def halve(live: Tensor) -> Tensor:
            return live.mul_(0.5)

        with torch.no_grad():
            expected = self.edited_run(*self.place(value), halve, at_call=1, call=self.stepwise, in_place=True).output
        with self.model.generate(self.ids, **GREEDY) as tracer:
            logits = [].save()
            for step in tracer.iter[0:STEPS]:
                if step == 1:
                    halve(getattr(host, name))
                logits.append(self.model.logits[:, -1].clone())
            tokens = tracer.result.save()
        assert_same(tokens, expected.sequences)
        for got, bare in zip(logits, expected.logits, strict=True):
            assert_close(got, bare, ULPS_AFTER_MODEL)

    test_in_place_edit_of_what_is_cached_stays.values = ("self_attn.attention_keys", "self_attn.attention_values")

    # -- gradients ----------------------------------------------------------------------------------------------------

    def test_gradient(self, value: str) -> None:
        """Of a loss on the logits with respect to the value."""
        host, name = self.host(value, self.EDITED)
        weights = noise(self.loaded.clean_logits, seed=5)
        run = self.oracle([value], [self.EDITED], graph=True)
        (run.output.logits * weights).sum().backward()
        expected = run[self.place(value)].grad
        with self.model.trace(self.ids):
            live = getattr(host, name)
            loss = (self.model.logits * weights).sum()
            with loss.backward():
                gradient = live.grad.save()
        assert gradient.any()
        assert_close(gradient, expected, ULPS_AFTER_MODEL)

    # -- stored edits, sessions, scans --------------------------------------------------------------------------------

    def test_stored_edit_is_replayed(self, value: str) -> None:
        host, name = self.host(value, self.EDITED)
        edit = edit_of(value)
        with self.model.edit() as (_, changed):
            setattr(host, name, edit(getattr(host, name)))
        for ids in (self.ids, self.ids[:1, :4]):
            with changed.trace(ids):
                logits = changed.logits.save()
            expected = self.edited(*self.place(value), edit, inputs=self.inputs(ids))
            assert_close(logits, expected, ULPS_AFTER_MODEL)
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        assert_same(logits, self.loaded.clean_logits)

    def test_patch_from_one_run_of_a_session_into_another(self, value: str) -> None:
        host, name = self.host(value, self.EDITED)
        first, second = self.ids[:1], self.ids[1:]
        with self.model.session():
            with self.model.trace(first):
                donor = getattr(host, name).clone()
            with self.model.trace(second):
                setattr(host, name, donor)
                logits = self.model.logits.save()
        donated = self.oracle([value], [self.EDITED], inputs=self.inputs(first))[self.place(value)]
        expected = self.edited(*self.place(value), lambda _: donated, inputs=self.inputs(second))
        assert_close(logits, expected, ULPS_AFTER_MODEL)
        assert_differs(logits, self.bare(**self.inputs(second)).logits)

    def test_scan_gives_the_shapes(self) -> None:
        places, model = self.places(self.served()), self.scanned()
        hosts = [self.host(*place, model) for place in places]
        with model.scan(self.ids):
            shapes = [].save()
            for host, name in hosts:
                shapes.append(tuple(getattr(host, name).shape))
        for place, shape in zip(places, shapes, strict=True):
            assert shape == tuple(self.everything[place].shape), place

    def scanned(self) -> Any:
        """The model to scan."""
        return self.model

    def test_cache_and_get(self) -> None:
        model = self.model
        block = model.layers[self.EDITED]
        with model.trace(self.ids) as tracer:
            cache = tracer.cache(modules=[block, self.envoy(block, self.ATTENTIONS[0])])
        output = cache[block.path].output
        stream = self.everything["layer_output", self.EDITED]
        assert_same(output[0] if isinstance(output, tuple) else output, stream)
        with model.trace(self.ids):
            got = model.get(f"layers.{self.EDITED}.layer_output").save()
        assert_same(got, stream)
        assert model.get(f"layers.{self.EDITED}") is block
        assert block in model.modules()
        assert model.device == torch.device("cpu")

    def test_beside_a_model_of_another_family(self) -> None:
        """Both stay what they are, traced in turns."""
        other = companion(self.bare.config.model_type)

        def others() -> tuple[Tensor, Tensor]:
            with other.trace(self.ids):
                stream = other.layers[0].layer_output.clone().save()
                logits = other.logits.save()
            return stream, logits

        first = others()
        for place, read in self.read_all(self.model).items():
            assert_same(read, self.everything[place])
        with self.model.trace(self.ids):
            self.model.layers[0].layer_output = moved(self.model.layers[0].layer_output)
            logits = self.model.logits.save()
        assert_differs(logits, self.loaded.clean_logits)
        for before, after in zip(first, others(), strict=True):
            assert_same(after, before)

    # -- padded batches -----------------------------------------------------------------------------------------------

    def test_left_padded_batch(self, value: str) -> None:
        """Prompts of different lengths in one batch: what the bare model has, and each row is its prompt alone."""
        host, name = self.host(value, self.EDITED)
        dims, place = self.dims(value), self.place(value)
        inputs = self.padded()
        mask = inputs["attention_mask"]
        expected = self.oracle([value], [self.EDITED], inputs=inputs)[place]
        with self.model.trace(PROMPTS):
            read = getattr(host, name).clone().save()
        lengths = mask.sum(-1).tolist()
        assert min(lengths) < max(lengths) == mask.shape[1]
        for row, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
            if self.PADDING_MATTERS:
                assert_close(read[row], expected[row])
                continue
            with self.model.trace(prompt):
                alone = getattr(host, name).clone().save()
            got = real_tokens(read, dims, row, length, mask)
            assert_close(got, real_tokens(expected, dims, row, length, mask))
            alone = alone if dims[0] == "tokens" else alone[0]
            assert_close(got, alone, ULPS_AFTER_MODEL)

    def padded(self) -> dict[str, Tensor]:
        """The two prompts as nnsight hands them to the model: tokens are counted from each row's first."""
        encoded = self.model.tokenizer(PROMPTS, return_tensors="pt", padding=True)
        inputs = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        if "position_ids" in signature(self.bare.forward).parameters:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return inputs

    def test_invokes_of_different_lengths(self) -> None:
        """An edit in one of two prompts is the edit of the bare batch's row, and the other prompt is as it was."""
        block = self.model.layers[self.EDITED]
        with self.model.trace() as tracer:
            with tracer.invoke(PROMPTS[0]):
                first = self.model.logits.save()
            with tracer.invoke(PROMPTS[1]):
                block.layer_output = block.layer_output * 0.5
                second = self.model.logits.save()
        with self.model.trace(PROMPTS):
            stream = block.layer_output
            stream[1] = stream[1] * 0.5
            together = self.model.logits.save()
        assert_same(first, together[:1])
        assert_same(second, together[1:])


def companion(model_type: str) -> Any:
    """A small model of another family, a GPT-2 or a Llama, which the best-effort family serves where no plugin does."""
    if model_type == "gpt2":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = checkpoint.config(model_type="llama", **sizes)
    else:
        config = checkpoint.config(model_type="gpt2", n_embd=32, n_layer=2, n_head=4)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return StandardizedTransformer(checkpoint.randomized(module))


def real_tokens(value: Tensor, dims: tuple[str, ...], row: int, length: int, mask: Tensor) -> Tensor:
    """One row of a left-padded batch without its padding."""
    if dims[0] == "tokens":
        value = value.reshape(*mask.shape, *value.shape[1:])
        dims = ("batch", "seq", *dims[1:])
    real = {"batch": row, "seq": slice(-length, None), "query": slice(-length, None), "key": slice(-length, None)}
    return value[tuple(real.get(axis, slice(None)) for axis in dims)]
