"""`EngineSuite`: what holds of a family on the vLLM engine, against transformers in float32 on the same weights.

Subclass it with the facts of `nnterp.testing.facts.Facts` (``FAMILY``, ``CONFIG``, ``NATIVE``, ``SITES``,
``FORMULA``), which say where each value is in the bare transformers model. One engine is started for a class, in this
process: ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` has to be set before vllm is imported. A block travels to the engine with
what it names, so none names ``self``.
"""

import gc
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from nnterp import Unavailable, families
from nnterp.testing.comparing import MASKED
from nnterp.testing.edits import edit_of, moved
from nnterp.testing.facts import Facts
from nnterp.testing.oracles import greedy

#: What two implementations of one model may differ by in float32, as a share of the largest value.
SHARE = 1e-4

#: The values of a block in the order of the engine's forward.
BLOCK = (
    "layer_input",
    "attention_norm_output",
    "self_attn.attention_queries",
    "self_attn.attention_keys",
    "self_attn.attention_values",
    "self_attn.attention_scores",
    "self_attn.attention_probabilities",
    "self_attn.attention_head_outputs",
    "self_attn.attention_premix",
    "self_attn.attention_output",
    "linear_attn.attention_head_outputs",
    "linear_attn.attention_output",
    "layer_mid",
    "mlp_norm_output",
    "mlp_input",
    "mlp.router_logits",
    "mlp.mlp_activation",
    "mlp.mlp_neurons",
    "mlp_neurons",
    "mlp.mlp_output",
    "mlp_output",
    "layer_output",
)
READ_ONLY = ("self_attn.attention_scores", "self_attn.attention_probabilities")
ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0}


