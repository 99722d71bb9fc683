"""The token ids a model is called with, and what goes with them."""

from typing import Any

from torch import Tensor

from nnterp.components.eproperty import EProperty


class TokenIds(EProperty):
    """The token ids of a call. Ids of another length take the mask with them, which else hides the tokens past its end.

    A mask of ones becomes one of ones; where rows are padded it says nothing of the new ids, and has to be assigned
    before them. The length stays in a generation, which counts on from the prompt, with a cache, and where several
    invokes share a batch.
    """

    def _pack(self, obj: Any, raw: Any, value: Tensor) -> Any:
        args, kwargs = EProperty._pack(self, obj, raw, value)
        if value.shape == self._pick(obj, raw).shape:
            return args, kwargs
        from transformers import Cache

        what = f"{self.name} of {obj.path} takes {tuple(value.shape)}, another length than this call was made with, "
        batcher = obj.interleaver.batcher
        if (batcher is not None and batcher.batching) or any(isinstance(each, Cache) for each in kwargs.values()):
            raise ValueError(
                f"{what}neither in one of several invokes nor with a cache: hand the ids to the call itself"
            )
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape == value.shape:
            return args, kwargs
        if not mask.all():
            raise ValueError(f"{what}where its rows are padded: assign an attention_mask of that shape first")
        return args, {**kwargs, "attention_mask": mask.new_ones(value.shape)}
