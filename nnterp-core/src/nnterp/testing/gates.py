"""What holds where a gate stands behind a value: gated queries, a gated shared expert."""

import torch
from torch import Tensor, nn

from nnterp.testing.comparing import ULPS, assert_close
from nnterp.testing.facts import Facts
from nnterp.testing.mixture_facts import MixtureFacts
from nnterp.testing.oracles import Call, Site


class GatedQueries(Facts):
    """An attention whose query projection holds a gate behind each head's query (Qwen3-Next and its kin)."""

    def test_the_premix_is_gated(self) -> None:
        """The premix is the head outputs times the sigmoid of the half of the projection that is not the queries."""
        for layer in self.layers_of("self_attn.attention_premix", self.blocks):
            attention = self.module(f"layers.{layer}.self_attn")
            projected = attention.q_proj(self.everything["attention_norm_output", layer])
            mixed = self.everything["self_attn.attention_head_outputs", layer]
            gate = projected.unflatten(-1, (mixed.shape[2], 2, -1))[..., 1, :].detach()
            premix = self.everything["self_attn.attention_premix", layer]
            assert_close(premix, mixed * gate.sigmoid(), ULPS)
            assert not torch.allclose(premix, mixed)


class GatedSharedExpert(MixtureFacts):
    """A mixture that multiplies what its shared expert adds by a sigmoid of its own (Qwen2-MoE and its kin)."""

    def shared_site(self, mixture: nn.Module) -> tuple[nn.Module, Site]:
        def gate(call: Call) -> Tensor:
            return torch.sigmoid(mixture.shared_expert_gate(call.args[0]))

        return mixture.shared_expert, Site(
            "",
            read=lambda call, tensor: tensor * gate(call),
            write=lambda call, tensor, value: value / gate(call),
        )