def assert_share(actual: Tensor, expected: Tensor, share: float = SHARE) -> None:
    """``actual`` is ``expected`` up to ``share`` of the largest value; the same entries are masked."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    hidden = expected.abs() > MASKED
    assert torch.equal(actual.abs() > MASKED, hidden), "other entries are masked"
    actual, expected = actual.masked_fill(hidden, 0).double(), expected.masked_fill(hidden, 0).double()
    off, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert off <= share * scale, f"off by {off:.3g} of {scale:.3g}"


class EngineSuite(Facts):
    """The statements. A value is checked where the block at `EDITED` serves it.

    Attributes:
        ENGINE: Further arguments of the engine.
        UNAVAILABLE: Part of the reason by support key, for what no block has on the engine.
        ROOT_UNAVAILABLE: The root's values that are not there, beside the engine's own.
        SERVED: The values that the blocks have, of `BLOCK`.
    """

    ENGINE: ClassVar[dict[str, Any]] = {}
    SERVED: ClassVar[tuple[str, ...]]
    UNAVAILABLE: ClassVar[dict[str, str]] = {}
    engine: ClassVar[Any]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _engine(cls) -> Iterator[None]:
        yield
        started = cls.__dict__.get("started")
        if started is not None:
            started.vllm_entrypoint.llm_engine.engine_core.shutdown()
            del cls.started
            gc.collect()

    @property
    def model(self) -> Any:
        """The engine, started at first use."""
        if "started" not in type(self).__dict__:
            from nnterp_vllm import StandardizedVLLM

            options = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, **self.ENGINE}
            type(self).started = StandardizedVLLM(str(self.loaded.directory), dispatch=True, **options)
        return type(self).started

    @cached_property
    def family(self) -> Any:
        return families.lookup(self.FAMILY, engine="vllm")

    @property
    def prompt(self) -> list[int]:
        """The token ids that are traced."""
        return self.ids[0].tolist()

    def inputs(self, ids: Tensor | None = None, **more: Tensor) -> dict[str, Tensor]:
        return super().inputs(self.ids[:1] if ids is None else ids, **more)

    def values_of(self, layer: int) -> list[str]:
        """Those of `SERVED` that block ``layer`` has."""
        return [value for value in BLOCK if value in self.SERVED and self.layers_of(value, [layer])]

    def read_block(self, layer: int) -> dict[str, Tensor]:
        """Every value of a block, from one trace."""
        places = [(value, self.host(value, layer)) for value in self.values_of(layer)]
        with self.model.trace(self.prompt, **ONE_TOKEN):
            read = {}.save()
            for value, (host, name) in places:
                read[value] = getattr(host, name)
        return read

    # -- names --------------------------------------------------------------------------------------------------------

    def test_names(self):
        model = self.model
        assert model.family is self.family
        for name in ("layers", "embed_tokens", "norm"):
            assert name in model.__dict__
        assert len(model.layers) == model.num_layers == len(self.blocks)

    def test_sizes(self):
        config = self.bare.config
        assert self.model.hidden_size == config.hidden_size
        assert self.model.vocab_size == config.vocab_size

    def test_support(self):
        support = self.model.support()
        for value in BLOCK:
            if value in self.SERVED:
                layers = self.layers_of(value, self.blocks)
                missing = set(support[value] or {})
                assert missing == set(self.blocks) - set(layers), f"{value}: {support[value]}"
        for value, words in self.UNAVAILABLE.items():
            reasons = support[value]
            assert set(reasons) == set(self.blocks)
            assert all(words in reason for reason in reasons.values())
        assert {"attention_mask", "lm_head_output"} == {n for n, r in support.items() if isinstance(r, str)}

    def test_what_is_not_there(self):
        for value in self.UNAVAILABLE:
            host, name = self.host(value, self.EDITED)
            with pytest.raises(Unavailable, match=name):
                getattr(host, name)
        with pytest.raises(NotImplementedError):
            self.model.order()
        with pytest.raises(NotImplementedError):
            self.model.rank("logits")

    # -- values -------------------------------------------------------------------------------------------------------

    def test_values(self):
        for layer in self.blocks:
            read = self.read_block(layer)
            expected = self.oracle(read, [layer])
            for value, tensor in read.items():
                host, name = self.host(value, layer)
                assert isinstance(tensor, getattr(type(host), name).layout), value
                assert_share(tensor, self.as_served(value, expected[value, layer]))

    def as_served(self, value: str, tensor: Tensor) -> Tensor:
        """A tensor of the bare model as the engine has it: what lies behind a mask is ``-inf`` here."""
        return tensor.masked_fill(tensor < -MASKED, float("-inf")) if value.endswith("scores") else tensor

    def test_root_values(self):
        model = self.model
        with model.trace(self.prompt, **ONE_TOKEN):
            ids = model.input_ids.save()
            size = model.input_size
            embedded = model.token_embeddings.save()
            normed = model.final_norm_output.save()
            sizes = [tuple(size)].save()
            logits = model.logits.save()
        assert ids.tolist() == [self.prompt] and sizes == [(1, len(self.prompt))]
        expected = self.oracle(["token_embeddings", "final_norm_output"])
        assert_share(embedded, self.embedded(expected["token_embeddings", None]))
        assert_share(normed, expected["final_norm_output", None])
        assert logits.shape == (1, 1, model.vocab_size)
        assert_share(logits[:, -1], expected.output.logits[:, -1])

    def embedded(self, embeddings: Tensor) -> Tensor:
        """The bare embedding's output before what its module scales it by."""
        return embeddings

    def test_the_identity(self):
        for layer in self.blocks:
            read = self.read_block(layer)
            parts = [v for v in read if v.endswith(("attention_output", "mlp_output"))]
            assert_share(sum(read[part] for part in parts) + read["layer_input"], read["layer_output"], 1e-6)

    def test_reading_changes_nothing(self):
        model, places = self.model, [self.host(value, self.EDITED) for value in self.values_of(self.EDITED)]
        with model.trace(self.prompt, **ONE_TOKEN):
            plain = model.logits.save()
        with model.trace(self.prompt, **ONE_TOKEN):
            kept = [].save()
            for host, name in places:
                kept.append(getattr(host, name))
            logits = model.logits.save()
        assert torch.equal(plain, logits)

    def test_values_are_private_copies(self):
        """What was read stays what it was when the model goes on."""
        model = self.model
        with model.trace(self.prompt, **ONE_TOKEN):
            kept = model.layers[0].layer_output.save()
            copied = model.layers[0].layer_output.clone().save()
            model.logits.save()
        assert torch.equal(kept, copied)

    # -- edits --------------------------------------------------------------------------------------------------------

    def edited_trace(self, value: str, in_place: bool) -> Tensor:
        model, (host, name), edit = self.model, self.host(value, self.EDITED), edit_of(value)
        with model.trace(self.prompt, **ONE_TOKEN):
            if in_place:
                getattr(host, name)[:] = edit(getattr(host, name).clone())
            else:
                setattr(host, name, edit(getattr(host, name)))
            logits = model.logits.save()
        return logits

    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize("written", [value for value in BLOCK if value not in READ_ONLY])
    def test_edits(self, written, in_place):
        value = written
        if value not in self.SERVED or not self.layers_of(value, [self.EDITED]):
            return
        got = self.edited_trace(value, in_place)
        expected = self.edited(value, self.EDITED, edit_of(value))[:, -1]
        assert_share(got[:, -1], expected)
        clean = self.clean
        assert (got[:, -1] - clean).abs().max() > 1e-3 * clean.abs().max(), "the edit changed nothing"

    @property
    def clean(self) -> Tensor:
        with torch.no_grad():
            return self.bare(**self.inputs()).logits[:, -1]

    def test_two_values_of_one_place_edited(self):
        """Queries and keys go into the attention together: an edit of one keeps that of the other."""
        if "self_attn.attention_keys" not in self.SERVED:
            return
        model, attention = self.model, self.model.layers[self.EDITED].self_attn
        with model.trace(self.prompt, **ONE_TOKEN):
            attention.attention_queries[:, 0] = 0
            attention.attention_keys = moved(attention.attention_keys)
            logits = model.logits.save()

        def zeroed(queries: Tensor) -> Tensor:
            queries[:, 0] = 0
            return queries

        edits = {
            ("self_attn.attention_queries", self.EDITED): zeroed,
            ("self_attn.attention_keys", self.EDITED): moved,
        }
        assert_share(logits[:, -1], self.oracle([], edits=edits).output.logits[:, -1])

    @pytest.mark.parametrize("name", ["token_embeddings", "final_norm_output"])
    def test_root_edits(self, name):
        model = self.model
        with model.trace(self.prompt, **ONE_TOKEN):
            setattr(model, name, moved(getattr(model, name)))
            logits = model.logits.save()
        assert_share(logits[:, -1], self.edited(name, None, self.root_edit(name))[:, -1])

    def root_edit(self, name: str) -> Any:
        """The edit of a root value as the bare model has it."""
        return moved

    def test_logits_written(self):
        model = self.model
        with model.trace(self.prompt, **ONE_TOKEN) as tracer:
            logits = torch.full_like(model.logits, -10.0)
            logits[..., 7] = 10.0
            model.logits = logits
            result = tracer.result.save()
        assert result.outputs[0].token_ids[0] == 7

    def test_steering_and_skipping(self):
        model, layer = self.model, self.EDITED
        vector = torch.linspace(-1, 1, model.hidden_size)
        with model.trace(self.prompt, **ONE_TOKEN):
            model.steer(layer, vector, factor=2.0, token_positions=-1)
            steered = model.logits.save()

        def add(stream: Tensor) -> Tensor:
            stream[:, -1] += 2.0 * vector
            return stream

        assert_share(steered[:, -1], self.edited("layer_output", layer, add)[:, -1])
        with model.trace(self.prompt, **ONE_TOKEN):
            model.skip_layer(layer)
            skipped = model.logits.save()
        before = self.oracle(["layer_input"], [layer])["layer_input", layer]
        expected = self.oracle([], edits={("layer_output", layer): lambda _: before}).output.logits
        assert_share(skipped[:, -1], expected[:, -1])

    def test_lens(self):
        model = self.model
        with model.trace(self.prompt, **ONE_TOKEN):
            stream = model.layers[-1].layer_output
            lens = model.project_on_vocab(stream).save()
            logits = model.logits.save()
            probabilities = model.next_token_probs.save()
        with torch.no_grad():
            expected = self.bare(**self.inputs()).logits
        assert_share(lens, expected)
        assert_share(lens[:, -1], logits[:, -1])
        assert_share(probabilities, expected[:, -1].softmax(-1))

    # -- generation ---------------------------------------------------------------------------------------------------

    def test_generation(self):
        model, steps, layer = self.model, 4, self.EDITED
        expected = self.bare.generate(**self.inputs(), **greedy(steps))[0, -steps:].tolist()
        with model.trace(self.prompt, max_tokens=steps, min_tokens=steps, temperature=0.0) as tracer:
            shapes, tokens = [].save(), [].save()
            for _ in tracer.iter[:steps]:
                shapes.append(tuple(model.layers[layer].layer_output.shape))
                tokens.append(model.logits[0, -1].argmax().item())
        assert tokens == expected
        width = model.hidden_size
        assert shapes == [(1, len(self.prompt), width), *[(1, 1, width)] * (steps - 1)]

    def test_an_edit_at_a_later_step(self):
        model, steps, layer = self.model, 3, self.EDITED
        with model.trace(self.prompt, max_tokens=steps, min_tokens=steps, temperature=0.0) as tracer:
            seen = [].save()
            for step in tracer.iter[:steps]:
                if step == 1:
                    model.layers[layer].layer_output[:] = 0
                seen.append(model.logits[0, -1].clone())
        call = lambda: self.bare.generate(  # noqa: E731
            **self.inputs(), **greedy(steps), output_logits=True, return_dict_in_generate=True
        )
        run = self.oracle([], edits={("layer_output", layer): torch.zeros_like}, call=call, at_call=1)
        assert_share(seen[1], run.output.logits[1][0])

    def test_the_pattern_of_a_decode_step(self):
        if "self_attn.attention_probabilities" not in self.SERVED:
            return
        model, attention = self.model, self.model.layers[self.EDITED].self_attn
        with (
            pytest.raises(RuntimeError, match="decode step"),
            model.trace(self.prompt, max_tokens=3, min_tokens=3, temperature=0.0) as tracer,
        ):
            for _ in tracer.iter[:2]:
                attention.attention_probabilities.save()
        self.runs()

    # -- batches ------------------------------------------------------------------------------------------------------

    def test_several_invokes(self):
        """One batch; each has its own rows and its own edit."""
        model, other = self.model, self.ids[1].tolist()[:4]
        layer = self.EDITED
        with model.trace(**ONE_TOKEN) as tracer:
            with tracer.invoke(self.prompt):
                model.layers[layer].layer_output[:, -1] *= 0.5
                first = model.logits.save()
            with tracer.invoke(other):
                stream = model.layers[layer].layer_output.save()
                second = model.logits.save()

        def halved(tensor: Tensor) -> Tensor:
            tensor[:, -1] *= 0.5
            return tensor

        assert_share(first[:, -1], self.edited("layer_output", layer, halved)[:, -1])
        inputs = super().inputs(torch.tensor([other]))
        expected = self.oracle(["layer_output"], [layer], inputs=inputs)
        assert_share(stream, expected["layer_output", layer])
        assert_share(second[:, -1], expected.output.logits[:, -1])

    # -- mistakes -----------------------------------------------------------------------------------------------------

    def runs(self) -> None:
        """The engine answers as before."""
        model = self.model
        with model.trace(self.prompt, **ONE_TOKEN):
            logits = model.logits.save()
        assert_share(logits[:, -1], self.clean)

    def test_a_block_that_raises(self):
        model = self.model
        with pytest.raises(RuntimeError, match="ZeroDivisionError"), model.trace(self.prompt, **ONE_TOKEN):
            model.layers[0].layer_output.save()
            1 / 0  # noqa: B018
        self.runs()

    def test_another_shape(self):
        model = self.model
        with pytest.raises((ValueError, RuntimeError), match="layer_output"), model.trace(self.prompt, **ONE_TOKEN):
            model.layers[0].layer_output = model.layers[0].layer_output[:, :-1]
        self.runs()

    def test_out_of_order(self):
        model = self.model
        with pytest.raises(Exception, match="layer_output") as caught, model.trace(self.prompt, **ONE_TOKEN):
            model.layers[-1].layer_output.save()
            model.layers[0].layer_output.save()
        assert "order" in str(caught.value)
        self.runs()

    def test_read_only(self):
        model = self.model
        with pytest.raises((AttributeError, RuntimeError), match="read-only"), model.trace(self.prompt, **ONE_TOKEN):
            model.input_ids = model.input_ids
        if "self_attn.attention_scores" in self.SERVED:
            attention = model.layers[self.EDITED].self_attn
            with (
                pytest.raises((AttributeError, RuntimeError), match="read-only"),
                model.trace(self.prompt, **ONE_TOKEN),
            ):
                attention.attention_scores = attention.attention_scores
        self.runs()

    def test_two_prompts_in_one_invoke(self):
        model = self.model
        with pytest.raises(ValueError, match="prompt"), model.trace([self.prompt, self.prompt], **ONE_TOKEN):
            model.logits.save()
        self.runs()
