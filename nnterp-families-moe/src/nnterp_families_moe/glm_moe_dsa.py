"""GLM-MoE-DSA: DeepSeek-V3's block, whose queries each see the keys that an indexer selects.

The selection is the indexer's: ``self_attn.indexer.output``. A block may share that of the block before it, so the
block returns it beside the stream, and a block whose selection others share cannot be skipped.
"""

from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

from nnterp import components
from nnterp_families_moe.deepseek_v3 import RENAME, Moe, head_dim, qk_head_dim

__all__ = ["ENVOYS", "RENAME", "Attention", "Layer", "Mlp", "Moe", "head_dim", "qk_head_dim"]


class Layer(components.Layer):
    """GLM-MoE-DSA's block, which returns the stream and the keys selected."""

    returns_tuple = True


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
