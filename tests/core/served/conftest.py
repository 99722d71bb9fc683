"""Small models and what is read of them, for the tests of locations of our own: the fixture `served` is this file."""

import sys

import pytest
import torch
from nnsight.modeling.transformers import TransformersModel
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig
from transformers.models.llama import modeling_llama

from nnterp import StandardizedTransformer, loading

PLAIN_LOOKUP = AttentionInterface.get_interface
PLAIN_FUNCTION = modeling_llama.eager_attention_forward
IDS = torch.tensor([[5, 17, 42, 3, 9], [8, 1, 77, 20, 31]])


@pytest.fixture
def served():
    return sys.modules[__name__]


@pytest.fixture(autouse=True)
def nothing_is_patched():
    """Whatever a test does, transformers is its own afterwards."""
    yield
    assert AttentionInterface.get_interface is PLAIN_LOOKUP
    assert modeling_llama.eager_attention_forward is PLAIN_FUNCTION


def llama(seed=0, attention="eager"):
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=97,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=97, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def standardized(module=None):
    return StandardizedTransformer(llama() if module is None else module)


class Plain(TransformersModel):
    """nnsight's own model of a module without a tokenizer."""

    def _loaded_preprocessors(self):
        return loading.loaded_preprocessors(self.task)

    def _wrap(self, module, *args, **kwargs):
        return loading.wrap_without_tokenizer(self, module, "cpu")


def plain(module=None):
    return Plain(llama() if module is None else module, task="text-generation")


def values(model, layer=1, **inputs):
    """Every value inside one block, from one trace."""
    block = model.layers[layer]
    with model.trace(IDS, **inputs):
        queries = block.self_attn.attention_queries.save()
        keys = block.self_attn.attention_keys.save()
        scores = block.self_attn.attention_scores.save()
        probabilities = block.self_attn.attention_probabilities.save()
        outputs = block.self_attn.attention_head_outputs.save()
        mid = block.layer_mid.save()
    return [queries, keys, scores, probabilities, outputs, mid]


def drill(model):
    with model.trace(IDS):
        model.layers[1].source.self_mlp_0.output.save()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def without_cache(kwargs):
    """The keywords of a call without its key/value cache, whatever the release calls it."""
    return {name: value for name, value in kwargs.items() if not isinstance(value, DynamicCache)}
