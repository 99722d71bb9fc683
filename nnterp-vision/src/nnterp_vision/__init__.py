"""Vision overlays: every module adds the image side of one multimodal wrapper, and is named by its `model_type`."""

from nnterp.plugins import hookimpl, public_modules


@hookimpl
def nnterp_wrappers() -> dict[str, str]:
    return public_modules(__name__)
