"""What nnterp costs, next to what the same work costs without it: ``make bench``.

With ``engine``, what it costs on the vLLM engine, in an environment that has one.

One table, every number measured in this run. A row with a bound fails the command when its ratio is above it; a row
without one is there for orientation. Two cores are enough, and other work on the machine only makes it slower: see
`measure`.
"""

import os
import sys
import time
import warnings
from types import ModuleType

from measure import Row, table

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported: its profiler announces itself otherwise


def on_transformers() -> tuple[ModuleType, ...]:
    import build_cost
    import import_cost
    import memory_cost
    import mixture_cost
    import read_cost
    import recurrent_cost
    import support_cost

    return import_cost, build_cost, read_cost, memory_cost, support_cost, mixture_cost, recurrent_cost


def on_an_engine() -> tuple[ModuleType, ...]:
    import engine_cost

    return (engine_cost,)


def rows(parts: tuple[ModuleType, ...]) -> list[Row]:
    found: list[Row] = []
    for part in parts:
        started = time.monotonic()
        print(f"{part.WHAT} …", end="", file=sys.stderr, flush=True)
        found += part.rows()
        print(f" {time.monotonic() - started:.0f} s", file=sys.stderr)
    return found


def main() -> int:
    warnings.filterwarnings("ignore")
    found = rows(on_an_engine() if sys.argv[1:] == ["engine"] else on_transformers())
    print(table(found))
    missed = [row for row in found if row.ok is False]
    for row in missed:
        print(f"missed: {row.what} {row.against}: {row.ratio:.3f}, the bound is {row.bound:.2f}")
    return 1 if missed else 0


sys.exit(main())
