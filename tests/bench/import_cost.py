"""What importing nnterp and looking a family up cost, in processes of their own."""

import subprocess
import sys

from measure import Row, Samples, in_ms

WHAT = "imports"
TURNS = 6

#: Prints the CPU seconds, user and system, of two steps.
PROCESS = """
import time
started = time.process_time()
{first}
first = time.process_time()
{between}
again = time.process_time()
{second}
print(first - started, time.process_time() - again)
"""
NNTERP = PROCESS.format(
    first="import nnterp", between="", second="import nnterp.families; nnterp.families.lookup('llama')"
)
PLAIN = PROCESS.format(
    first="import nnsight",
    between="import nnsight.modeling.transformers",
    second="import transformers.models.llama.modeling_llama",
)


def seconds(program: str) -> list[float]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(number) for number in done.stdout.split()]


def rows() -> list[Row]:
    samples = Samples()
    for turn in range(TURNS + 1):
        for name, program in (("nnterp", NNTERP), ("plain", PLAIN)):
            imported, looked_up = seconds(program)
            if turn:  # the first turn compiles what is not compiled yet
                samples.seconds[f"{name} import"].append(imported)
                samples.seconds[f"{name} look-up"].append(looked_up)
    return [
        in_ms("import nnterp", "import nnsight", samples, "nnterp import", "plain import", 1.05),
        in_ms(
            "first look-up of a family", "import its modeling module", samples, "nnterp look-up", "plain look-up", 1.05
        ),
    ]
