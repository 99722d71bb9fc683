"""`RecurrentSuite`: what holds of every family with a recurrent mixer, beside what `FamilySuite` states."""

from nnterp.testing.recurrent_blocks import RecurrentBlocks
from nnterp.testing.recurrent_reading import RecurrentReading
from nnterp.testing.suite import FamilySuite


class RecurrentSuite(RecurrentBlocks, RecurrentReading, FamilySuite):
    """Subclass it, state the family's facts (`nnterp.testing.recurrent_facts.RecurrentFacts` too), as `FamilySuite`."""
