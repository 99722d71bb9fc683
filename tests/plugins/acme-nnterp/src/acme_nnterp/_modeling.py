"""Acme's architecture: a parallel block with names of its own, around Llama's attention and feed-forward.

Importing this module makes transformers' auto classes know the model type.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.configuration_llama import LlamaConfig


class AcmeConfig(LlamaConfig):
    model_type = "acme"


class AcmeAttention(llama.LlamaAttention):
    pass


class AcmeMLP(llama.LlamaMLP):
    pass


class AcmeBlock(GradientCheckpointingLayer):
    def __init__(self, config: AcmeConfig, layer_idx: int) -> None:
        super().__init__()
        self.pre_norm = llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = AcmeAttention(config, layer_idx)
        self.ffn = AcmeMLP(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = self.pre_norm(hidden_states)
        mixed, _ = self.mixer(hidden_states=normed, **kwargs)
        return hidden_states + mixed + self.ffn(normed)


class AcmeModel(llama.LlamaModel):
    config: AcmeConfig
    _no_split_modules = ["AcmeBlock"]
    _can_record_outputs = {"hidden_states": AcmeBlock, "attentions": AcmeAttention}

    def __init__(self, config: AcmeConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([AcmeBlock(config, index) for index in range(config.num_hidden_layers)])
        self.post_init()


class AcmeForCausalLM(llama.LlamaForCausalLM):
    config: AcmeConfig

    def __init__(self, config: AcmeConfig) -> None:
        super().__init__(config)
        self.model = AcmeModel(config)
        self.post_init()


AutoConfig.register("acme", AcmeConfig)
AutoModelForCausalLM.register(AcmeConfig, AcmeForCausalLM)
