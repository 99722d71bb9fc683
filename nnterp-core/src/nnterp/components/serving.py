"""The interleaver of a standardized model: what is served beyond modules' inputs and outputs is put in place per
run.

nnsight's interleaver drives one run of the model. This one first sees to it that every `Standard` envoy's own locations
are there (its taps, and nnsight's instrumentation where a class asks for it), then has copies that serve stand in for
transformers' functions for as long as the run lasts (`nnterp.components.runs`). Doing it when a run starts, and not on
the first read, is what makes a value first read at a late step of ``generate`` that step's value; doing it for the run
alone leaves an untraced model as it was.
"""

from collections.abc import Callable
from typing import Any

from nnsight.intervention.interleaver import Interleaver
from nnsight.intervention.source import STATE, State

from nnterp.components import runs
from nnterp.components.standard import Standard


class ServingInterleaver(Interleaver):
    """nnsight's `Interleaver`, with the standard locations installed for the length of each run."""

    def __init__(self, fragments: Any = None) -> None:
        super().__init__(fragments=fragments)
        self.stale = True  # a Standard envoy was built or re-pointed since the last run
        self._bodies: list[tuple[State, Callable]] = []
        self.visits: dict[str, int] = {}  # `nnterp.components.taps.VISITS`
        self.grids: dict[str, list] = {}  # `nnterp.components.vision.tower.GRIDS`

    def install(self) -> None:
        """Put every location in place, unless all are where the last run left them.

        nnsight, asked for a module's operations, puts another forward in place of the one it finds; so does another
        model that wraps the same modules.
        """
        if not self.stale and all(state.body is body for state, body in self._bodies):
            return
        envoys = [envoy for envoy in self.envoys.values() if isinstance(envoy, Standard)]
        for envoy in envoys:
            envoy.install()
        states = [envoy._module.__dict__[STATE] for envoy in envoys if envoy.TAPS or envoy.sourced]
        self._bodies = [(state, state.body) for state in states]
        self.stale = False

    def __enter__(self) -> "ServingInterleaver":
        self.install()
        self.visits.clear()  # of another run, which may have had counts of its own
        self.grids.clear()
        runs.start()
        entered = False
        try:
            super().__enter__()
            entered = True
        finally:
            if not entered:
                runs.stop()  # the run never started, so nothing will leave it
        return self

    def __exit__(self, *exc: Any) -> bool:
        runs.stop()
        return super().__exit__(*exc)
