"""How a value says where it is, and what reads and writes do: paths, selections, views, availability, pickling.

Each value is installed on a block of a small Llama through ``envoys=`` and held against torch hooks on the module.
"""

import cloudpickle
import pytest
import torch
from nnsight.intervention.source import SourceNotAvailable
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from nnterp import DerivedEProperty, EProperty, StandardizedTransformer, Unavailable, unavailable
from nnterp.components import FIRST, Residual
from nnterp.families import llama

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
BLOCK = 1
GATE, UP = "self_gate_proj_0", "self_up_proj_0"
SOFTMAX = "self_attn.source.attention_interface_1.source.nn_functional_softmax_0.output"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, small_llama):
    return small_llama.repo_id


@pytest.fixture
def load(checkpoint):
    """A function that loads the Llama with one more value on its blocks (or attentions, or MLPs), called ``extra``."""

    def load(value, base=llama.Layer, key=LlamaDecoderLayer, **attributes):
        kind = type(base.__name__, (base,), {"extra": value, **attributes})
        value.__set_name__(kind, "extra")
        return StandardizedTransformer(checkpoint, dispatch=True, attn_implementation="eager", envoys={key: kind})

    return load


def hooked(model, module, edit=None, before=False):
    """The logits of the bare module, and the value at ``module`` (its output, or first input), edited by ``edit``."""
    seen = []

    def after(_, args, output):
        first = output[0] if isinstance(output, tuple) else output
        seen.append(first.detach().clone())
        if edit is not None:
            return (edit(first), *output[1:]) if isinstance(output, tuple) else edit(first)

    def ahead(_, args):
        seen.append(args[0].detach().clone())
        if edit is not None:
            return (edit(args[0]), *args[1:])

    handle = module.register_forward_pre_hook(ahead) if before else module.register_forward_hook(after)
    with torch.no_grad():
        logits = model._module(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    handle.remove()
    return logits, seen[0]


def read(model, envoy=None):
    with model.trace(IDS):
        value = (envoy or model.layers[BLOCK]).extra.clone().save()
        logits = model.logits.save()
    return value, logits


def written(model, edit, envoy=None):
    envoy = envoy or model.layers[BLOCK]
    with model.trace(IDS):
        envoy.extra = edit(envoy.extra)
        logits = model.logits.save()
    return logits


def halved(value):
    return value * 0.5


# -- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("output", ""),
        ("mlp.output", "mlp"),
        ("mlp.down_proj.output", "mlp.down_proj"),
        ("self_attn.o_proj.output", "self_attn.o_proj"),
        ("self_attn.output", "self_attn"),
        ("/norm.output", "/norm"),
        ("/layers.1.mlp.output", "mlp"),
        ("../../norm.output", "/norm"),
        (lambda block: "mlp.output" if block._module.hidden_size else "output", "mlp"),
    ],
)
def test_a_path_leads_to_a_modules_output(load, path, module):
    model = load(EProperty(path, select=FIRST))
    block = model._module.model.layers[BLOCK]
    module = model._module.model.norm if module == "/norm" else block.get_submodule(module)
    clean, expected = hooked(model, module)
    value, logits = read(model)
    assert value.equal(expected) and logits.equal(clean)
    assert written(model, halved).equal(hooked(model, module, halved)[0])


@pytest.mark.parametrize(("path", "module"), [("mlp.input", "mlp"), ("self_attn.o_proj.input", "self_attn.o_proj")])
def test_a_path_leads_to_a_modules_input(load, path, module):
    model = load(EProperty(path))
    module = model._module.model.layers[BLOCK].get_submodule(module)
    value, _ = read(model)
    assert value.equal(hooked(model, module, before=True)[1])
    assert written(model, halved).equal(hooked(model, module, halved, before=True)[0])


def test_a_sibling_is_reached_through_the_parent(load):
    model = load(EProperty("../post_attention_layernorm.output"), llama.Attention, LlamaAttention)
    module = model._module.model.layers[BLOCK].post_attention_layernorm
    attention = model.layers[BLOCK].self_attn
    assert read(model, attention)[0].equal(hooked(model, module)[1])
    assert written(model, halved, attention).equal(hooked(model, module, halved)[0])


