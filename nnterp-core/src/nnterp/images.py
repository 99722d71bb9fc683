"""What a prompt with images has to have: as many images as places for them, and a load that they can reach.

A processor and a model answer a mismatch each in its own way, or not at all: LLaVA, called with image tokens and no
image, runs on the embedding of the token. Here it is an error before anything runs.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nnterp.wrappers import multimodal

#: What a call may give images as.
IMAGES = ("images", "image")
#: What a processor makes of them.
PIXELS = "pixel_values"


def check_prompts(model: Any, invokes: list[tuple]) -> None:
    """Raise ValueError where a call gives images that cannot reach the model, or not as many as its prompt has places.

    Checked where text and images are given as such; chat messages hold their own images.
    """
    for inputs, named in invokes:
        images = given(named)
        if images is not None and not multimodal(model):
            raise ValueError(f"images= was given to a model of text alone ({type(model._module).__name__})")
        if images is not None and model.processor is None:
            raise ValueError(
                f"images= was given to {type(model._module).__name__} in a load that no image reaches: load the "
                f'checkpoint with task="image-text-to-text", or give a ready module its processor='
            )
        if images is not None and len(invokes) > 1:
            raise ValueError(
                "one invoke of a trace can have images, and then no other a prompt: give it a list of prompts with a "
                "list of images for each, or trace them one after the other"
            )
        text = inputs[0] if inputs else named.get("text")
        prompts = [text] if isinstance(text, str) else text
        place = placeholder(model)
        if place is None or not _are(prompts, str):
            continue
        places, count = sum(prompt.count(place) for prompt in prompts), _count(images)
        if places != count:
            raise ValueError(
                f"the prompt has {places} {place!r} and {count} images were given: an image takes the place of each, "
                f"in their order; pass images=[...] with {places} of them, or write {place!r} {count} times"
            )


def encoded(model: Any, invokes: list[tuple]) -> list[tuple]:
    """``invokes``, where several prompts of one have images what the processor makes of them, padded to one length.

    nnsight 0.8.1 calls the processor without padding, which fails where the prompts differ in length.
    """
    return [
        ((), _rows(model, inputs[0], named)) if inputs and _are(inputs[0], str) and given(named) is not None else each
        for each in invokes
        for inputs, named in [each]
    ]


def _rows(model: Any, prompts: list[str], named: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in named.items() if name not in IMAGES}
    with unset_fake_temporarily():  # a scan: pixels are numpy's
        encoding = model.processor(text=prompts, images=given(named), padding=True, return_tensors="pt")
    return {**encoding, **rest}


def given(named: Mapping[str, Any]) -> Any:
    """The images that a call is given, or None."""
    return next((named[name] for name in IMAGES if named.get(name) is not None), None)


def check_inputs(model: Any, named: Mapping[str, Any]) -> None:
    """Raise ValueError where what the model is called with has image tokens and no image, or an image and no tokens."""
    vision, ids = model.__dict__.get("vision"), named.get("input_ids")
    if vision is None or not isinstance(ids, Tensor) or named.get("inputs_embeds") is not None:
        return
    if detect_fake_mode() is not None:  # a scan: shapes, in which no token can be looked for
        return
    tokens, given = int((ids == vision.image_token_id).sum()), named.get(PIXELS) is not None
    if tokens and not given:
        raise ValueError(
            f"the prompt has {tokens} image tokens (id {vision.image_token_id}) and no image: pass images=[...], or "
            f"{PIXELS} with the token ids"
        )
    if given and not tokens:
        raise ValueError(
            f"an image was given and the prompt has no image token (id {vision.image_token_id}) for it: write "
            f"{placeholder(model) or 'one'!r} where it goes"
        )


def placeholder(model: Any) -> str | None:
    """What stands for one image in a prompt of this model, or None where that is not known."""
    if "vision" not in model.__dict__ or model.processor is None:
        return None
    return getattr(model.processor, getattr(model.overlay, "PLACEHOLDER", "image_token"), None)


def _are(items: Any, kind: type) -> bool:
    return isinstance(items, (list, tuple)) and all(isinstance(item, kind) for item in items)


def _count(images: Any) -> int:
    """How many images there are in one, a list of them, or a list per prompt."""
    if images is None:
        return 0
    return sum(map(_count, images)) if isinstance(images, (list, tuple)) else 1
