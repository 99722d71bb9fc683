"""`FamilySuite`: the statements that hold on every family, one class per subject, put together."""

from nnterp.testing.formulas import Formulas
from nnterp.testing.loading import Loading
from nnterp.testing.methods import Methods
from nnterp.testing.naming import Naming
from nnterp.testing.running import Running
from nnterp.testing.writing import Writing


class FamilySuite(Naming, Formulas, Methods, Writing, Running, Loading):
    """Subclass it, state the family's facts (`nnterp.testing.facts.Facts`), and let pytest collect it."""
