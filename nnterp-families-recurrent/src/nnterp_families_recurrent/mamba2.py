"""Mamba-2: blocks of one norm and one state-space mixer."""

from transformers.models.mamba2 import modeling_mamba2 as modeling

from nnterp import components
from nnterp_families_recurrent.mamba import RENAME, project_on_vocab

__all__ = ["ENVOYS", "RENAME", "Layer", "StateSpace", "project_on_vocab"]


class Layer(components.MixerLayer):
    """Mamba-2's block."""


class StateSpace(components.StateSpace):
    """Mamba-2's mixer."""


ENVOYS = {modeling.Mamba2Block: Layer, modeling.Mamba2Mixer: StateSpace}
