"""`StandardizedVLLM`: the standard names and values over nnsight's `VLLM`."""

from types import ModuleType
from typing import Any

from nnsight.modeling.vllm import VLLM
from nnsight.modeling.vllm.envoys import parallel_envoys
from torch import Size, Tensor, nn

from nnterp import families, loading
from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import unavailable
from nnterp.components.layouts import Logits, NextTokenProbs, Residual, Tokens
from nnterp.components.locations import FIRST
from nnterp.components.standard import Blocks
from nnterp.root import Standardized
from nnterp.shipped import module_name
from nnterp.sizes import StandardizedCapability
from nnterp_vllm import backend, platform
from nnterp_vllm.components import OnEngine
from nnterp_vllm.values import Flat

#: What families are looked up for.
ENGINE = "vllm"


def _next_token_probs(model: "StandardizedVLLM") -> NextTokenProbs:
    """The distribution over the next token, ``[1, vocab_size]``: the softmax of `logits`, in its dtype."""
    return model.logits[:, -1].softmax(-1)


def _input_size(model: "StandardizedVLLM") -> Size:
    """The shape of this step's token ids, ``(1, tokens)``."""
    return model.input_ids.shape


class StandardizedVLLM(OnEngine, Standardized, VLLM):
    """A decoder-only transformer on the vLLM engine whose modules and values answer to the standard names.

    `StandardizedTransformer`'s counterpart over nnsight's `VLLM`: the same names, values, layouts and methods, on
    vLLM's own modules. It is nnsight's `VLLM` otherwise, with vLLM's defaults: a trace is a generation request
    (``max_tokens=16``, ``temperature=1.0``), one prompt an invoke, sampling settings on ``trace`` or ``invoke``, and a
    block runs in the engine's worker, where nnterp has to be importable.

    * A request is one unpadded sequence, so a value's batch axis is 1: the whole prompt first, one token a decode step.
    * `logits` are this step's, of the last position alone, ``[1, 1, vocab_size]``.
    * A value is a private copy, which goes back to the model when the block moves on.
    * Queries, keys, values and head outputs go into and come out of the engine's attention layer; scores and pattern
      are computed again from queries and keys, read-only, on the prompt alone.
    * `project_on_vocab` runs the engine's modules, so it works inside a trace.

    Args:
        repo_id: A hub id or a checkpoint directory.
        family: The family to use; nothing is looked up then.
        rename, envoys: More aliases and envoy classes, over the family's; the same key given here wins.
        **kwargs: For vLLM: ``dtype``, ``max_model_len``, ``gpu_memory_utilization``, ``tensor_parallel_size``, ….

    Raises UnsupportedFamily where no family serves the checkpoint on this engine.
    """

    def __init__(
        self,
        repo_id: str,
        *args: Any,
        family: ModuleType | Any | None = None,
        rename: dict[str, str | list[str]] | None = None,
        envoys: dict | None = None,
        **kwargs: Any,
    ) -> None:
        if platform.on_cpu():
            platform.prepare_cpu()
            self._WORKER_CLS = platform.CPU_WORKER
        self.family = resolve_family(repo_id, family, kwargs)
        super().__init__(
            repo_id,
            *args,
            rename={**self.family.RENAME, **(rename or {})},
            envoys=loading.envoy_classes(parallel_envoys(), {nn.ModuleList: Blocks}, self.family.ENVOYS, envoys or {}),
            **kwargs,
        )
        loading.check_names(self, rename or {})

    # -- root values --------------------------------------------------------------------------------------------------

    @Flat(
        "inputs", select="input_ids", description="The token ids of this step", read_only="hand other ids to the trace"
    )
    def input_ids(self, value: Tensor) -> Tokens:
        """The token ids of this step, ``[1, tokens]``: the whole prompt, then one a decode step. Read-only."""
        return value

    attention_mask = unavailable("a vLLM request is one unpadded sequence; there is no mask")
    input_size = DerivedEProperty(_input_size, "The shape of this step's token ids")

    @Flat("embed_tokens.output", description="The embedding's output")
    def token_embeddings(self, value: Tensor) -> Residual:
        """The embedding module's output, ``[1, tokens, hidden_size]``, before what a family scales or adds to it.

        In-place edits and assignment reach the model.
        """
        return value

    @Flat("norm.output", description="The final norm's output", select=FIRST)
    def final_norm_output(self, value: Tensor) -> Residual:
        """The final norm's output, ``[1, tokens, hidden_size]``: every position of the step, of which the engine
        projects the last. In-place edits and assignment reach the model.
        """
        return value

    lm_head_output = unavailable(
        "vLLM never calls lm_head: its logits processor projects the last position with lm_head's weight and applies "
        "cap and scale in the same call; read logits"
    )

    @Flat("logits", description="The logits of this step's last position")
    def logits(self, value: Tensor) -> Logits:
        """The logits of this step, ``[1, 1, vocab_size]``: of the last position, before sampling.

        Assign to replace what is sampled from; in-place edits reach it too.
        """
        return value

    next_token_probs = DerivedEProperty(
        _next_token_probs, "The distribution over the next token", instead="model.logits"
    )

    # -- methods ------------------------------------------------------------------------------------------------------

    @StandardizedCapability
    def project_on_vocab(self, hidden: Tensor) -> Tensor:
        """Logits of a residual-stream tensor ``[..., hidden_size]``, inside a trace: the final norm, then vLLM's logits
        processor with the head's weight, which caps and scales where the model does.
        """
        return self.head_logits(self.norm(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1]))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits of ``[..., hidden_size]`` as the final norm returns it, inside a trace, as vLLM computes its own."""
        interleaving, self.interleaver.interleaving = self.interleaver.interleaving, False
        try:
            logits = self._module.compute_logits(hidden.flatten(0, -2))
        finally:
            self.interleaver.interleaving = interleaving
        return logits.unflatten(0, hidden.shape[:-1])

    def order(self, layer: int | None = None) -> dict[str, int]:
        """Not on this engine: the forward order is measured on `StandardizedTransformer` only."""
        raise NotImplementedError("order() is measured on StandardizedTransformer; vLLM has no forward to run here")

    def rank(self, name: str, layer: int | None = None) -> tuple[int, int]:
        """Not on this engine: the forward order is measured on `StandardizedTransformer` only."""
        raise NotImplementedError("rank() is measured on StandardizedTransformer; vLLM has no forward to run here")


def resolve_family(repo_id: str, family: Any, kwargs: dict) -> Any:
    """The family of this load on vLLM: the one passed, else the one of the config's ``model_type``.

    Where vLLM runs the checkpoint through transformers' modules, a family of transformers serves it.
    """
    if family is not None:
        return loading.with_maps(family, "family= takes")
    config = loading.read_config(repo_id, kwargs).get_text_config()
    model_type = config.model_type
    what = f"the family of {model_type!r} is"
    if platform.through_transformers(repo_id, kwargs) and on_transformers_alone(model_type):
        return backend.of_transformers(loading.with_maps(families.lookup(model_type), what), config)
    return loading.with_maps(families.lookup(model_type, engine=ENGINE), what)


def on_transformers_alone(model_type: str) -> bool:
    """Whether a family of transformers serves the type, and nothing that was written for the engine's backend does."""
    name = module_name(model_type)
    if f"{ENGINE}.{model_type}" in families.REGISTRY or (
        model_type not in families.REGISTRY and name not in families.known()
    ):
        return False
    families.known(ENGINE)  # has every plugin say what it serves there
    others = [plugin for plugin in families.plugins() if plugin.distribution != "nnterp-vllm"]
    return not any(name in plugin.families.get(ENGINE, ()) for plugin in others)
