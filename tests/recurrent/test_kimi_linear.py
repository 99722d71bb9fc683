"""Kimi Linear: delta attention with a decay per channel among latent attention, dense blocks and biased mixtures."""

import pytest
import torch

from nnterp.components import ChannelGates, ChannelLinearAttention
from nnterp.components.standard import NoSuchName
from nnterp.testing import BiasedMixtureSuite, RecurrentSuite
from nnterp.testing.recurrences import DeltaRule

INSIDE = dict.fromkeys(("mlp.mlp_activation", "mlp.mlp_neurons"), "inside its experts")
LINEAR, FULL = "linear_attention", "full_attention"


class ChannelDeltaRule(DeltaRule):
    PROMPT, STEP = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"


class TestKimiLinear(RecurrentSuite, BiasedMixtureSuite):
    FAMILY = "kimi_linear"
    CONFIG = {
        "model_type": "kimi_linear",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
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
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "num_local_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {}
    RECURRENCE = ChannelDeltaRule()
    BLOCKS = {"linear_attn": (0, 2), "self_attn": (1, 3), **dict.fromkeys(INSIDE, (0, 1))}
    ELSEWHERE = INSIDE
    MIXER_WIDTH_KEYS = {"heads": "linear_num_heads", "key_dim": "linear_head_dim", "value_dim": "linear_head_dim"}
    REFUSES_IN_PLACE = (
        "self_attn.attention_values",
        "linear_attn.attention_queries",
        "linear_attn.attention_keys",
    )
    EDITED = 3
    DENSE = (0, 1)
    SHARED = "shared_experts"
    GROUPED = True
    LAYOUTS = {
        "groups": {},
        "one_group": {
            "config": {
                "q_lora_rank": None,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": False,
                "layer_types": [FULL, LINEAR, LINEAR, FULL],
                "mlp_layer_types": ["sparse", "sparse", "dense", "sparse"],
            },
            "BLOCKS": {"linear_attn": (1, 2), "self_attn": (0, 3), **dict.fromkeys(INSIDE, (2,))},
            "DENSE": (2,),
            "GROUPED": False,
            "MLP_WIDTH_KEY": "moe_intermediate_size",
        },
    }

    def native(self, path):
        """transformers calls either mixer of a block its ``self_attn``."""
        found = super().native(path)
        return None if found is None else found.replace(".linear_attn", ".self_attn")

    def test_delta_attention_is_no_softmax_attention(self):
        for layer in self.BLOCKS["linear_attn"]:
            block = self.model.layers[layer]
            assert isinstance(block.linear_attn, ChannelLinearAttention)
            assert type(block.linear_attn).decays.layout is ChannelGates
            assert block.linear_attn.path == f"model.model.layers.{layer}.self_attn"
            assert not hasattr(block, "self_attn")
            with pytest.raises(NoSuchName, match=r"no self_attn module.*mean linear_attn\?"):
                self.model.get(f"model.layers.{layer}.self_attn")

    def test_keys_are_expanded_and_share_their_last_channels(self):
        for layer in self.BLOCKS["self_attn"]:
            keys = self.everything["self_attn.attention_keys", layer]
            shared = keys[..., -4:]
            assert torch.equal(shared, shared[:, :1].expand_as(shared))
            assert not torch.equal(keys[:, :1].expand_as(keys), keys)
