"""Multimodal wrappers: where the text model sits in one, and the names that its family's modules have there.

A family spells its containers once, for its own causal language model: ``model.layers``. In a wrapper the text model is
a module further down, with the head beside it or inside it, at a place that differs by wrapper
(``model.language_model``, ``model.text_model``, ``language_model``). That place is read off the module that was built:
it is the outermost model whose config is the wrapper's text config.
"""

from typing import Any

from torch import nn

from nnterp import families
from nnterp.shipped import install

#: What an overlay adds to the root.
IMAGE_SIDE = ("vision", "projector")


def text_model(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The path and the module of the text model inside a wrapper; None for a model that is text alone.

    Either the bare decoder or a causal language model with its own head, as the wrapper holds it.
    """
    from transformers import PreTrainedModel

    config = getattr(module, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config()
    if text is config:
        return None
    models = [(path, child) for path, child in module.named_modules() if path and isinstance(child, PreTrainedModel)]
    same = [found for found in models if found[1].config is text]
    return next(iter(same or [found for found in models if found[1].config.model_type == text.model_type]), None)


def rerooted(rename: dict, module: nn.Module) -> dict:
    """A family's ``RENAME`` as it holds on ``module``: itself, or on a wrapper with its containers where they are.

    A container is what the family's blocks are in (``model`` of ``"model.layers": "layers"``). A key that starts with
    one names a module from the root, and becomes the path of that module in the wrapper; it is left out where the text
    model has no such module. The other keys are relative to whatever has them and stay. The head goes by ``lm_head``
    wherever it is.
    """
    found = text_model(module)
    if found is None:
        return dict(rename)
    path, text = found
    containers = {_parts(key)[0] for key, names in rename.items() if _dotted(key) and "layers" in _listed(names)}
    names: dict = {}
    for key, aliases in rename.items():
        if not _dotted(key) or _parts(key)[0] not in containers:
            names[key] = aliases
            continue
        # The text model is the family's whole model, container included, or it is the container.
        cut = next((cut for cut in (0, 1) if _holds(text, _parts(key)[cut:])), None)
        if cut is not None:
            moved = [_moved(alias, path, cut) if "." in alias else alias for alias in _listed(aliases)]
            names.setdefault(_moved(key, path, cut), moved)
    heads = [each.get_output_embeddings() for each in (module, text) if hasattr(each, "get_output_embeddings")]
    head = next((each for each in heads if each is not None), None)
    native = next((place for place, child in module.named_modules() if child is head), None)
    if native not in (None, "lm_head"):
        names[native] = "lm_head"
    return names


def _listed(aliases: str | list[str]) -> list[str]:
    return [aliases] if isinstance(aliases, str) else list(aliases)


def _parts(key: str) -> list[str]:
    return key.lstrip(".").split(".")


def _dotted(key: Any) -> bool:
    return isinstance(key, str) and len(_parts(key)) > 1


def _moved(spelling: str, path: str, cut: int) -> str:
    return ".".join((path, *_parts(spelling)[cut:]))


def _holds(module: nn.Module, parts: list[str]) -> bool:
    """Whether ``module`` has a submodule of that path, where ``*`` is any one."""
    if not parts:
        return True
    children = dict(module.named_children())
    first = list(children.values()) if parts[0] == "*" else [children[parts[0]]] if parts[0] in children else []
    return any(_holds(child, parts[1:]) for child in first)


def multimodal(model: Any) -> bool:
    """Whether ``model``, once built, is of a multimodal checkpoint, with its image side or without."""
    state = model.__dict__
    if "_module" not in state:
        return False
    return state.get("overlay") is not None or hasattr(model._module.config, "vision_config")


def refuse_image_side(name: str, model: Any) -> None:
    """Raise AttributeError for ``model.vision`` or ``model.projector`` of a wrapper that has none here, and say why."""
    kind = model._module.config.model_type
    if model.overlay is not None:
        taken = next((key for key in model._own_names if name in _listed(model.overlay.RENAME.get(key, []))), None)
        if taken is not None:
            raise AttributeError(
                f"there is no model.{name}: rename={{{taken!r}: {model._own_names[taken]!r}}} took its place; name "
                f"both, {{{taken!r}: [{name!r}, ...]}}"
            )
        raise AttributeError(
            f"there is no model.{name}: this load of {kind!r} built {type(model._module).__name__}, which has no image "
            f'side; load it with task="image-text-to-text"'
        )
    plugin = next((each for each in families.plugins() if each.distribution == "nnterp-vision"), None)
    if plugin is None:
        raise AttributeError(f"model.{name} comes with another package: {install('nnterp-vision')}")
    if plugin.state != "loaded":
        why = plugin.error or "NNTERP_DISABLE_PLUGINS"
        raise AttributeError(f"model.{name} comes with {plugin}, which is {plugin.state} here ({why})")
    raise AttributeError(
        f"there is no model.{name}: nothing installed has the image side of {kind!r}, and {plugin} does not serve it; "
        f"the names and values of its text model are here all the same"
    )


def generates_text(config: Any) -> bool:
    """Whether transformers' text generation builds a model for this config; for most wrappers it does not."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
