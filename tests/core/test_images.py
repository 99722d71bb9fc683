"""What is said of images where none can be taken, and the rule by which a forward tells what it is called with."""

import pytest
import torch
from torch import nn

from nnterp import StandardizedTransformer
from nnterp.components.taps import HELPERS, entering, tapped
from nnterp.testing import checkpoint, mistake


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    config = checkpoint.config(
        model_type="llama", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    return StandardizedTransformer(str(checkpoint.save(config, directory)), dispatch=True)


def test_an_image_for_a_model_of_text(llama):
    with mistake(ValueError, "images=", "LlamaForCausalLM"), llama.trace("The quick", images=[object()]):  # here
        llama.logits.save()
    with llama.trace("The quick"):
        logits = llama.logits.save()
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["vision", "projector"])
def test_a_model_of_text_has_no_image_side(llama, name):
    with pytest.raises(AttributeError, match=f"has no '{name}'"):
        getattr(llama, name)


def test_what_a_forward_is_entered_with():
    """The expression is of the arguments, evaluated before the first statement; nothing else of the forward changes."""
    seen = []

    class Twice(nn.Module):
        def forward(self, value: list) -> list:
            """Twice what it is called with."""
            value.append(0)
            return [2 * each for each in value]

    HELPERS["__note__"] = lambda value: seen.append(list(value))
    try:
        copy = tapped(Twice.forward, {"called": entering("__note__(value)")}, {})
    finally:
        del HELPERS["__note__"]
    assert copy(Twice(), [1, 2]) == [2, 4, 0]
    assert seen == [[1, 2]]
