"""Nemotron-H: one sublayer a block, a Mamba-2 mixer, an attention, an MLP or a mixture, behind one norm.

All four are the block's ``mixer`` in transformers; here each has the standard name of its kind. Attention has no
positions: the mixers know the order.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers.models.nemotron_h import modeling_nemotron_h as modeling

from nnterp import components

RENAME = {
    "norm": "input_layernorm",
    "model.embeddings": "embed_tokens",
    "model.layers": "layers",
    "model.norm_f": "norm",
    modeling.NemotronHMamba2Mixer: "linear_attn",
    modeling.NemotronHAttention: "self_attn",
    modeling.NemotronHMLP: "mlp",
    modeling.NemotronHMoE: "mlp",
    "gate": "router",
}

ONE_SUBLAYER = "the block is one sublayer on the stream, so there is no stream between two"

#: One contribution per routing slot, ``[batch, seq, top_k, latent_size]``.
LatentOutputs = Float[Tensor, "batch seq top_k latent_size"]


class Layer(components.Layer):
    """Nemotron-H's block: ``layer_input`` and the contribution of its one sublayer.

    Its one norm is ``input_layernorm``: its output is `attention_norm_output` before a mixer and `mlp_norm_output`
    before a feed-forward.
    """

    TAPS = {}
    layer_mid = components.unavailable(ONE_SUBLAYER)
    attention_norm_output = components.Layer.attention_norm_output.at(
        "input_layernorm.output", unavailable=lambda block: block.lacks("self_attn", "linear_attn")
    )
    mlp_norm_output = components.Layer.mlp_norm_output.at(
        "input_layernorm.output", unavailable=lambda block: block.lacks("mlp")
    )

    def lacks(self, *kinds: str) -> str | None:
        """Why a value of a sublayer of one of ``kinds`` is not here, or None."""
        held = next(alias for alias, native in self._aliases.items() if native == "mixer")
        return None if held in kinds else f"the one sublayer of this block is its {held}"


class Attention(components.Attention):
    """Nemotron-H's attention."""


class StateSpace(components.StateSpace):
    """Nemotron-H's Mamba-2 mixer. A prompt's step sizes are at least ``time_step_min``, a decode step's are not."""


class Mlp(components.Mlp):
    """Nemotron-H's feed-forward, squared ReLU without a gate; also the shared expert of a mixture."""


class Moe(components.BiasedMoe):
    """Nemotron-H's mixture, whose experts may work in a narrower space than the stream's (``moe_latent_size``).

    `routed_output` is back in the stream's; `expert_outputs` are in the experts' own, ``latent_size`` wide, and a
    linear layer, ``fc2_latent_proj``, makes `routed_output` of their sum.
    """

    expert_outputs = components.Moe.expert_outputs.at(layout=LatentOutputs)
    routed_output = components.Moe.routed_output.at("fc2_latent_proj.output")

    @property
    def latent_size(self) -> int:
        """Width of what an expert takes and gives: ``hidden_size`` unless the config has a ``moe_latent_size``."""
        return self._module.experts.up_proj.shape[-1]

    def _one_expert(self, experts: Any, expert: int, tokens: Tensor) -> Tensor:
        entering, leaving = self._module.fc1_latent_proj, self._module.fc2_latent_proj
        if not hasattr(leaving, "weight"):
            return super()._one_expert(experts, expert, tokens)
        entering = F.linear(tokens, entering.weight, entering.bias)
        return F.linear(super()._one_expert(experts, expert, entering), leaving.weight)  # its bias is no expert's


ENVOYS = {
    modeling.NemotronHBlock: Layer,
    modeling.NemotronHAttention: Attention,
    modeling.NemotronHMamba2Mixer: StateSpace,
    modeling.NemotronHMLP: Mlp,
    modeling.NemotronHMoE: Moe,
    modeling.NemotronHTopkRouter: components.BiasedRouter,
}


def project_on_vocab(model: Any, hidden: Tensor) -> Tensor:
    """The logits are float32."""
    return model.lm_head(model.norm(hidden)).float()
