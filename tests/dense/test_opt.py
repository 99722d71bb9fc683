"""OPT: no MLP module, a stream that the block flattens, and the 350m layout with norms on the stream."""

from typing import Any

import torch
from torch import nn

from nnterp.testing import FamilySuite, Formula, Site
from nnterp.testing.comparing import assert_close

NO_MLP = {"mlp_input": "no mlp module"}
POST_NORM = "norms what its sublayers return"

#: How many rows the bare model was last called with, which its blocks do not know once they have flattened the stream.
LAST_CALL = {"rows": 0}


def count_rows(model: nn.Module, args: tuple, kwargs: dict) -> None:
    LAST_CALL["rows"] = len(kwargs["input_ids"])


def unflattened(module: str, side: str = "output") -> Site:
    """A value that the block has with batch and sequence flattened."""
    return Site(
        module,
        side,
        read=lambda call, tensor: tensor.unflatten(0, (LAST_CALL["rows"], -1)),
        write=lambda call, tensor, value: value.flatten(0, 1),
    )


class ScaledQueries(Formula):
    """Queries that are scaled already."""

    def scores(self, module, query, key, mask, scaling, **options):
        assert scaling == 1.0
        return super().scores(module, query, key, mask, scaling)


class TestOPT(FamilySuite):
    FAMILY = "opt"
    CONFIG = {
        "model_type": "opt",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "ffn_dim": 48,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    NATIVE = {
        "embed_tokens": "model.decoder.embed_tokens",
        "layers": "model.decoder.layers",
        "norm": "model.decoder.final_layer_norm",
        "layers.0.input_layernorm": "model.decoder.layers.0.self_attn_layer_norm",
        "layers.0.post_attention_layernorm": "model.decoder.layers.0.final_layer_norm",
        "layers.0.self_attn.o_proj": "model.decoder.layers.0.self_attn.out_proj",
        "layers.0.mlp": None,
    }
    EXPECTED_UNAVAILABLE = NO_MLP
    SITES = {
        "layer_mid": Site("post_attention_layernorm", "input"),
        "mlp_norm_output": unflattened("post_attention_layernorm"),
        "mlp_neurons": unflattened("fc2", "input"),
        "mlp_output": unflattened("fc2"),
    }
    FORMULA = ScaledQueries()

    @staticmethod
    def all_values() -> list[str]:
        return [*FamilySuite.all_values(), "mlp_neurons", "mlp_output"]

    def test_contributions_are_what_is_left_of_them_after_dropout(self):
        block = self.model.layers[1]
        self.model._module.train()
        try:
            with torch.no_grad(), self.model.trace(self.ids):
                start = block.layer_input.clone().save()
                attention = block.self_attn.attention_output.clone().save()
                mid = block.layer_mid.clone().save()
                mlp = block.mlp_output.clone().save()
        finally:
            self.model._module.eval()
        assert attention.eq(0).any() and mlp.eq(0).any()
        summed = start + attention
        if not block._module.do_layer_norm_before:
            summed = block._module.self_attn_layer_norm(summed)
        assert_close(mid, summed.flatten(0, 1))

    def oracle(self, *arguments: Any, **options: Any) -> Any:
        bare = options.get("bare") or self.bare
        handle = bare.register_forward_pre_hook(count_rows, with_kwargs=True)
        run = super().oracle(*arguments, **options)
        handle.remove()
        return run

    def rest_of_block(self, block, mid):
        normed = block("post_attention_layernorm")(mid)
        return (mid + mlp(block, normed)).unflatten(0, (LAST_CALL["rows"], -1))

    def mlp_parameters(self):
        return [*self.module("layers.0.fc1").parameters(), *self.module("layers.0.fc2").parameters()]

    def norms(self, layer: int) -> tuple:
        """What the block does to each of its two sums."""
        return nn.Identity(), nn.Identity()

    def test_mid_is_the_stream_after_attention(self):
        for layer in self.blocks:
            block, (norm, _) = self.of_block(layer), self.norms(layer)
            total = block("layer_input") + block("self_attn.attention_output")
            assert_close(block("layer_mid"), norm(total).detach().flatten(0, 1))

    def test_contributions_add_up_to_the_output(self):
        for layer in self.blocks:
            block, (_, norm) = self.of_block(layer), self.norms(layer)
            stream = block("layer_mid").view_as(block("layer_input"))
            assert_close(block("layer_output"), norm(stream + block("mlp_output")).detach())

    def test_neurons_make_the_output(self):
        for layer in self.blocks:
            made = self.module(f"layers.{layer}.fc2")(self.everything["mlp_neurons", layer])
            assert_close(self.everything["mlp_output", layer], made.detach())


class TestOPT350M(TestOPT):
    """Norms on the stream after each sum, no final norm, embeddings narrower than the stream."""

    CONFIG = {**TestOPT.CONFIG, "do_layer_norm_before": False, "word_embed_proj_dim": 16}
    NATIVE = {**TestOPT.NATIVE, "norm": None}
    EXPECTED_UNAVAILABLE = {
        **NO_MLP,
        "attention_norm_output": POST_NORM,
        "mlp_norm_output": POST_NORM,
        "final_norm_output": "no norm module",
    }
    ATTENTION_INPUT = "layer_input"
    SITES = {**TestOPT.SITES, "layer_mid": Site("fc1", "input"), "normed_sum": Site("input_layernorm")}
    OWN_SIZES = {"token_embeddings": {"hidden_size": 16}}

    def rest_of_block(self, block, mid):
        return block("post_attention_layernorm")(mid + mlp(block, mid)).unflatten(0, (LAST_CALL["rows"], -1))

    def mid_through_attention(self, edit):
        return {("normed_sum", self.EDITED): lambda mid: edit(mid.flatten(0, 1)).view_as(mid)}

    def norms(self, layer):
        return self.module(f"layers.{layer}.input_layernorm"), self.module(f"layers.{layer}.post_attention_layernorm")


def mlp(block, entering):
    return block("fc2")(block("activation_fn")(block("fc1")(entering)))
