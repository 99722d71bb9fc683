"""What a recurrent mixer serves: against its recurrence in float64, transformers' cache, the model run in pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.oracles import greedy
from nnterp.testing.recurrent_facts import RecurrentFacts
from nnterp.testing.running import PROMPTS

STEPS = 4
#: Rounding of a recurrence by chunks, or token by token, in float32, against float64.
ULPS_OF_A_RECURRENCE = 128


class RecurrentReading(RecurrentFacts):
    def read_mixer(self, layer: int, inputs: Any = None, **options: Any) -> dict[str, Any]:
        """A mixer's values in one trace, and ``logits``."""
        mixer = self.mixer(layer)
        names = [*self.entering(layer), "attention_head_outputs", "state_output"]
        with self.model.trace(self.ids if inputs is None else inputs, **options):
            read = {}.save()
            initial = mixer.state_input
            read["initial"] = None if initial is None else initial.clone()
            for name in names:
                read[name] = getattr(mixer, name).clone()
            read["logits"] = self.model.logits.clone()
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in read.items()}

    def computed_from(self, read: dict[str, Any]) -> dict[str, Any]:
        """Of the values read of a mixer, those its recurrence is computed from."""
        return {name: value for name, value in read.items() if name not in COMPUTED}

    def test_layouts_of_the_mixer(self) -> None:
        """Every value in its layout, with the sizes that the mixer says it has."""
        sizes = dict(zip(("batch", "seq", "query", "key"), (*self.ids.shape, *self.ids.shape[1:] * 2), strict=True))
        for layer in self.recurrent:
            mixer = self.mixer(layer)
            for name, value in type(mixer).values().items():
                if value.reason(mixer) is not None or name == "state_input":
                    continue
                with self.model.trace(self.ids):
                    read = getattr(mixer, name).clone().save()
                    logits = self.model.logits.save()
                assert isinstance(read, value.layout), f"{name}: {tuple(read.shape)} {read.dtype}"
                host = {"hidden_size": self.model.hidden_size}
                expected = [sizes.get(axis) or host.get(axis) or getattr(mixer, axis) for axis in value.dims]
                assert list(read.shape) == expected, name
                assert_same(logits, self.loaded.clean_logits)

    def test_state_input_of_a_fresh_prompt_is_none(self) -> None:
        for layer in self.recurrent:
            with self.model.trace(self.ids):
                found = [self.mixer(layer).state_input].save()
            assert found == [None]

    def test_every_value_is_the_bare_kernels(self) -> None:
        """Those that cannot be edited as well; bit by bit."""
        for layer in self.recurrent:
            names = (*self.entering(layer), "attention_head_outputs", "state_output")
            expected, read = self.kernels(names, layer=layer), self.read_mixer(layer)
            for name in names:
                assert_same(read[name], expected[name])
            assert_same(read["logits"], self.loaded.clean_logits)

    def test_kernel_values_can_be_read_in_any_order(self) -> None:
        mixer, expected = self.mixer(), self.read_mixer(self.mixed)
        for names in (self.entering(), self.entering()[::-1]):
            with self.model.trace(self.ids):
                first, last = (getattr(mixer, name).clone().save() for name in (names[0], names[-1]))
                outputs = mixer.attention_head_outputs.clone().save()
            for name, value in ((names[0], first), (names[-1], last), ("attention_head_outputs", outputs)):
                assert_same(value, expected[name])

    # -- the recurrence -----------------------------------------------------------------------------------------------

    def test_recurrence_of_the_values(self) -> None:
        """In float64, from what is served: the head outputs, and the state after the last token."""
        for layer in self.recurrent:
            read = self.read_mixer(layer)
            states, outputs = self.recurrence_of(self.computed_from(read), layer)
            assert (read["decays"] <= 0).all() if "decays" in read else True
            assert_close(read["attention_head_outputs"].double(), outputs, ULPS_OF_A_RECURRENCE, torch.float32)
            assert_close(read["state_output"].double(), states[:, -1], ULPS_OF_A_RECURRENCE, torch.float32)
            assert states[:, -1].any() and outputs.any()

    def test_effective_attention(self) -> None:
        """What a one in a token's value comes to at each later token; contracted with the values, the head outputs."""
        for layer in self.recurrent:
            mixer, read = self.mixer(layer), self.read_mixer(layer)
            with self.model.trace(self.ids):
                weights = mixer.effective_attention.clone().save()
                logits = self.model.logits.save()
            assert_same(logits, self.loaded.clean_logits)
            values = {name: v.double() for name, v in self.computed_from(read).items() if v is not None}
            expected = self.RECURRENCE.weights(values)
            assert weights.dtype == torch.float32
            assert_close(weights.double(), expected, ULPS_OF_A_RECURRENCE, torch.float32)
            assert not weights.triu(1).any()
            _, outputs = self.RECURRENCE.run({**values, "initial": None}, {})
            mixed = "bhqk,bkhp->bqhp" if values["attention_values"].dim() == 4 else "bhqk,bkh->bqh"
            contracted = torch.einsum(mixed, weights.double(), values["attention_values"])
            assert_close(contracted, outputs, ULPS_OF_A_RECURRENCE, torch.float32)
            with pytest.raises(AttributeError, match="effective_attention"), self.model.trace(self.ids):
                mixer.effective_attention = weights

    # -- the cache ----------------------------------------------------------------------------------------------------

    def test_cache_receives_the_final_state(self) -> None:
        """transformers' own cache, after a prompt, a decode step, and several tokens over a cache; bit by bit."""
        for layer in self.recurrent:
            before, cache, ours = 0, None, None
            for length in (4, 1, 3):
                ids = self.tokens(before, length)
                for model in (self.bare, None):
                    if model is None:
                        with torch.no_grad(), self.model.trace(**self.call(ours, ids, before)) as tracer:
                            final = self.mixer(layer).state_output.clone().save()
                            output = tracer.result.save()
                        ours = self.cache_of(output)
                    else:
                        with torch.no_grad():
                            cache = self.cache_of(model(**self.call(cache, ids, before)))
                assert_same(final.detach(), self.state_of(cache, layer))
                assert_same(self.state_of(ours, layer).detach(), self.state_of(cache, layer))
                before += length

    def tokens(self, start: int, length: int) -> Tensor:
        """``length`` tokens from ``start`` on of a text that begins with `ids`."""
        return torch.cat([self.ids, self.ids.flip(0), self.ids], dim=1)[:, start : start + length]

    def call(self, cache: Any, ids: Tensor, before: int) -> dict[str, Any]:
        """What a model is called with for ``ids``, after ``before`` tokens in ``cache``."""
        if cache is None:
            return {**self.inputs(ids), "use_cache": True}
        return self.continued(cache, ids, before)

    def in_calls(self, *lengths: int, layer: int | None = None) -> list[dict[str, Any]]:
        """The mixer's values in each of several calls with so many tokens each, over one cache."""
        read, cache, before = [], None, 0
        mixer = self.mixer(layer)
        names = [*self.entering(layer), "attention_head_outputs", "state_output"]
        for length in lengths:
            with torch.no_grad(), self.model.trace(**self.call(cache, self.tokens(before, length), before)) as tracer:
                found = {}.save()
                initial = mixer.state_input
                found["initial"] = None if initial is None else initial.clone()
                for name in names:
                    found[name] = getattr(mixer, name).clone()
                output = tracer.result.save()
            cache, before = self.cache_of(output), before + length
            read.append({**found, "logits": output.logits})
        return read

    def test_prompt_in_one_call_and_in_several(self) -> None:
        """Token by token, and several tokens over a cache: the same values, each call's state the last one's."""
        for layer in self.recurrent:
            whole = self.in_calls(8, layer=layer)[0]
            for lengths in ((1,) * 8, (3, 1, 4), (5, 3)):
                if not self.RECURRENCE.CONTINUES and any(length > 1 for length in lengths[1:]):
                    continue
                calls = self.in_calls(*lengths, layer=layer)
                if self.LIMITED and 1 in lengths[1:]:
                    assert_differs(torch.cat([call["betas"] for call in calls], dim=1), whole["betas"])
                else:
                    for name in (*self.entering(layer), "attention_head_outputs", "logits"):
                        joined = torch.cat([call[name] for call in calls], dim=1)
                        assert_close(joined, whole[name], ULPS_OF_A_RECURRENCE)
                    assert_close(calls[-1]["state_output"], whole["state_output"], ULPS_OF_A_RECURRENCE)
                assert calls[0]["initial"] is None
                for call, before in zip(calls[1:], calls, strict=False):
                    assert_same(call["initial"], before["state_output"])
                for call in calls:
                    states, outputs = self.recurrence_of(self.computed_from(call), layer)
                    assert_close(call["attention_head_outputs"].double(), outputs, ULPS_OF_A_RECURRENCE, torch.float32)
                    assert_close(call["state_output"].double(), states[:, -1], ULPS_OF_A_RECURRENCE, torch.float32)

    def test_several_tokens_over_a_cache_are_the_bare_models(self) -> None:
        """Whatever transformers makes of it: a scan that starts from zeros says None, and is the bare scan."""
        for layer in self.recurrent:
            read = self.in_calls(3, 4, layer=layer)[1]
            names = (*self.entering(layer), "attention_head_outputs", "state_output")
            with torch.no_grad():
                cache = self.cache_of(self.bare(**self.call(None, self.tokens(0, 3), 0)))
                again = self.call(cache, self.tokens(3, 4), 3)
                expected = self.kernels(names, call=lambda again=again: self.bare(**again), layer=layer)
            for name in names:
                assert_same(read[name], expected[name])
            assert (read["initial"] is None) == (not self.RECURRENCE.CONTINUES)

    def test_steps_of_generation_are_one_forward(self) -> None:
        """Each value of each step is that of the whole text's forward at the same token; steps not read are counted."""
        for layer in self.recurrent:
            mixer = self.mixer(layer)
            names = [*self.entering(layer), "attention_head_outputs"]
            with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                read, initial, final = {name: [] for name in names}.save(), [].save(), [].save()
                for _ in tracer.iter[0:STEPS]:
                    given = mixer.state_input
                    initial.append(None if given is None else given.clone())
                    for name in names:
                        read[name].append(getattr(mixer, name).clone())
                    final.append(mixer.state_output.clone())
                text = tracer.result.save()
            with torch.no_grad(), self.model.trace(text[:, :-1]):
                whole = {name: getattr(mixer, name).clone() for name in names}.save()
            prompt = self.ids.shape[1]
            for name in names:
                assert [value.shape[1] for value in read[name]] == [prompt, *[1] * (STEPS - 1)]
                if self.LIMITED:
                    continue
                assert_close(torch.cat(read[name], dim=1), whole[name], ULPS_OF_A_RECURRENCE)
            assert initial[0] is None
            for given, left in zip(initial[1:], final, strict=False):
                assert_same(given, left)
            with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                late = {}.save()
                for step in tracer.iter[0:STEPS]:
                    if step in (0, 2):
                        late[step, "values"] = mixer.attention_values.clone()
                    if step in (0, 3):
                        late[step, "final"] = mixer.state_output.clone()
            for (step, what), value in late.items():
                assert_same(value, read["attention_values"][step] if what == "values" else final[step])

    # -- padding ------------------------------------------------------------------------------------------------------

    def test_left_padding_of_the_mixer(self) -> None:
        """Each prompt of a padded batch has the values, at its own tokens, and the final state that it has alone."""
        encoded = self.model.tokenizer(PROMPTS, return_tensors="pt", padding=True)
        lengths = encoded["attention_mask"].sum(-1).tolist()
        assert min(lengths) < max(lengths)
        for layer in self.recurrent:
            together = self.read_mixer(layer, PROMPTS)
            names = (*self.entering(layer), "attention_head_outputs")
            padded = dict(self.padded())
            expected = self.kernels((*names, "state_output"), call=lambda p=padded: self.bare(**p), layer=layer)
            for name in (*names, "state_output"):
                assert_same(together[name], expected[name])
            for row, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
                if self.PADDING_MATTERS and length < max(lengths):
                    continue
                alone = self.read_mixer(layer, prompt)
                for name in names:
                    assert_close(together[name][row, -length:], alone[name][0], ULPS_AFTER_MODEL)
                assert_close(together["state_output"][row], alone["state_output"][0], ULPS_AFTER_MODEL)


#: What the recurrence computes, of what `read_mixer` returns.
COMPUTED = ("attention_head_outputs", "state_output", "logits")