def test_a_value_at_the_modules_own_name(load):
    """Without a key it is where its name says: a location of the host's own."""
    kind = type("Layer", (llama.Layer,), {"output_again": EProperty()})
    assert kind.output_again.path(None) == "output_again"


def test_an_operation_inside_a_forward(load):
    model = load(EProperty(f"source.{UP}.output"), llama.Mlp, LlamaMLP)
    module = model._module.model.layers[BLOCK].mlp
    mlp = model.layers[BLOCK].mlp
    assert read(model, mlp)[0].equal(hooked(model, module.up_proj)[1])
    assert written(model, halved, mlp).equal(hooked(model, module.up_proj, halved)[0])


def test_an_operation_inside_a_called_function(load):
    model = load(EProperty(SOFTMAX))
    value, _ = read(model)
    with model.trace(IDS):
        pattern = model.layers[BLOCK].self_attn.attention_probabilities.save()
    assert value.equal(pattern)
    assert not written(model, lambda pattern: pattern.roll(1, 1)).equal(read(model)[1])


def test_an_operation_that_is_not_there(load):
    model = load(EProperty("source.no_such_operation_0.output"), llama.Mlp, LlamaMLP)
    with pytest.raises(SourceNotAvailable, match=f"extra of .*no_such_operation_0.*{GATE}"):
        read(model, model.layers[BLOCK].mlp)
    assert model.layers[0].mlp.support()["extra"] is None  # known only once the forward is instrumented


def test_a_module_that_is_not_there(load):
    model = load(EProperty("post_feedforward_layernorm.output"))
    reason = "no post_feedforward_layernorm module on this block"
    assert model.support()["extra"] == dict.fromkeys(range(4), reason)
    with pytest.raises(Unavailable, match=reason):
        model.layers[BLOCK].extra  # noqa: B018


# -- one element of what is served -------------------------------------------------------------------------------------


def test_an_argument_by_keyword(load):
    model = load(EProperty("self_attn.inputs", select="hidden_states"))
    norm = model._module.model.layers[BLOCK].input_layernorm
    assert read(model)[0].equal(hooked(model, norm)[1])
    assert written(model, halved).equal(hooked(model, norm, halved)[0])


def test_an_argument_by_position_or_keyword(load):
    """Whichever way it is passed."""
    norm = llama.Layer.attention_norm_output
    for select in ((0, "hidden_states"), (5, "hidden_states"), lambda block: (0, "hidden_states")):
        model = load(EProperty("self_attn.inputs", select=select))
        with model.trace(IDS):
            normed = norm.__get__(model.layers[BLOCK]).save()
            value = model.layers[BLOCK].extra.save()
        assert value.equal(normed)
    model = load(EProperty("mlp.inputs", select=(0, "x")))
    with model.trace(IDS):
        entering = model.layers[BLOCK].mlp_input.save()
        value = model.layers[BLOCK].extra.save()
    assert value.equal(entering)


def test_an_argument_that_was_not_passed(load):
    model = load(EProperty("self_attn.inputs", select=(7, "no_such_argument")))
    with pytest.raises(ValueError, match=r"extra of .*'hidden_states'.*no_such_argument"):
        read(model)


def test_all_arguments(load):
    model = load(EProperty("self_attn.inputs"))
    with model.trace(IDS):
        arguments = [model.layers[BLOCK].extra].save()
    args, kwargs = arguments[0]
    assert args == () and "hidden_states" in kwargs


@pytest.mark.parametrize("select", [1, "hidden"])
def test_an_element_of_a_tensor_is_no_row_of_it(load, select):
    model = load(EProperty("output", select=select))
    with pytest.raises(ValueError, match=f"extra of .* returned a Tensor.*element {select!r}"), model.trace(IDS):
        model.layers[BLOCK].extra.save()
    with pytest.raises(ValueError, match="returned a Tensor"), model.trace(IDS):
        model.layers[BLOCK].extra = torch.zeros(6, 32)


