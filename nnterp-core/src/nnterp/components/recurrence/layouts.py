"""The layouts of recurrent mixers' values: the sequence axis is always 1, the key side of a state comes first."""

from jaxtyping import Float
from torch import Tensor

#: ``[batch, seq, heads, key_dim]``.
LinearQK = Float[Tensor, "batch seq heads key_dim"]
#: ``[batch, seq, heads, value_dim]``.
LinearV = Float[Tensor, "batch seq heads value_dim"]
#: One number per token and head, ``[batch, seq, heads]``.
Gates = Float[Tensor, "batch seq heads"]
#: One number per token, head and key channel, ``[batch, seq, heads, key_dim]``.
ChannelGates = Float[Tensor, "batch seq heads key_dim"]
#: A recurrent state, ``[batch, heads, key_dim, value_dim]``.
State = Float[Tensor, "batch heads key_dim value_dim"]
#: One state per token, ``[batch, seq, heads, key_dim, value_dim]``.
States = Float[Tensor, "batch seq heads key_dim value_dim"]
#: One matrix per head and pair of tokens, ``[batch, heads, query, key]``.
EffectiveAttention = Float[Tensor, "batch heads query key"]

#: ``[batch, seq, groups, state_dim]``; Mamba-1 has one group.
ScanQK = Float[Tensor, "batch seq groups state_dim"]
#: ``[batch, seq, channels]``.
ScanValues = Float[Tensor, "batch seq channels"]
#: One step size per token and channel, ``[batch, seq, channels]``.
ScanSteps = Float[Tensor, "batch seq channels"]
#: ``[batch, seq, channels, state_dim]``.
ScanDecays = Float[Tensor, "batch seq channels state_dim"]
#: ``[batch, channels, state_dim]``.
ScanState = Float[Tensor, "batch channels state_dim"]
#: One state per token, ``[batch, seq, channels, state_dim]``.
ScanStates = Float[Tensor, "batch seq channels state_dim"]
#: One matrix per channel and pair of tokens, ``[batch, channels, query, key]``.
ScanAttention = Float[Tensor, "batch channels query key"]

SSDQueries = ScanQK
SSDKeys = ScanQK
#: ``[batch, seq, heads, head_dim]``.
SSDValues = Float[Tensor, "batch seq heads head_dim"]
SSDHeadOutputs = SSDValues

#: One number per token and channel, ``[batch, seq, channels]``.
UnitValues = ScanValues
#: ``[batch, channels]``.
UnitState = Float[Tensor, "batch channels"]
#: One state per token, ``[batch, seq, channels]``.
UnitStates = Float[Tensor, "batch seq channels"]
