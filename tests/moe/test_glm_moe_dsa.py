"""GLM-MoE-DSA: a sparse selection of keys, a block that returns a tuple, dense first blocks."""

import pytest
import torch

from nnterp.testing import BiasedMixtureSuite
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_same


class TestGlmMoeDsa(BiasedMixtureSuite):
    FAMILY = "glm_moe_dsa"
    CONFIG = {
        "model_type": "glm_moe_dsa",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 24,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "inside its experts", "mlp.mlp_neurons": "inside its experts"}
    REFUSES_IN_PLACE = ("self_attn.attention_values",)
    SHARED = "shared_experts"
    EXPERTS_KEY = "n_routed_experts"
    DENSE = (0,)
    OUTPUTS_LOGITS = False
    LAYOUTS = {
        "selected_keys": {},
        "shared_selection": {"config": {"indexer_types": ["full", "shared", "shared"], "index_topk": 5}},
    }

    @property
    def shares(self):
        return self.layout_name == "shared_selection"

    def test_skip_with(self):
        """The first block's selection, which the others share, has none before it to be handed on in its place."""
        if not self.shares:
            return super().test_skip_with()
        hidden = torch.zeros_like(self.everything["layer_output", 0])
        with pytest.raises(ValueError, match="previous full indexer"), self.model.trace(self.ids):
            self.model.skip_layer(0, skip_with=hidden)
        with self.model.trace(self.ids):
            logits = self.model.logits.save()
        return assert_same(logits, self.loaded.clean_logits)

    def test_selection_of_a_block_is_that_of_the_blocks_that_share_it(self):
        """Read and edited at the indexer: an edit changes the keys that this block sees and those that share it do."""
        with self.model.trace(self.ids):
            chosen = self.model.layers[0].self_attn.indexer.output.clone().save()
            returned = [].save()
            for block in self.model.layers:
                returned.append(block.output[1].clone())
        for layer in self.blocks:
            shared = self.model.layers[layer].self_attn._module.indexer is None
            assert shared == (self.shares and layer > 0)
            if self.shares:
                assert_same(returned[layer], chosen)

        first = torch.zeros_like(chosen)  # the first token alone

        def only_first(module, args, output):
            return first

        handle = self.module("layers.0.self_attn").indexer.register_forward_hook(only_first)
        expected = self.bare(**self.inputs()).logits
        handle.remove()
        with self.model.trace(self.ids):
            self.model.layers[0].self_attn.indexer.output = first
            patterns = [].save()
            for block in self.model.layers:
                patterns.append(block.self_attn.attention_probabilities.clone())
            logits = self.model.logits.save()
        assert_close(logits, expected, ULPS_AFTER_MODEL)
        for layer in self.blocks:
            assert (not patterns[layer][..., 1:].any()) == (layer == 0 or self.shares)

    @pytest.mark.parametrize("skipped", [1, 2])
    def test_skipped_block_hands_on_the_selection(self, skipped):
        with self.model.trace() as tracer:
            logits = [].save()
            for row in range(2):
                with tracer.invoke(self.ids[row : row + 1]):
                    self.model.skip_layer(skipped)
                    logits.append(self.model.logits.clone())
        expected = self.oracle([], edits={("layer_output", skipped): self.entering(skipped)}).output.logits
        assert_close(torch.cat(list(logits)), expected, ULPS_AFTER_MODEL)

    def entering(self, layer):
        stream = self.everything["layer_input", layer]
        return lambda _: stream
