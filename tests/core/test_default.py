"""The best-effort family: each value it serves is the bare module's, and what it cannot be sure of it refuses."""

import ast
import collections
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from nnsight import save
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nnterp import StandardizedTransformer, Unavailable, UnsupportedFamily, axis_size, families
from nnterp.components import standard_children
from nnterp.families import default

CONFIGS = json.loads((Path(__file__).parent / "tiny_decoders.json").read_text())
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])

#: What the default family refuses, with a part of the reason; every other decoder is served.
REFUSED = {
    "cpmant": r"do not pass on a stream .* layer_input of block 0 is \(2, 37, 64\)",
    "dbrx": "does not run on shapes alone, .*data-dependent",
    "deepseek_v4": r"do not pass on a stream .* is \(2, 5, 4, 64\)",
    "dory": "block 1 runs 2 times",
    "gemma3n_text": r"do not pass on a stream .* is \(4, 2, 5, 64\)",
    "hrm_text": r"the name layers or norm; .*rename=\{'model\.L_module\.layers': 'layers'",
    "hy_v4": r"do not pass on a stream .* is \(2, 5, 4, 64\)",
    "inkling2_loop_text": "block 1 runs 2 times",
    "longcat_flash": "does not run on shapes alone, .*data-dependent",
    "openai-gpt": "the name norm; nothing in it looks like one",
    "qwen4_exp_text": "the name norm",
}

#: A few of the types that are served, each for something that another has not.
DIFFERENT = (
    "bloom",  # adds the stream inside its sublayers, returns a tuple
    "ctrl",  # scales its embedding in place
    "falcon",  # keeps queries, keys and values to itself
    "gemma2",  # norms on both sides of a sublayer
    "gpt_neo",  # an attention inside the attention
    "gpt_oss",  # experts, an attention sink
    "deepseek_v2",  # latent attention, whose heads are not the config's
    "granite",  # a forward that compares tensors
    "inkling2_text",  # a module of the block is called mlp_input
    "mamba",  # no attention
    "falcon_h1",  # two mixers a block
    "modernbert-decoder",  # a head in two parts
    "opt",  # no MLP module
    "phi",  # parallel
    "rwkv",  # marks its weights as rescaled
    "zamba",  # one attention shared by blocks
)


