"""nnterp on the vLLM engine: `nnterp_vllm.families` has one module per `model_type` that vLLM serves."""

from nnterp.plugins import hookimpl, public_modules


@hookimpl
def nnterp_families(engine: str | None) -> dict[str, str]:
    return public_modules(f"{__name__}.families") if engine == "vllm" else {}
