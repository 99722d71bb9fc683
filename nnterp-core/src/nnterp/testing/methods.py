"""The root: what the model is called with and returns, its sizes, and its methods over the values."""

import pytest
import torch

from nnterp import axis_size
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.facts import Facts

PROMPT = "The quick brown fox jumps"


class Methods(Facts):
    # -- the call -----------------------------------------------------------------------------------------------------

    def test_what_the_model_is_called_with(self) -> None:
        model = self.model
        with model.trace(PROMPT):
            ids = model.input_ids.save()
            mask = model.attention_mask.save()
            size = [model.input_size].save()
        expected = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        assert_same(ids, expected)
        assert tuple(size[0]) == ids.shape == mask.shape == (1, expected.shape[1])
        assert mask.bool().all()

    def test_other_ids_can_be_assigned(self) -> None:
        """Of another length; what is derived from them cannot be."""
        model = self.model
        other = self.ids[:1, :4]
        with model.trace(PROMPT):
            model.input_ids = other
            model.attention_mask = torch.ones_like(other)
            logits = model.logits.save()
        assert_same(logits, self.bare(**self.inputs(other)).logits)
        with pytest.raises(AttributeError, match="assign input_ids"), model.trace(PROMPT):
            model.input_size = (1, 4)

    def test_logits_are_the_models(self) -> None:
        with self.model.trace(self.ids) as tracer:
            logits = self.model.logits.save()
            output = self.model.output.save()
            result = tracer.result.save()
        assert_same(logits, self.loaded.clean_logits)
        assert_same(output.logits, logits)
        assert_same(result.logits, logits)

    def test_assigned_logits_are_returned(self) -> None:
        with self.model.trace(self.ids) as tracer:
            self.model.logits = self.model.logits * 0
            result = tracer.result.save()
        assert not result.logits.any()

    def test_next_token_probs(self) -> None:
        model = self.model
        with model.trace(self.ids):
            probs = model.next_token_probs.save()
        assert probs.shape == (2, model.vocab_size)
        assert_close(probs, self.loaded.clean_logits[:, -1].softmax(-1))
        with pytest.raises(AttributeError, match=r"assign model\.logits"), model.trace(self.ids):
            model.next_token_probs = probs

    # -- sizes --------------------------------------------------------------------------------------------------------

    def test_layouts_have_the_sizes_of_the_model(self) -> None:
        """Every axis that is a fact about the model has its size in the tensor served."""
        checked = 0
        for (value, layer), read in self.everything.items():
            host, name = self.host(value, layer)
            described = getattr(type(host), name)
            assert isinstance(read, described.layout)
            for axis, size in zip(described.dims, read.shape, strict=True):
                if axis not in ("batch", "seq", "query", "key", "tokens"):
                    expected = self.OWN_SIZES.get(value, {}).get(axis) or axis_size(host, axis)
                    assert size == expected, f"{axis} of {value}"
                    checked += 1
        assert checked >= 11 * len(self.blocks)

    def test_sizes_are_the_configs(self) -> None:
        model, config = self.model, self.bare.config.get_text_config()
        assert model.num_layers == len(self.blocks) == len(model.layers)
        assert model.hidden_size == config.hidden_size
        assert model.vocab_size == config.vocab_size == self.loaded.clean_logits.shape[-1]
        assert model.num_heads == config.num_attention_heads
        assert 1 <= model.num_kv_heads <= model.num_heads
        assert model.num_heads % model.num_kv_heads == 0
        if self.native(f"layers.0.{self.ATTENTIONS[0]}.o_proj") is not None:
            projection = self.module(f"layers.0.{self.ATTENTIONS[0]}.o_proj")
            assert model.num_heads * model.head_dim in projection.weight.shape
        width = model.intermediate_size
        assert isinstance(width, int)
        shapes = {size for parameter in self.mlp_parameters() for size in parameter.shape}
        assert (getattr(config, self.MLP_WIDTH_KEY) if self.MLP_WIDTH_KEY else width) in shapes
        with pytest.raises(AttributeError, match="def hidden_size"):
            model.hidden_size = 5

    def mlp_parameters(self) -> list[torch.Tensor]:
        """The parameters that say how wide the first block's MLP is."""
        return list(self.module("layers.0.mlp").parameters())

    def test_block_sizes_are_the_modules(self) -> None:
        for layer in self.blocks:
            for host in [host for host in self.ATTENTIONS if self.on(f"{host}.attention_output", layer)]:
                attention = self.envoy(self.model.layers[layer], host)
                sizes = [attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.qk_head_dim]
                assert all(isinstance(size, int) and size > 0 for size in sizes)
                assert attention.num_heads % attention.num_kv_heads == 0
                if self.native(f"layers.{layer}.{host}.o_proj") is not None:
                    assert attention.num_heads * attention.head_dim in attention.o_proj._module.weight.shape
            if self.native(f"layers.{layer}.mlp") is not None and self.on("mlp.mlp_output", layer):
                assert self.model.layers[layer].mlp.intermediate_size == self.mlp_width(layer)

    def mlp_width(self, layer: int) -> int:
        """The width that the MLP of a block says it has."""
        return self.model.intermediate_size

    def mixtures(self) -> list[int]:
        """The blocks whose MLP is a mixture of experts."""
        return []

    def test_blocks_by_what_they_have(self) -> None:
        mlps = [] if self.native("layers.0.mlp") is None else list(self.blocks)
        assert self.model.attention_layers == list(self.blocks)
        assert self.model.mlp_layers == mlps
        assert self.model.linear_attention_layers == []
        assert self.model.moe_layers == self.mixtures()

    # -- methods ------------------------------------------------------------------------------------------------------

    def test_skip_layers(self) -> None:
        model, last = self.model, self.blocks[-1]
        with model.trace(self.ids):
            model.skip_layers(1, -1)
            skipped = model.layers[last].layer_output.save()
            logits = model.logits.save()
        assert_same(skipped, self.everything["layer_output", 0])
        assert_same(logits, model.project_on_vocab(skipped))

        with model.trace(self.ids):
            model.skip_layer(1)
            left = model.layers[1].layer_output.save()
            logits = model.logits.save()
        assert_same(left, self.everything["layer_output", 0])
        expected = self.edited("layer_output", 1, lambda _: left)
        assert_same(logits, expected)

    def test_skip_with(self) -> None:
        model = self.model
        hidden = torch.zeros_like(self.everything["layer_output", 0])
        with model.trace(self.ids):
            model.skip_layers(0, 0, skip_with=hidden)
            left = model.layers[0].layer_output.clone().save()
            entered = model.layers[1].layer_input.clone().save()
            logits = model.logits.save()
        assert not left.any() and not entered.any()
        assert_same(logits, self.edited("layer_output", 0, torch.zeros_like))

    def test_steer(self) -> None:
        model, clean = self.model, self.everything["layer_output", 0]
        vector = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(3))
        for rows, positions, index in (
            (None, -1, (slice(None), [-1])),
            (None, None, (slice(None), slice(None))),
            (1, [0, 2], ([1], [0, 2])),
            ([0], slice(1, 3), ([0], slice(1, 3))),
        ):
            with model.trace(self.ids):
                model.steer(0, vector, factor=2.0, token_positions=positions, batch_index=rows)
                stream = model.layers[0].layer_output.clone().save()
                logits = model.logits.save()
            expected = clean.clone()
            expected[index] += 2.0 * vector
            assert_same(stream, expected)
            assert_same(logits, self.edited("layer_output", 0, lambda _, new=expected: new))
            assert_differs(logits, self.loaded.clean_logits)

        def steered(stream: torch.Tensor) -> torch.Tensor:
            return stream + vector

        with model.trace(self.ids):
            model.steer([0, 2], vector)
            logits = model.logits.save()
        twice = {("layer_output", layer): steered for layer in (0, 2)}
        assert_same(logits, self.oracle([], edits=twice).output.logits)

    def test_project_on_vocab(self) -> None:
        """The logit lens of the last block is the logits, on a saved value and on a live one."""
        model, last = self.model, self.blocks[-1]
        with model.trace(self.ids):
            stream = model.layers[last].layer_output.save()
            lens = model.project_on_vocab(stream).save()
            logits = model.logits.save()
        assert_close(lens, logits, ULPS_AFTER_MODEL)
        assert_close(model.project_on_vocab(stream), logits, ULPS_AFTER_MODEL)

    def test_closest_tokens(self) -> None:
        model = self.model
        stream = self.everything["layer_output", self.blocks[-1]]
        best = model.get_topk_closest_tokens(stream[0, -1:], k=3)
        assert len(best) == 1 and len(best[0]) == 3
        assert all(isinstance(token, str) and 0 < p <= 1 for token, p in best[0].items())
        assert sum(best[0].values()) <= 1 + 1e-4
        probs = self.loaded.clean_logits[0, -1].softmax(-1)
        assert list(best[0].values()) == pytest.approx(probs.topk(3).values.tolist(), rel=1e-4)
        assert len(model.get_topk_closest_tokens(stream, k=2)) == stream.shape[0] * stream.shape[1]
