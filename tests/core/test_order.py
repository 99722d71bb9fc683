"""The forward order of the values: what it is on Llama and GPT-2, that reads follow it, what measuring leaves."""

import itertools
import warnings

import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError
from nnsight.intervention.source import STATE
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from nnterp import DerivedEProperty, EProperty, StandardizedTransformer, Unavailable, order
from nnterp.components import Residual
from nnterp.families import llama

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])

ROOT = {
    "input_ids": 0,
    "attention_mask": 0,
    "input_size": 0,
    "token_embeddings": 1,
    "final_norm_output": 2,
    "lm_head_output": 3,
    "logits": 4,
    "next_token_probs": 4,
}
BLOCK = {
    "layer_input": 0,
    "attention_norm_output": 1,
    "self_attn.attention_queries": 2,
    "self_attn.attention_keys": 2,
    "self_attn.attention_values": 2,
    "self_attn.attention_scores": 3,
    "self_attn.attention_probabilities": 4,
    "self_attn.attention_head_outputs": 5,
    "self_attn.attention_premix": 6,
    "self_attn.attention_output": 7,
    "layer_mid": 8,
    "mlp_norm_output": 9,
    "mlp_input": 10,
    "mlp.mlp_activation": 11,
    "mlp.mlp_neurons": 12,
    "mlp.mlp_output": 13,
    "layer_output": 14,
}


def llama_module(**kwargs):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes, **kwargs)).eval()


def gpt2_module(**kwargs):
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4, **special, **kwargs)).eval()


@pytest.fixture(params=[llama_module, gpt2_module], ids=["llama", "gpt2"])
def model(request):
    return StandardizedTransformer(request.param(attn_implementation="eager"))


@pytest.fixture
def a_llama():
    return StandardizedTransformer(llama_module(attn_implementation="eager"))


def every_value(model):
    """``(name, layer)`` of each available value, in the order that `rank` sorts them into."""
    names = [(name, None) for name in model.order()]
    names += [(name, layer) for layer in range(model.num_layers) for name in model.order(layer)]
    return sorted(names, key=lambda value: model.rank(*value))


def read(model, name, layer):
    return model.get(name if layer is None else f"layers.{layer}.{name}")


# -- what it says -----------------------------------------------------------------------------------------------------


def test_every_value_of_a_pre_norm_block_and_of_the_root(model):
    assert model.order() == ROOT and list(model.order()) == list(ROOT)
    for layer in (0, 1, 2, -1):
        assert model.order(layer) == BLOCK and list(model.order(layer)) == list(BLOCK)


def test_the_side_of_a_value_is_its_block_or_before_or_after_all_of_them(model):
    assert model.rank("input_ids") == (-1, 0) and model.rank("token_embeddings") == (-1, 1)
    assert model.rank("final_norm_output") == (3, 2) and model.rank("logits") == model.rank("next_token_probs") == (
        3,
        4,
    )
    assert model.rank("layer_mid", 1) == (1, 8) and model.rank("self_attn.attention_keys", -1) == (2, 2)


