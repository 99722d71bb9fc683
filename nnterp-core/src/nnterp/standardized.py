"""A model of any family under one set of names, run by transformers.

`Standardized` (`nnterp.root`) is what holds on every engine; `StandardizedTransformer`
puts it over nnsight's `TransformersModel` and adds the root's own values and the load path.
"""

from types import ModuleType
from typing import Any

from nnsight.modeling.transformers import TransformersModel
from torch import Size, Tensor, nn

from nnterp import images, loading, wrappers
from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import EProperty
from nnterp.components.inputs import TokenIds
from nnterp.components.layouts import Logits, NextTokenProbs, Residual, Tokens
from nnterp.components.serving import ServingInterleaver
from nnterp.components.standard import Blocks
from nnterp.root import Standardized
from nnterp.sizes import StandardizedCapability, StandardizedProperty

__all__ = [
    "Logits",
    "NextTokenProbs",
    "Standardized",
    "StandardizedCapability",
    "StandardizedProperty",
    "StandardizedTransformer",
    "Tokens",
]


def _next_token_probs(model: Standardized) -> NextTokenProbs:
    """The distribution over each row's next token, ``[batch, vocab_size]``, in the model's dtype.

    The softmax of the last position's `logits`, which is every row's last token where padding is on the left.
    """
    return model.logits[:, -1].softmax(-1)


def _input_size(model: Standardized) -> Size:
    """The shape of the token ids of this call, ``(batch, seq)``."""
    return model.input_ids.shape


