"""`FamilySuite`: the statements that hold on every family, one class per subject, put together."""

from nnterp.testing.writing import Writing


class FamilySuite(Writing):
    """Subclass it, state the family's facts (`nnterp.testing.facts.Facts`), and let pytest collect it."""
