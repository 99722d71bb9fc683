"""What building a model around a ready module costs: the tree of envoys, their names and their values."""

from typing import Any

from measure import Row, Samples, in_ms
from nnsight.modeling.transformers import TransformersModel
from subjects import llama, one_thread, tokenizer
from torch import nn

from nnterp import StandardizedTransformer

WHAT = "builds"


def rows() -> list[Row]:
    found = []
    with one_thread():
        for layers, turns in ((32, 30), (126, 14)):
            samples = built(layers, turns)
            # The ratio may not grow with the model, but for what two runs of one model differ by.
            bound = 1.10 if not found else min(1.10, found[0].ratio + 0.04)
            what = f"build around {layers} layers"
            found.append(in_ms(what, "nnsight, same maps", samples, "nnterp", "same maps", bound))
            found.append(in_ms(what, "nnsight, no maps", samples, "nnterp", "bare"))
    return found


def built(layers: int, turns: int) -> Samples:
    """CPU seconds of a build, each around a module of its own: an envoy leaves its controller on the module."""
    text = tokenizer()
    model = StandardizedTransformer(llama(layers, width=8), tokenizer=text)
    maps = {"rename": model._rename, "envoys": model._envoys}

    def plain(module: nn.Module, **kwargs: Any) -> TransformersModel:
        return TransformersModel(module, task="text-generation", tokenizer=text, **kwargs)

    samples = Samples()
    samples.interleave(
        {
            "nnterp": lambda module: StandardizedTransformer(module, tokenizer=text),
            "same maps": lambda module: plain(module, **maps),
            "bare": plain,
        },
        turns,
        prepare=lambda: llama(layers, width=8),
    )
    return samples
