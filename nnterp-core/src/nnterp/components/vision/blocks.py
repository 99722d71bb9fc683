"""The blocks of an image tower: the values of a decoder block, one row per image and one position per patch."""

from typing import Any

from torch import Tensor

from nnterp.components.attention import Attention
from nnterp.components.eproperty import EProperty
from nnterp.components.layer import Layer
from nnterp.components.layouts import HeadOutputs
from nnterp.components.mlp import Mlp
from nnterp.components.standard import Standard
from nnterp.components.vision.layouts import Patches, PatchNeurons

#: Why a load has no values of the image side.
NO_PROCESSOR = (
    'no image reaches this load, which has no processor: load it with task="image-text-to-text", or give a ready '
    "module one with processor="
)
#: What to say where a value of the image side was never served.
NO_IMAGE = "No image was in this call: pass images=[...] with the prompt."


def row_first(envoy: Any, value: Tensor) -> Tensor:
    """``value`` with the axis of images, which a tower that packs them does not have: a view."""
    return value.unsqueeze(0) if envoy.tower.FLAT else value


def as_native(envoy: Any, value: Tensor) -> Tensor:
    """``value`` as the module has it."""
    return value.squeeze(0) if envoy.tower.FLAT else value


def per_patch(value: EProperty, layout: Any = Patches, **place: Any) -> EProperty:
    """``value`` of a text block as a tower's block has it, in ``layout``; at another place where one is given."""
    moved = value.at(layout=layout, **place)
    moved._preprocess, moved._postprocess = row_first, as_native
    return moved


class OfTower(Standard):
    """A part of an image tower, all of whose values are unavailable on a load that no image reaches."""

    ABSENT = NO_IMAGE

    @property
    def tower(self) -> Any:
        """The `Vision` this is a part of."""
        from nnterp.components.vision.tower import Vision

        host: Any = self
        while not isinstance(host, Vision):
            host = host.parent
        return host

    @property
    def refused(self) -> dict[str, str]:
        """Every value, with the reason, on a load that no image reaches."""
        reason = self.tower.no_images()
        return dict.fromkeys(self.values(), reason) if reason else {}


class VisionLayer(OfTower, Layer):
    """A block of an image tower: the values of `Layer`, each ``[images, patches, vision_hidden_size]``.

    The identity holds: ``layer_input + attention_output + mlp_output == layer_output``. In-place edits and assignment
    reach the tower, and the text where the model reads that block or a later one. ``layer_input`` is the very tensor
    that left the block before: edited in place, it is another for a projector that reads that block too (LLaVA-1.5);
    assigned, it is not.
    """

    layer_input = per_patch(Layer.layer_input)
    attention_norm_output = per_patch(Layer.attention_norm_output)
    layer_mid = per_patch(Layer.layer_mid)
    mlp_norm_output = per_patch(Layer.mlp_norm_output)
    mlp_input = per_patch(Layer.mlp_input)
    layer_output = per_patch(Layer.layer_output)

    def skip_with(self, hidden: Tensor) -> None:
        """Skip this block: ``hidden``, ``[images, patches, vision_hidden_size]``, takes the place of its output."""
        type(self).layer_output.check(self, hidden, self.layer_input)
        self.skip(self._returned(as_native(self, hidden)))


class VisionAttention(OfTower, Attention):
    """The attention of a tower's block. It looks both ways; the batch axis of the interior is that of images."""

    attention_output = per_patch(Attention.attention_output)

    @EProperty("o_proj.input", description="What enters the output projection, per head")
    def attention_premix(self, value: Tensor) -> HeadOutputs:
        """What the output projection mixes, ``[images, patches, num_heads, head_dim]``: a view of its input.

        In-place edits and assignment reach the model.
        """
        return row_first(self, value).unflatten(-1, (self.num_heads, -1))

    @attention_premix.postprocess
    def attention_premix(self, value: Tensor) -> Tensor:
        return as_native(self, value.flatten(-2))


class PerImageAttention(VisionAttention):
    """An attention over packed images that calls the attention function once per image, or once per window.

    Queries, keys and values are read before they are split and head outputs when they are together again, all images
    in one row. Scores and patterns are those of one image or window at a time, so there is no one value of them.
    """

    PER_IMAGE = (
        "this attention runs once per image or window (cu_seqlens), each with a pattern of its own, so there is no one "
        "pattern over the patches of this row; the queries and keys that make them are here"
    )
    attention_queries = Attention.attention_queries.at("packed_inputs", unavailable=None)
    attention_keys = Attention.attention_keys.at("packed_inputs", unavailable=None)
    attention_values = Attention.attention_values.at("packed_inputs", unavailable=None)
    attention_scores = Attention.attention_scores.at(unavailable=PER_IMAGE)
    attention_probabilities = Attention.attention_probabilities.at(unavailable=PER_IMAGE)
    attention_head_outputs = Attention.attention_head_outputs.at("packed_outputs", unavailable=None)


class VisionMlp(OfTower, Mlp):
    """The feed-forward of a tower's block."""

    mlp_activation = per_patch(Mlp.mlp_activation, PatchNeurons)
    mlp_neurons = per_patch(Mlp.mlp_neurons, PatchNeurons)
    mlp_output = per_patch(Mlp.mlp_output)
