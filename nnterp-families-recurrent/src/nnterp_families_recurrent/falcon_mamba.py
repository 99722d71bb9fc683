"""Falcon-Mamba: Mamba's blocks, whose mixer norms the step size, the keys and the queries before the scan.

With ``use_bias`` the short convolution takes in what the bias makes of left padding, so the first tokens behind it
differ from what they are in a prompt alone, in the model as in its values.
"""

from transformers.models.falcon_mamba import modeling_falcon_mamba as modeling

from nnterp import components
from nnterp_families_recurrent.mamba import RENAME, project_on_vocab

__all__ = ["ENVOYS", "RENAME", "Layer", "SelectiveScan", "project_on_vocab"]


class Layer(components.MixerLayer):
    """Falcon-Mamba's block."""


class SelectiveScan(components.SelectiveScan):
    """Falcon-Mamba's mixer: what is served is normed, as the scan receives it."""


ENVOYS = {modeling.FalconMambaBlock: Layer, modeling.FalconMambaMixer: SelectiveScan}
