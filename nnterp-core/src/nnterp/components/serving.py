"""The interleaver of a standardized model: what is served beyond modules' inputs and outputs is put in place per run.

nnsight's interleaver drives one run of the model. This one first sees to it that every `Standard` envoy's own locations
are there (its taps, and nnsight's instrumentation where a class asks for it), then makes attention calls serve for as
long as the run lasts. Doing it when a run starts, and not on the first read, is what makes a value first read at a late
step of ``generate`` that step's value; doing it for the run alone leaves an untraced model as it was.
"""

from typing import Any

from nnsight.intervention.interleaver import Interleaver

from nnterp.components import interface


class ServingInterleaver(Interleaver):
    """nnsight's `Interleaver`, with the standard locations installed for the length of each run."""

    def __init__(self, fragments: Any = None) -> None:
        super().__init__(fragments=fragments)
        self.stale = True  # a Standard envoy was built, re-pointed or instrumented since the last run

    def install(self) -> None:
        if self.stale:
            from nnterp.components.standard import Standard

            for envoy in list(self.envoys.values()):
                if isinstance(envoy, Standard):
                    envoy.install()
            self.stale = False

    def __enter__(self) -> "ServingInterleaver":
        self.install()
        interface.start_serving()
        try:
            return super().__enter__()
        except BaseException:
            interface.stop_serving()  # the run never started, so nothing will leave it
            raise

    def __exit__(self, *exc: Any) -> bool:
        interface.stop_serving()
        return super().__exit__(*exc)
