"""`RecurrentSuite`: what holds of every family with a recurrent mixer, beside what `FamilySuite` states."""

from nnterp.testing.recurrent_blocks import RecurrentBlocks
from nnterp.testing.recurrent_writing import RecurrentWriting
from nnterp.testing.suite import FamilySuite


class RecurrentSuite(RecurrentBlocks, RecurrentWriting, FamilySuite):
    """Subclass it, state the family's facts (`nnterp.testing.recurrent_facts.RecurrentFacts` too), as `FamilySuite`."""
