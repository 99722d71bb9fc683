"""The values of a class: what is listed, the same value at another place, as text, and as a pickle."""

import copy

import cloudpickle
import pytest
from torch import Tensor

from nnterp import Attention, EProperty, Layer, Mlp, components
from nnterp.components import Residual


def test_values_are_listed_base_classes_first():
    class MyLayer(Layer):
        extra = EProperty("output")
        layer_mid = None

    names = list(MyLayer.values())
    assert names[-1] == "extra" and "layer_mid" not in names
    assert names[:-1] == [name for name in Layer.values() if name != "layer_mid"]
    assert sorted(Attention.values()) == [
        f"attention_{part}"
        for part in ("head_outputs", "keys", "output", "premix", "probabilities", "queries", "scores", "values")
    ]
    assert list(Mlp.values()) == ["mlp_activation", "mlp_neurons", "mlp_output"]


def test_the_same_value_at_another_place():
    moved = Layer.mlp_norm_output.at("pre_feedforward_layernorm.output")
    assert moved.path(None) == "pre_feedforward_layernorm.output"
    assert moved.layout is Residual and moved.description == Layer.mlp_norm_output.description
    assert moved.__doc__ == Layer.mlp_norm_output.__doc__
    assert Layer.mlp_norm_output.path(None) == "post_attention_layernorm.output"
    gone = Layer.layer_output.at("output", select=0, unavailable="not here")
    assert gone.select == 0 and gone.reason(None) == "not here"


def test_a_value_as_text():
    assert str(Layer.layer_output) == (
        "(layer_output) -> Residual [batch, seq, hidden_size]: The residual stream leaving the block"
    )


def test_a_layout_goes_by_its_name_however_it_is_spelled():
    class MyLayer(Layer):
        @EProperty("output", description="Mine")
        def extra(self, value: Tensor) -> components.Pattern:
            return value

    assert str(MyLayer.extra) == "(extra) -> Pattern [batch, num_heads, query, key]: Mine"


def test_an_operation_inside_a_forward_is_told_by_its_path():
    class MyLayer(Layer):
        called = EProperty("mlp.source.act_fn_0.output")
        chosen = EProperty(lambda layer: "mlp.output")

    assert MyLayer.called.inside_forward() and not Layer.layer_output.inside_forward()
    assert MyLayer.chosen.inside_forward() and not MyLayer.chosen.inside_forward(object())


@pytest.mark.parametrize("value", [Layer.layer_output, Layer.layer_mid, Attention.attention_premix, Mlp.mlp_output])
def test_a_value_is_pickled_with_all_it_says(value):
    for other in (cloudpickle.loads(cloudpickle.dumps(value)), copy.deepcopy(value)):
        assert type(other) is EProperty and other is not value
        assert (other.name, other.description) == (value.name, value.description)
        assert other.layout is value.layout
