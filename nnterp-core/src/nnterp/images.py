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
#: What an image part of a chat message has its image under.
SOURCES = ("image", "url", "path", "base64")
#: What a processor makes of them.
PIXELS = "pixel_values"


def check_prompts(model: Any, invokes: list[tuple]) -> None:
    """Raise ValueError where a call gives images that cannot reach the model, or not as many as its prompt has places.

    Images come beside a prompt of text, as ``images=``, or in the parts of chat messages.
    """
    for inputs, named in invokes:
        prompt = inputs[0] if inputs else named.get("text")
        images, parts = given(named), _image_parts(prompt)
        if images is not None or parts:
            _check_reach(model, "images= was" if images is not None else "a message with an image was", len(invokes))
        if any(not part.keys() & SOURCES for part in parts):
            raise ValueError(
                f"a message has an image part without its image: put it there, {{'type': 'image', 'image': ...}}, or "
                f"pass one of {', '.join(SOURCES)}"
            )
        if images is not None:
            _check_prompt(prompt, named)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        place = placeholder(model)
        if place is not None and not parts and any(place in text for text in _texts(prompt)):
            raise ValueError(
                f"a message has {place!r} in its text and no image: put one among its parts, "
                f"{{'type': 'image', 'image': ...}}, and the template writes {place!r}"
            )
        if place is None or not _are(prompts, str):
            continue
        places: Any = [each.count(place) for each in prompts]
        # A list for each prompt, or one list for all: some processors take the latter in the order of the places.
        nested = bool(images) and _are(images, (list, tuple))
        counts: Any = [_count(each) for each in images] if nested else [_count(images)]
        if places == counts or (not nested and sum(places) == counts[0]):
            continue
        if len(prompts) == 1 or not nested:
            places, counts = sum(places), sum(counts)
        raise ValueError(
            f"the prompt has {places} {place!r} and {counts} images were given: an image takes the place of each, in "
            f"their order; pass images=[...] with {places} of them, or write {place!r} {counts} times"
        )


def _check_reach(model: Any, given: str, invokes: int) -> None:
    """Raise ValueError where images do not reach ``model``, or there are more ``invokes`` than the one that has them.

    What the tower makes of several prompts' images is one tensor, of which no invoke would have its own part.
    """
    if not multimodal(model):
        raise ValueError(f"{given} given to a model of text alone ({type(model._module).__name__})")
    if model.processor is None:
        raise ValueError(
            f"{given} given to {type(model._module).__name__} in a load that no image reaches: load the checkpoint "
            f'with task="image-text-to-text", or give a ready module its processor='
        )
    if invokes > 1:
        raise ValueError(
            "one invoke of a trace can have images, and then no other a prompt: give it a list of prompts with a list "
            "of images for each, or trace them one after the other"
        )


def _check_prompt(prompt: Any, named: Mapping[str, Any]) -> None:
    """Raise ValueError for ``images=`` beside anything else than text, which is all that a processor takes there."""
    if isinstance(prompt, str) or _are(prompt, str):
        return
    if prompt is None and not named.keys() & {"input_ids", "inputs_embeds"}:
        raise ValueError("images= was given and no prompt: write one, with a place for each image")
    if _messages(prompt):
        raise ValueError(
            "images= goes with a prompt of text, and chat messages have their own: {'type': 'image', 'image': ...} "
            "among the parts of a message's content"
        )
    raise ValueError(
        f"images= goes with a prompt of text: with token ids pass what the processor makes of the images as well "
        f"({PIXELS} and what comes with them), all of its encoding"
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
    """Raise ValueError where what the model is called with has image tokens and no image, or an image and no tokens.

    Or an image where the text model of a wrapper was built alone, which would drop it.
    """
    if (
        named.get(PIXELS) is not None
        and model.overlay is not None
        and not hasattr(model._module.config, "vision_config")
    ):
        raise ValueError(
            f"{PIXELS} was given to {type(model._module).__name__}, the text model alone, which takes no image: load "
            f'the checkpoint with task="image-text-to-text"'
        )
    vision, ids = model.__dict__.get("vision"), named.get("input_ids")
    if vision is None or not isinstance(ids, Tensor) or named.get("inputs_embeds") is not None:
        return
    if detect_fake_mode() is not None:  # a scan: shapes, in which no token can be looked for
        return
    tokens, given = int((ids == vision.image_token_id).sum()), named.get(PIXELS) is not None
    if tokens and not given:
        how = (
            "pass images=[...], or"
            if model.processor
            else 'load it with task="image-text-to-text" to pass one, or pass'
        )
        raise ValueError(
            f"the prompt has {tokens} image tokens (id {vision.image_token_id}) and no image: {how} {PIXELS} with the "
            f"token ids"
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


def _messages(prompt: Any) -> list[Mapping]:
    """The chat messages of ``prompt``, one conversation or several; none where it is anything else."""
    if isinstance(prompt, Mapping):
        return [prompt] if "content" in prompt else []
    return [each for part in prompt for each in _messages(part)] if isinstance(prompt, (list, tuple)) else []


def _parts(prompt: Any) -> list[Mapping]:
    """The parts of chat messages; a content that is a string is one of text."""
    contents = [message["content"] for message in _messages(prompt)]
    lists = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
    return [part for each in lists if isinstance(each, (list, tuple)) for part in each if isinstance(part, Mapping)]


def _image_parts(prompt: Any) -> list[Mapping]:
    return [part for part in _parts(prompt) if part.get("type") == "image"]


def _texts(prompt: Any) -> list[str]:
    return [part["text"] for part in _parts(prompt) if isinstance(part.get("text"), str)]


def _are(items: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(items, (list, tuple)) and all(isinstance(item, kind) for item in items)


def _count(images: Any) -> int:
    """How many images there are in one, a list of them, or a list per prompt."""
    if images is None:
        return 0
    return sum(map(_count, images)) if isinstance(images, (list, tuple)) else 1