class StandardizedTransformer(Standardized, TransformersModel):
    """A decoder-only transformer whose modules and values answer to one set of names.

    The checkpoint's config is read first; its ``model_type`` selects the family (`nnterp.families.lookup`), whose maps
    nnsight builds the tree with. Native names keep working: an alias is one more attribute of the same envoy. Otherwise
    it is nnsight's `TransformersModel`: ``trace``, ``generate``, ``session``, ``edit``, ``scan`` and the rest work as
    there.

    Args:
        repo_id: A hub id, a checkpoint directory, or a ready ``nn.Module``, which is wrapped as it is.
        family: The family to use, any object with ``RENAME`` and ``ENVOYS``; nothing is looked up then.
        rename: More aliases, over the family's; the same key given here wins.
        envoys: More envoy classes, over the family's; the same key given here wins. A type key goes before any name.
        tokenizer_kwargs: Attributes to set on the tokenizer (``{"padding_side": "right"}``).
        **kwargs: For `TransformersModel`: ``dispatch``, ``dtype``, ``device``, ``device_map``, ``attn_implementation``,
            ``task``, ``tokenizer``, ``revision``, ``trust_remote_code``, ``distributed_config``, …. ``task`` is
            ``"text-generation"`` unless given.

    Attributes:
        family: The family's module, that of the text model on a multimodal checkpoint.
        overlay: The module that has the image side of a multimodal checkpoint, or None.
        vision, projector: Its image tower (`nnterp.Vision`) and the last module before the text model.
        layers, embed_tokens, norm, lm_head: The blocks, the embedding, the final norm, the unembedding.

    Raises UnsupportedFamily where the checkpoint is no decoder-only transformer, or has no family and the default one
    does not fit it; ValueError for a ``rename`` that names nothing or hides a name; transformers' own errors for a
    config it cannot read.
    """

    def __init__(
        self,
        repo_id: Any,
        *args: Any,
        family: ModuleType | Any | None = None,
        rename: dict[str, str | list[str]] | None = None,
        envoys: dict | None = None,
        tokenizer_kwargs: dict | None = None,
        **kwargs: Any,
    ) -> None:
        self.family = loading.resolve_family(repo_id, family, kwargs)
        self.overlay = loading.resolve_overlay(repo_id, kwargs)
        # Written once the module is built, which is when its containers are known, and before nnsight reads it.
        self._names: dict = {}
        self._own_names = rename or {}
        self._tokenizer_kwargs = tokenizer_kwargs or {}
        self._add_prefix_false_tokenizer = None
        kwargs.setdefault("task", "text-generation")
        kwargs.setdefault("interleaver", loading.interleaver(ServingInterleaver))
        super().__init__(
            repo_id,
            *args,
            rename=self._names,
            envoys=loading.envoy_classes(
                loading.base_envoys(repo_id, kwargs),
                {nn.ModuleList: Blocks},
                self.family.ENVOYS,
                getattr(self.overlay, "ENVOYS", {}),
                envoys or {},
            ),
            **kwargs,
        )
        loading.check_names(self, rename or {})
        check = getattr(self.family, "check", None)
        if check is not None:
            check(self)

    # -- root values ------------------------------------------------------------------------------------------------

    @TokenIds("inputs", description="The token ids the model is called with", select="input_ids", resizable=("seq",))
    def input_ids(self, value: Tensor) -> Tokens:
        """The token ids of this call, ``[batch, seq]``.

        Assign other ids and the model runs on those. Ids of another length take a mask of ones with them; where rows
        are padded assign `attention_mask` first. ValueError for another length in a generation or with a cache.
        """
        return value

    @EProperty("inputs", description="The mask the model is called with", select="attention_mask", resizable=("seq",))
    def attention_mask(self, value: Tensor) -> Tokens:
        """The attention mask of this call, ``[batch, seq]``: 0 where a row is padded.

        Assign one of another length before `input_ids` of that length.
        """
        return value

    input_size = DerivedEProperty(_input_size, "The shape of the token ids", instead="input_ids")

    @EProperty("embed_tokens.output", description="The embedding's output")
    def token_embeddings(self, value: Tensor) -> Residual:
        """The embedding module's output, ``[batch, seq, hidden_size]``.

        Positions (GPT-2), embedding norms (BLOOM) and multipliers (Granite) come after it. In-place edits and
        assignment reach the model.
        """
        return value

    @EProperty("norm.output", description="The final norm's output")
    def final_norm_output(self, value: Tensor) -> Residual:
        """The final norm's output, ``[batch, seq, hidden_size]``: what the head projects. Edits reach the model."""
        return value

    @EProperty("lm_head.output", description="The head's own output, before any softcap or scale")
    def lm_head_output(self, value: Tensor) -> Logits:
        """The head's own output, ``[batch, seq, vocab_size]``; `logits` is what the model returns.

        Edits reach the model.
        """
        return value

    @EProperty("output", description="The logits the model returns", select="logits")
    def logits(self, value: Tensor) -> Logits:
        """The logits the model returns, ``[batch, seq, vocab_size]``, after any softcap or scale past the head.

        Assign to replace them in what the model returns; in-place edits reach it too.
        """
        return value

    next_token_probs = DerivedEProperty(
        _next_token_probs, "The distribution over each row's next token", instead="model.logits"
    )

    # -- the tokenizer ------------------------------------------------------------------------------------------------

    @property
    def add_prefix_false_tokenizer(self) -> Any:
        """The checkpoint's tokenizer loaded with ``add_prefix_space=False``, so that "word" and " word" differ.

        Loaded once.
        """
        if self._add_prefix_false_tokenizer is None:
            self._require_tokenizer("add_prefix_false_tokenizer loads the tokenizer again")
            self._add_prefix_false_tokenizer = loading.without_prefix_space(self)
        return self._add_prefix_false_tokenizer

    def _configure_tokenizer(self) -> None:
        super()._configure_tokenizer()
        loading.set_tokenizer_attributes(self.tokenizer, self._tokenizer_kwargs)

    # -- nnsight's load path ------------------------------------------------------------------------------------------

    def _loaded_preprocessors(self) -> set:
        return loading.loaded_preprocessors(self.task)

    def _load_meta(self, repo_id: str, *args: Any, **kwargs: Any) -> nn.Module:
        module = loading.build_wrapper(self, repo_id, kwargs)
        return self._named(super()._load_meta(repo_id, *args, **kwargs) if module is None else module)

    def _load(self, repo_id: str, *args: Any, **kwargs: Any) -> nn.Module:
        return self._named(super()._load(repo_id, *args, **kwargs))

    def _wrap(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        loading.refuse_headless(module, self.task)
        if "device_map" not in kwargs:
            kwargs.setdefault("device", module.device)  # without one, a pipeline moves it to the first accelerator
        if loading.has_preprocessors(self):
            return self._named(super()._wrap(module, *args, **kwargs))
        return self._named(loading.wrap_without_tokenizer(self, module, kwargs.get("device")))

    def _named(self, module: nn.Module) -> nn.Module:
        """``module``, with its aliases worked out: the family's, re-rooted on a wrapper, under the caller's own."""
        self._names.clear()
        names = {**wrappers.rerooted(self.family.RENAME, module), **getattr(self.overlay, "RENAME", {})}
        self._names.update({**names, **self._own_names})
        return module

    def _batch(self, invokes: list, fn: Any) -> tuple:
        loading.refuse_text_without_tokenizer(self, invokes)
        images.check_prompts(self, invokes)
        inputs, named = super()._batch(images.encoded(self, invokes), fn)
        images.check_inputs(self, named)
        return inputs, named

    def _remoteable_class(self) -> type:
        # A server deploys plain models: the key is the one an unwrapped model of this checkpoint has.
        return TransformersModel

    def __getattr__(self, name: str) -> Any:
        if name in wrappers.IMAGE_SIDE and wrappers.multimodal(self):
            wrappers.refuse_image_side(name, self)
        return super().__getattr__(name)