def test_without_eager_attention_there_is_nothing_inside_it(model):
    eager = [name for name in BLOCK if name not in ("self_attn.attention_scores", "self_attn.attention_probabilities")]
    model._module.set_attn_implementation("sdpa")
    assert list(model.order(1)) == eager
    assert list(model.order(1).values()) == [0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    with pytest.raises(Unavailable, match=r"attention_scores of block 1 is unavailable: .*eager"):
        model.rank("self_attn.attention_scores", 1)
    model._module.set_attn_implementation("eager")
    assert model.order(1) == BLOCK


def test_a_name_that_has_no_rank_says_why(model):
    with pytest.raises(KeyError, match=r"layer="):
        model.rank("layer_output")
    with pytest.raises(KeyError, match="leave out layer="):
        model.rank("logits", 1)
    with pytest.raises(KeyError, match="Did you mean layer_output"):
        model.rank("layer_outputs", 1)
    with pytest.raises(KeyError, match="the root has no value 'x'. It has input_ids"):
        model.rank("x")
    with pytest.raises(IndexError):
        model.rank("layer_output", 3)


# -- that reads follow it ---------------------------------------------------------------------------------------------


def test_all_values_can_be_read_in_their_order_in_one_trace(model):
    values = every_value(model)
    assert len(values) == len(ROOT) + 3 * len(BLOCK)
    with torch.no_grad(), model.trace(IDS):
        got = [].save()
        for name, layer in values:
            got.append(read(model, name, layer))
    assert all(value is not None for value in got)


def test_two_values_can_be_read_in_the_other_order_exactly_when_their_ranks_are_equal(model):
    values = [value for value in every_value(model) if value[1] in (None, 1)]
    for earlier, later in itertools.pairwise(values):
        try:
            with torch.no_grad(), model.trace(IDS):
                read(model, *later)
                read(model, *earlier)
            reversible = True
        except OutOfOrderError:
            reversible = False
        assert reversible == (model.rank(*earlier) == model.rank(*later)), (earlier, later)


def test_a_value_of_ones_own_takes_its_place():
    class Block(llama.Layer):
        """A block with a value inside its forward and one that is derived from two."""

        @EProperty("source.self_mlp_0.output", description="The MLP's call, as an operation")
        def called(self, value: torch.Tensor) -> Residual:
            return value

        between = DerivedEProperty(lambda block: block.layer_input + block.layer_mid, "Two values")
        never = DerivedEProperty(
            lambda block: block.layer_output + block.layer_input, "Two values, the wrong way round"
        )

    model = StandardizedTransformer(llama_module(), envoys={LlamaDecoderLayer: Block})
    ranks = model.order(1)
    assert ranks["between"] == ranks["layer_mid"]
    assert ranks["mlp.mlp_output"] < ranks["called"] < ranks["layer_output"]
    assert "never" not in ranks
    with pytest.raises(Unavailable, match="never of block 1"):
        model.rank("never", 1)
    assert not any(block._module.__dict__[STATE].sourced for block in model.layers)


# -- measuring --------------------------------------------------------------------------------------------------------


@pytest.fixture
def probes(monkeypatch):
    """The models that are measured, one entry a time."""
    measured, probe = [], order.probe
    monkeypatch.setattr(order, "probe", lambda model: measured.append(model) or probe(model))
    return measured


def test_it_is_measured_once_and_again_when_the_values_are_others(a_llama, probes):
    a_llama.order(), a_llama.order(1), a_llama.rank("layer_output", 2), a_llama.rank("logits")
    assert len(probes) == 1
    a_llama._module.set_attn_implementation("sdpa")
    a_llama.order(), a_llama.order(1), a_llama.order(2)
    assert len(probes) == 2
    order.invalidate()
    a_llama.order(), a_llama.order(1)
    assert len(probes) == 3


def test_it_loads_no_weights(small_checkpoint):
    model = StandardizedTransformer(str(small_checkpoint), attn_implementation="eager")
    assert model.order(1) == BLOCK and model.order() == ROOT
    assert not model.dispatched and model.device.type == "meta"


def test_it_leaves_the_model_as_it_was(model):
    with torch.no_grad(), model.trace(IDS):
        expected = model.logits.save()
    bodies = [envoy._module.__dict__[STATE].body for envoy in model.modules()]
    attributes = [dict(envoy._module.__dict__) for envoy in model.modules()]
    counts = dict(model.interleaver.counts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.order()
    assert [envoy._module.__dict__[STATE].body for envoy in model.modules()] == bodies
    assert [list(envoy._module.__dict__) for envoy in model.modules()] == [list(each) for each in attributes]
    assert model.interleaver.counts == counts and not model.interleaver.mediators
    with torch.no_grad(), model.trace(IDS):
        logits = model.logits.save()
    assert torch.equal(logits, expected)


def test_stored_edits_take_no_part_in_it_and_stay(a_llama):
    with a_llama.edit(inplace=True):
        a_llama.skip_layer(1)
    assert a_llama.order(1) == BLOCK
    with torch.no_grad(), a_llama.trace(IDS):
        entering = a_llama.layers[1].layer_input.save()
        leaving = a_llama.layers[2].layer_input.save()
    assert torch.equal(entering, leaving)


def test_a_forward_that_branches_on_its_values_is_run_for_real():
    ran = []

    class Branching(LlamaRMSNorm):
        def forward(self, hidden):
            ran.append(isinstance(hidden, FakeTensor))
            return super().forward(hidden) if torch.equal(hidden, hidden) else hidden

    module = llama_module(attn_implementation="eager")
    module.model.norm = Branching(32)
    model = StandardizedTransformer(module)
    assert model.order(1) == BLOCK and model.order() == ROOT
    assert ran == [True, False]
    with torch.no_grad(), model.trace(IDS):
        assert not isinstance(model.logits, FakeTensor)


def test_inside_a_trace_it_has_to_be_known_already(a_llama):
    with pytest.raises(ValueError, match="before the trace"), a_llama.trace(IDS):
        a_llama.order()
    a_llama.order()
    with a_llama.trace(IDS):
        ranks = a_llama.order(1)
        assert ranks == BLOCK