@pytest.mark.parametrize("select", [0, FIRST, lambda attention: 0])
def test_an_element_of_a_tuple_is_put_back_beside_the_others(load, select):
    model = load(EProperty("output", select=select), llama.Attention, LlamaAttention)
    attention = model.layers[BLOCK].self_attn
    module = attention._module
    with model.trace(IDS):
        attention.extra = attention.extra * 0.5
        output = attention.output.save()
        logits = model.logits.save()
    assert isinstance(output, tuple) and len(output) == 2
    assert output[0].equal(hooked(model, module)[1] * 0.5)
    assert logits.equal(hooked(model, module, halved)[0])


def test_an_element_by_name(load):
    """Of the model's own output, which has names."""
    model = load(EProperty("/output", select="logits"))
    value, logits = read(model)
    assert value.equal(logits)


# -- views -----------------------------------------------------------------------------------------------------------


def per_half():
    """A view of the MLP's output, cut in two halves; assignments are put together again."""

    @EProperty("mlp.output", description="The MLP's output in two halves")
    def extra(self, value: Tensor) -> Residual:
        return value.unflatten(-1, (2, -1))[..., 0, :]

    return extra


def test_a_view_is_edited_in_place(load):
    model = load(per_half())
    mlp = model._module.model.layers[BLOCK].mlp

    def half(output):
        return torch.cat([output[..., :16] * 0, output[..., 16:]], -1)

    with model.trace(IDS):
        model.layers[BLOCK].extra[:] = 0
        logits = model.logits.save()
    assert logits.equal(hooked(model, mlp, half)[0])


def test_postprocess_makes_the_element_of_what_is_assigned(load):
    @EProperty("mlp.output")
    def extra(self, value: Tensor) -> Tensor:
        return value.unflatten(-1, (2, -1))

    @extra.postprocess
    def extra(self, value: Tensor) -> Tensor:
        return value.flatten(-2)

    model = load(extra)
    mlp = model._module.model.layers[BLOCK].mlp
    assert read(model)[0].shape == (2, 6, 2, 16)
    swapped = written(model, lambda halves: halves.flip(-2))
    expected = hooked(model, mlp, lambda output: output.unflatten(-1, (2, -1)).flip(-2).flatten(-2))[0]
    assert swapped.equal(expected)
    with pytest.raises(ValueError, match=r"\(2, 6, 2, 16\)"):
        written(model, lambda halves: halves.flatten(-2))


def test_transform_takes_in_place_edits_of_a_copy_back(load):
    @EProperty("mlp.output")
    def extra(self, value: Tensor) -> Tensor:
        return value.transpose(1, 2).contiguous()

    @extra.transform
    def extra(self, view: Tensor, value: Tensor) -> Tensor:
        return view.transpose(1, 2)

    model = load(extra)
    mlp = model._module.model.layers[BLOCK].mlp
    value, logits = read(model)
    clean, output = hooked(model, mlp)
    assert value.equal(output.transpose(1, 2)) and logits.equal(clean)
    with model.trace(IDS):
        model.layers[BLOCK].extra[:, :, -1] = 0
        logits = model.logits.save()

    def last_token_zeroed(output):
        return torch.cat([output[:, :-1], output[:, -1:] * 0], 1)

    assert logits.equal(hooked(model, mlp, last_token_zeroed)[0])


def test_a_view_that_fails_says_which_value_it_is(load):
    """An AttributeError inside would otherwise read as "no such value"."""

    @EProperty("mlp.output")
    def extra(self, value: Tensor) -> Tensor:
        return value.no_such_method()

    model = load(extra)
    with pytest.raises(RuntimeError, match="reading extra of .*no_such_method"):
        read(model)


# -- derived values ----------------------------------------------------------------------------------------------------


