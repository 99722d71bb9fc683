"""Mamba-2: blocks of one norm and one state-space mixer."""

from transformers.models.mamba2 import modeling_mamba2 as modeling

from nnterp import components
from nnterp_families_recurrent.mamba import ONE_SUBLAYER, RENAME, project_on_vocab

__all__ = ["ENVOYS", "RENAME", "Layer", "StateSpace", "project_on_vocab"]


class Layer(components.Layer):
    """Mamba-2's block: ``layer_input + attention_output``."""

    TAPS = {}
    layer_mid = components.unavailable(ONE_SUBLAYER)
    mlp_norm_output = components.unavailable(ONE_SUBLAYER)
    mlp_input = components.unavailable(ONE_SUBLAYER)


class StateSpace(components.StateSpace):
    """Mamba-2's mixer."""


ENVOYS = {modeling.Mamba2Block: Layer, modeling.Mamba2Mixer: StateSpace}
