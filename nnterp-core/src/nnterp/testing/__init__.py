"""The conformance kit: a plugin author subclasses `FamilySuite` with a tiny config and gets every statement that the
documentation makes about a value checked against plain torch hooks and transformers' own outputs.

    from nnterp.testing import FamilySuite

    class TestLlama(FamilySuite):
        FAMILY = "llama"
        CONFIG = dict(model_type="llama", hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64)

Run it with pytest, which the extra ``nnterp-core[testing]`` brings. `nnterp.testing.suite` says what a class can
state.
"""

import pytest

#: The modules whose assertions pytest explains.
MODULES = (
    "biased",
    "block_kinds",
    "comparing",
    "formulas",
    "gates",
    "loading",
    "methods",
    "mistakes",
    "mixture_writing",
    "mixtures",
    "naming",
    "qwen_tower",
    "recurrent_blocks",
    "recurrent_reading",
    "recurrent_states",
    "recurrent_writing",
    "running",
    "vision",
    "vision_prompts",
    "writing",
)

pytest.register_assert_rewrite(*(f"nnterp.testing.{name}" for name in MODULES))

from nnterp.testing.biased import BiasedMixtureSuite  # noqa: E402
from nnterp.testing.block_kinds import BlockKinds  # noqa: E402
from nnterp.testing.gates import GatedQueries, GatedSharedExpert  # noqa: E402
from nnterp.testing.mistakes import mistake  # noqa: E402
from nnterp.testing.mixture_oracles import Loop, WrittenOut, gated_expert, interleaved_expert  # noqa: E402
from nnterp.testing.mixtures import MixtureSuite  # noqa: E402
from nnterp.testing.oracles import (  # noqa: E402
    Block,
    Call,
    Formula,
    Forward,
    Inside,
    Site,
    Within,
    WithSink,
    heads,
    run,
)
from nnterp.testing.recurrences import DeltaRule, ScalarDecay, Scan  # noqa: E402
from nnterp.testing.recurrent import RecurrentSuite  # noqa: E402
from nnterp.testing.recurrent_oracles import Recurrence  # noqa: E402
from nnterp.testing.suite import FamilySuite  # noqa: E402
from nnterp.testing.vision import VisionSuite  # noqa: E402
from nnterp.testing.vision_facts import CLIP_BLOCK  # noqa: E402

__all__ = [
    "BiasedMixtureSuite",
    "Block",
    "BlockKinds",
    "CLIP_BLOCK",
    "Call",
    "DeltaRule",
    "FamilySuite",
    "Formula",
    "Forward",
    "GatedQueries",
    "GatedSharedExpert",
    "Inside",
    "Loop",
    "MixtureSuite",
    "Recurrence",
    "RecurrentSuite",
    "ScalarDecay",
    "Scan",
    "Site",
    "VisionSuite",
    "WithSink",
    "Within",
    "WrittenOut",
    "gated_expert",
    "heads",
    "interleaved_expert",
    "mistake",
    "run",
]
