"""nnterp on the vLLM engine: `StandardizedVLLM`, and in `nnterp_vllm.families` one module per `model_type` served."""

from typing import Any

from nnterp.plugins import hookimpl, public_modules

__all__ = ["StandardizedVLLM"]


@hookimpl
def nnterp_families(engine: str | None) -> dict[str, str]:
    return public_modules(f"{__name__}.families") if engine == "vllm" else {}


def __getattr__(name: str) -> Any:
    # Plugins are discovered by importing this package, which must not start vLLM.
    if name != "StandardizedVLLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "StandardizedVLLM needs vLLM: pip install 'nnterp[vllm]', or without a GPU pip install 'nnterp-vllm[cpu]'"
        ) from error
    from nnterp_vllm.engine import StandardizedVLLM

    return StandardizedVLLM
