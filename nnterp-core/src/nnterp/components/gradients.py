"""The gradient of a value that is a view of what the model goes on with."""

from typing import Any

import torch

#: What nnsight marks a tensor with whose gradient it is to find in that of its base.
ROWS_OF_A_BATCH = "_nnsight_batch"


def gradient_in_base(value: Any) -> None:
    """Have nnsight find the gradient of a view, which the model does not go on with, in that of the tensor viewed.

    nnsight does so for the rows of an invoke, and reads the gradient as the tensor is laid out; here it is laid out so.
    """
    base = value._base if isinstance(value, torch.Tensor) else None
    if base is not None and base.requires_grad:
        setattr(value, ROWS_OF_A_BATCH, True)
        shape, laid_out = base.shape, base.stride()  # not the tensor, which would then hold itself
        base.register_hook(
            lambda grad: grad if grad.stride() == laid_out else grad.new_empty_strided(shape, laid_out).copy_(grad)
        )