def tiny(model_type, **kwargs):
    """A bare random model of the type, with the experts run in a way that shapes suffice for."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
    auto = AutoModelForImageTextToText if model_type == "mistral4" else AutoModelForCausalLM
    return auto.from_config(config, **{"experts_implementation": "batched_mm", **kwargs}).eval()


def load(module, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Module '.*' has a submodule named 'output'")  # nnsight's, of RWKV
        return StandardizedTransformer(module, family=default, **kwargs)


def first(output):
    return output[0] if isinstance(output, (tuple, list)) else output


class Bare:
    """What torch hooks and a wrapped attention interface see in one forward of a bare module.

    Attributes:
        inputs, outputs: The first argument and the first output of each call, by module path.
        tuples: Whether the first call returned a tuple or list, by module path.
        attentions: The arguments and results of each call of the attention interface, by module path.
        logits: What the model returns.
    """

    def __init__(self, module):
        self.inputs, self.outputs = collections.defaultdict(list), collections.defaultdict(list)
        self.tuples, self.attentions = {}, collections.defaultdict(list)
        self.paths = {id(child): path for path, child in module.named_modules()}
        hooks = [child.register_forward_hook(self.see, with_kwargs=True) for child in module.modules()]
        with pytest.MonkeyPatch.context() as patch:
            found = AttentionInterface.get_interface
            patch.setattr(AttentionInterface, "get_interface", lambda *args: self.attend(found(*args)))
            with torch.no_grad():
                self.logits = module(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
        for hook in hooks:
            hook.remove()

    def see(self, module, args, kwargs, output):
        path = self.paths[id(module)]
        for record, value in (
            (self.inputs, args[0] if args else next(iter(kwargs.values()), None)),
            (self.outputs, first(output)),
        ):
            record[path].append(value.clone() if isinstance(value, torch.Tensor) else value)
        self.tuples.setdefault(path, isinstance(output, (tuple, list)))

    def attend(self, function):
        def called(module, query, key, value, *args, **kwargs):
            arguments = [each.clone() for each in (query, key, value)]
            results = function(module, query, key, value, *args, **kwargs)
            self.attentions[self.paths[id(module)]].append((*arguments, *results))
            return results

        return called

    def value(self, host, name):
        """What the standard value ``name`` of the envoy ``host`` has to be, or None where hooks do not see it."""

        def at(envoy):
            return envoy.path.removeprefix("model").removeprefix(".")

        interior = ("attention_queries", "attention_keys", "attention_values", "attention_head_outputs")
        interior += ("attention_probabilities",)
        if name in interior:
            (call,) = self.attentions[at(host)]
            return call[interior.index(name)]
        outputs = {"token_embeddings": "embed_tokens", "lm_head_output": "lm_head", "mlp_activation": "act_fn"}
        inputs = {"mlp_input": "mlp", "attention_premix": "o_proj", "mlp_neurons": "down_proj"}
        if name in outputs:
            (value,) = self.outputs[at(getattr(host, outputs[name]))]
        elif name in inputs:
            (value,) = self.inputs[at(getattr(host, inputs[name]))]
        elif name in ("layer_input", "layer_output"):
            (value,) = (self.inputs if name == "layer_input" else self.outputs)[at(host)]
        elif name == "final_norm_output":
            value = self.outputs[at(host.norm)][-1]
        else:
            return {"logits": self.logits, "input_ids": IDS}.get(name)
        return value


def available(model):
    """``(envoy, name, descriptor)`` of each value the model serves, in the order of the forward."""
    hosts = [(None, "", model)]
    for index, block in enumerate(model.layers):
        hosts.append((index, "", block))
        hosts += [(index, f"{name}.", child) for name, child in standard_children(block).items()]
    found = [
        ((prefix + name, layer), (host, name, value))
        for layer, prefix, host in hosts
        for name, value in host.values().items()
        if value.reason(host) is None
    ]
    return [value for _, value in sorted(found, key=lambda each: model.rank(*each[0]))]


def compare(model, bare):
    """Every available value, read in one trace, is what the bare module computes, in the layout it promises."""
    values = available(model)
    with torch.no_grad(), model.trace(IDS):
        got = save([])
        for host, _, value in values:
            read = value.__get__(host)
            got.append(read.clone() if isinstance(read, torch.Tensor) else read)  # CTRL edits its embedding in place
    for (host, name, value), tensor in zip(values, got, strict=True):
        where = f"{name} of {host.path}"
        expected = bare.value(host, name)
        if expected is not None:
            assert torch.equal(tensor, expected.reshape(tensor.shape)), where
        if value.layout is not None:
            assert isinstance(tensor, value.layout), where
            for axis, size in zip(value.dims, tensor.shape, strict=True):
                if axis not in ("batch", "seq", "query", "key"):
                    assert axis_size(host, axis) == size, f"{axis} of {where}"
    for block in model.layers:
        assert block.returns_tuple == bare.tuples[block.path.removeprefix("model.")]


# -- what it serves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_it_serves_what_the_dedicated_family_serves_but_what_a_name_does_not_show(model_type, implementation):
    module = tiny(model_type, attn_implementation=implementation)
    model, dedicated = load(module), StandardizedTransformer(module)
    served = {name for name, reason in model.support().items() if reason is None}
    left_out = {name for name, reason in dedicated.support().items() if reason is None} - served
    contributions = {"self_attn.attention_output", "mlp.mlp_output"}
    assert left_out == contributions | {"attention_norm_output", "layer_mid", "mlp_norm_output"}
    for size in ("num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "qk_head_dim"):
        assert getattr(model, size) == getattr(dedicated, size)
    assert model.intermediate_size == dedicated.intermediate_size
    compare(model, Bare(module))


def test_what_a_name_does_not_show_is_unavailable_with_a_reason():
    model = load(tiny("gpt2"))
    rows = model.support(0)
    assert rows["self_attn.attention_output"] == rows["mlp.mlp_output"] == default.CONTRIBUTION
    assert rows["layer_mid"] == rows["attention_norm_output"] == rows["mlp_norm_output"] == default.BETWEEN
    with pytest.raises(Unavailable, match="what a sublayer adds"), model.trace(IDS):
        model.layers[0].mlp.mlp_output.save()
    hidden = torch.zeros(1, 1, 64)
    for method in (model.project_on_vocab, model.get_topk_closest_tokens):
        with pytest.raises(Unavailable, match="project_on_vocab of model is unavailable: what the model does"):
            method(hidden)


@pytest.mark.parametrize("model_type", DIFFERENT)
def test_a_model_it_serves_is_right(model_type):
    module = tiny(model_type)
    bare = Bare(module)
    compare(load(module), bare)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_decoder_is_right_or_refused(model_type, implementation):
    module = tiny(model_type, attn_implementation=implementation)
    if model_type in REFUSED:
        with pytest.raises(UnsupportedFamily, match=REFUSED[model_type]):
            load(module)
        return
    bare = Bare(module)
    compare(load(module), bare)


def test_whether_blocks_return_a_tuple_is_seen():
    module = tiny("falcon")
    model = load(module)
    assert all(block.returns_tuple for block in model.layers)
    with torch.no_grad(), model.trace(IDS):
        model.skip_layer(0)
        leaving = model.layers[0].layer_output.save()
        entering = model.layers[1].layer_input.save()
        logits = model.logits.save()
    assert torch.equal(leaving, entering) and not torch.equal(logits, Bare(module).logits)
    assert not any(block.returns_tuple for block in load(tiny("gpt2")).layers)


def test_edits_reach_the_model():
    module = tiny("apertus")
    model, vector = load(module), torch.linspace(-1, 1, 64)

    def steered(block, args, output):
        return output + 2 * vector

    hook = module.model.layers[0].register_forward_hook(steered)
    expected = Bare(module).logits
    hook.remove()
    with torch.no_grad(), model.trace(IDS):
        model.steer(0, vector, 2.0)
        logits = model.logits.save()
    torch.testing.assert_close(logits, expected)


# -- what it marks as not being there ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "value", "reason"),
    [
        ("nanochat", "final_norm_output", "before the blocks"),  # one norm, after the embedding and at the end
        ("modernbert-decoder", "lm_head_output", r"the shape \(2, 5, 64\), and this value is \[.* vocab_size 128\]"),
        ("modernbert-decoder", "token_embeddings", "does more than look tokens up"),
        ("diffllama", "self_attn.attention_queries", "computed several times in one forward"),
        ("bloom", "self_attn.attention_queries", "does its own arithmetic"),
        ("mixtral", "mlp.mlp_neurons", "no down_proj module"),
    ],
)
def test_a_value_that_is_not_what_its_name_says_is_unavailable(model_type, value, reason):
    module = tiny(model_type)
    bare = Bare(module)
    model = load(module)
    host, _, name = value.rpartition(".")
    host = model if name in type(model).values() else getattr(model.layers[0], host)
    with pytest.raises(Unavailable, match=reason), model.trace(IDS):
        getattr(host, name)
    assert name not in {served for envoy, served, _ in available(model) if envoy is host}
    compare(model, bare)


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["dbrx", "deepseek_v4", "dory", "gemma3n_text", "openai-gpt"])
def test_a_model_it_cannot_be_right_about_is_refused(model_type):
    with pytest.raises(UnsupportedFamily, match=REFUSED[model_type]):
        load(tiny(model_type))


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_experts_that_shapes_do_not_suffice_for_are_refused_with_what_to_load_them_with(implementation):
    with pytest.raises(UnsupportedFamily, match='load it with experts_implementation="batched_mm"'):
        load(tiny("mixtral", experts_implementation=implementation))
    load(tiny("mixtral", experts_implementation="batched_mm"))
    load(tiny("mixtral", experts_implementation="grouped_mm", dtype=torch.bfloat16))


class Renamed(transformers.LlamaForCausalLM):
    """A Llama whose trunk and head go by other names."""

    def __init__(self, config):
        super().__init__(config)
        self.trunk, self.unembed = self.model, self.lm_head
        del self.model, self.lm_head

    def get_input_embeddings(self):
        return self.trunk.embed_tokens

    def get_output_embeddings(self):
        return self.unembed

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        hidden = self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return CausalLMOutput(logits=self.unembed(hidden))


def test_the_rename_that_a_refusal_proposes_works():
    module = Renamed(AutoConfig.for_model("llama", **CONFIGS["llama"])).eval()
    with pytest.raises(UnsupportedFamily, match="no module that goes by the name embed_tokens or layers") as refused:
        load(module)
    rename = ast.literal_eval(re.search(r"rename=(\{.*?\})", str(refused.value)).group(1))
    assert rename == {
        "trunk.embed_tokens": "embed_tokens",
        "trunk.layers": "layers",
        "trunk.norm": "norm",
        "unembed": "lm_head",
    }
    compare(load(module, rename=rename), Bare(module))


def test_entries_that_are_no_blocks_are_refused():
    from nnsight import Envoy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    with pytest.raises(UnsupportedFamily, match="are no blocks"):
        load(tiny("llama"), envoys={LlamaDecoderLayer: Envoy})


def test_a_forward_that_fails_is_refused_with_its_error():
    class Broken(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            raise KeyError("nothing of the sort")

    module = Broken(AutoConfig.for_model("llama", **CONFIGS["llama"]))
    with pytest.raises(UnsupportedFamily, match="KeyError: 'nothing of the sort'"):
        load(module)


# -- what looking at a model costs it ---------------------------------------------------------------------------------


def test_no_weights_are_loaded_for_it(small_checkpoint):
    model = load(str(small_checkpoint))
    assert not model.dispatched and model.device.type == "meta"
    assert model.support(0)["layer_output"] is None
    with torch.no_grad(), model.trace("hello"):
        logits = model.logits.save()
    assert model.dispatched and torch.isfinite(logits).all()


@pytest.mark.parametrize("model_type", ["rwkv", "dory", "llama"])
def test_looking_at_a_model_does_not_change_it(model_type):
    module, twin = tiny(model_type), tiny(model_type)
    if model_type == "rwkv":  # whose first forward divides its weights, block by block, and notes that it has
        module.config.rescale_every = twin.config.rescale_every = 1
    before = Bare(twin).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if model_type in REFUSED:
            with pytest.raises(UnsupportedFamily):
                load(module)
        else:
            load(module)
    for child in module.modules():
        held = [*vars(child).values(), *child._buffers.values(), *child._parameters.values()]
        assert not any(isinstance(each, FakeTensor) for each in held)
    assert torch.equal(Bare(module).logits, before)


def test_it_needs_no_look_up_and_warns_of_none():
    module = tiny("llama")
    module.config.model_type = "nobody-serves-this"
    with pytest.warns(UserWarning, match="no family for model_type 'nobody-serves-this'.*model.support"):
        assert StandardizedTransformer(module).family is default
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(module).family is default
    assert families.default is default