def test_a_derived_value_is_computed_from_others(load):
    def both(block) -> Residual:
        """What the block adds."""
        return block.self_attn.attention_output + block.mlp.mlp_output

    model = load(DerivedEProperty(both, "What the block adds", instead="mlp.mlp_output"))
    value, _ = read(model)
    block = model._module.model.layers[BLOCK]
    assert value.equal(hooked(model, block.self_attn)[1] + hooked(model, block.mlp)[1])
    extra = type(model.layers[BLOCK]).extra
    assert extra.layout is Residual and extra.dims == ("batch", "seq", "hidden_size")
    assert model.support()["extra"] is None
    assert "What the block adds" in repr(model.layers[BLOCK])
    with pytest.raises(AttributeError, match=r"extra of .* is derived and read-only; assign mlp\.mlp_output"):
        written(model, halved)


def test_a_derived_value_can_be_unavailable(load):
    model = load(DerivedEProperty(lambda block: None, unavailable=lambda block: "only on even blocks"))
    assert model.support(layer=BLOCK)["extra"] == "only on even blocks"
    with pytest.raises(Unavailable, match="only on even blocks"):
        read(model)


# -- availability ------------------------------------------------------------------------------------------------------


def test_an_unavailable_value_keeps_its_name_and_says_why(load):
    model = load(unavailable("this block is only a test"))
    block = model.layers[BLOCK]
    assert "(extra): Unavailable: this block is only a test" in repr(block)
    assert block.support()["extra"] == "this block is only a test"
    assert model.support()["extra"] == dict.fromkeys(range(4), "this block is only a test")
    assert model.support(layer=0)["extra"] == "this block is only a test"
    for access in (lambda: block.extra, lambda: hasattr(block, "extra"), lambda: setattr(block, "extra", IDS)):
        with pytest.raises(Unavailable, match=r"extra of .*LlamaDecoderLayer.* only a test"):
            access()


def test_availability_is_each_blocks_own(load):
    def odd(block):
        return "odd blocks have none" if int(block.path.rpartition(".")[2]) % 2 else None

    model = load(EProperty("mlp.output", unavailable=odd))
    assert model.support()["extra"] == {1: "odd blocks have none", 3: "odd blocks have none"}
    assert model.support(layer=0)["extra"] is None and model.support(layer=1)["extra"] == "odd blocks have none"
    with model.trace(IDS):
        value = model.layers[2].extra.save()
    assert value.equal(hooked(model, model._module.model.layers[2].mlp)[1])


def test_a_value_of_some_blocks_alone(checkpoint):
    """Installed by path, on one block: the others say what they lack."""
    kind = type("Layer", (llama.Layer,), {"extra": EProperty("mlp.output")})
    family = type("family", (), {**vars(llama), "ENVOYS": {LlamaMLP: llama.Mlp, LlamaAttention: llama.Attention}})
    envoys = {f"layers.{i}": kind if i == 2 else llama.Layer for i in range(4)}
    model = StandardizedTransformer(checkpoint, family=family, envoys=envoys)
    assert set(model.support()["extra"]) == {0, 1, 3}
    assert model.support()["extra"][0] == "no extra value on this block's class"


# -- pickling ----------------------------------------------------------------------------------------------------------


def test_a_class_shipped_by_value_serves_its_values(checkpoint, monkeypatch):
    """As a request to a server ships a class that the server cannot import."""

    class Extra(llama.Layer):
        @EProperty("mlp.output", description="The MLP's output")
        def extra(self, value: Tensor) -> Residual:
            return value

        extra_sum = DerivedEProperty(lambda block: block.extra.sum(-1))

    parcel = cloudpickle.dumps(Extra)
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})  # as in another process
    shipped = cloudpickle.loads(parcel)
    assert shipped is not Extra and list(shipped.values()) == list(Extra.values())
    model = StandardizedTransformer(
        checkpoint, dispatch=True, attn_implementation="eager", envoys={LlamaDecoderLayer: shipped}
    )
    value, _ = read(model)
    mlp = model._module.model.layers[BLOCK].mlp
    assert value.equal(hooked(model, mlp)[1])
    assert written(model, halved).equal(hooked(model, mlp, halved)[0])
    with model.trace(IDS):
        total = model.layers[BLOCK].extra_sum.save()
    assert total.equal(value.sum(-1))
