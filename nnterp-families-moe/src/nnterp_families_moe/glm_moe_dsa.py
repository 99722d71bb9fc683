"""GLM-MoE-DSA: DeepSeek-V3's block, whose queries each see the keys that an indexer selects.

The selection is the indexer's: ``self_attn.indexer.output``. A block without one (``indexer_types``) shares that of the
block before it, so a block returns its selection beside the stream, and a skipped one hands on what it is called with.
The first block is called with none: where it is skipped, a block that shares its selection raises ValueError.
"""

from typing import Any

from torch import Tensor
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

from nnterp import components
from nnterp_families_moe.deepseek_v3 import RENAME, Moe, head_dim, qk_head_dim

__all__ = ["ENVOYS", "RENAME", "Attention", "Layer", "Mlp", "Moe", "head_dim", "qk_head_dim"]


class Layer(components.Layer):
    """GLM-MoE-DSA's block, which returns the stream and the keys selected."""

    returns_tuple = True

    def _returned(self, hidden: Tensor) -> Any:
        return hidden, self.inputs[1]["prev_topk_indices"]


class Attention(components.Attention):
    """GLM-MoE-DSA's latent attention: scores of keys that were not selected are masked."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


ENVOYS = {
    modeling.GlmMoeDsaDecoderLayer: Layer,
    modeling.GlmMoeDsaAttention: Attention,
    modeling.GlmMoeDsaMLP: Mlp,
    modeling.GlmMoeDsaMoE: Moe,
    modeling.GlmMoeDsaTopkRouter: components.BiasedRouter,
}
