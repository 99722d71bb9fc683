"""What stands in for functions of transformers for as long as a run lasts.

Some functions that a forward calls belong to no module: the attention function a module looks up, the function that
runs a mixture's experts, a method that holds a family's attention arithmetic. While at least one run is under way they
are replaced by copies that serve it; outside runs they are transformers' own.
"""

import threading
from collections.abc import Callable

_lock = threading.RLock()
_running = 0
_always = False
#: (class, name) -> transformers' own function, and the one that serves.
_swaps: dict[tuple[type, str], tuple[Callable, Callable]] = {}


def during_runs(owner: type, name: str, serving: Callable[[Callable], Callable]) -> Callable:
    """Replace ``owner.name`` by ``serving(owner.name)`` during every run from here on; returns the plain function.

    Asked again for the same function, it does nothing more.
    """
    with _lock:
        if (owner, name) not in _swaps:
            plain = vars(owner)[name]
            _swaps[owner, name] = plain, serving(plain)
            if _running:
                setattr(owner, name, _swaps[owner, name][1])
        return _swaps[owner, name][0]


def start() -> None:
    """A run begins; `stop` has to be called as often."""
    global _running
    with _lock:
        if _running == 0:
            for (owner, name), (_, serving) in _swaps.items():
                setattr(owner, name, serving)
        _running += 1


def stop() -> None:
    """A run ends."""
    global _running
    with _lock:
        _running -= 1
        if _running == 0:
            for (owner, name), (plain, _) in _swaps.items():
                setattr(owner, name, plain)


def always() -> None:
    """Serve from here on, in a process that runs a plain model for requests with standard values (a remote server)."""
    global _always
    with _lock:
        if not _always:
            _always = True
            start()
