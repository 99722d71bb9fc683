"""Small random models of every kind of recurrent mixer, and the kernels put back after each test."""

import pytest
from transformers import AutoModelForCausalLM

import nnterp
from nnterp.testing import checkpoint

CONFIGS = {
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2},
    "mamba2": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 4,
        "n_groups": 2,
        "chunk_size": 4,
        "time_step_rank": 2,
    },
    "qwen3_next": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "mlp_only_layers": [0, 1],
        "num_experts": 2,
    },
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
    },
}


def config_of(model_type):
    return checkpoint.config(model_type=model_type, **CONFIGS[model_type])


def built(model_type):
    module = AutoModelForCausalLM.from_config(config_of(model_type), attn_implementation="eager").eval()
    return nnterp.StandardizedTransformer(checkpoint.randomized(module))


@pytest.fixture(scope="module")
def models():
    """One model of each kind of mixer, with weights that matter."""
    return {model_type: built(model_type) for model_type in ("mamba", "mamba2", "qwen3_next")}


@pytest.fixture
def saved(tmp_path):
    """A function that saves a checkpoint of a ``model_type`` and returns its directory."""
    return lambda model_type: checkpoint.save(config_of(model_type), tmp_path)


@pytest.fixture
def build():
    """A function that builds a model of a ``model_type``; after the test its kernels are as they were at import."""
    models = []

    def building(model_type):
        models.append(built(model_type))
        return models[-1]

    yield building
    for model in models:
        if model.linear_attention_layers:
            nnterp.route_kernels(model.family, "default")
