"""What importing nnterp and looking a family up cost, in processes of their own.

Each import takes two seconds and varies by a tenth, nnterp's own part of it is a fortieth. So one process imports
nnsight and then nnterp, and the modeling module of a family and then the family: what is common to both sides of a
comparison is the same measurement, and what nnterp adds is measured by itself.
"""

import subprocess
import sys

from measure import Row, Samples, in_ms

WHAT = "imports"
PROCESSES = 6

#: Prints the CPU seconds, user and system, of the process after each step.
STEPS = """
import time
seconds = [time.process_time()]
import nnsight
seconds.append(time.process_time())
import nnterp
seconds.append(time.process_time())
import transformers.models.llama.modeling_llama
seconds.append(time.process_time())
nnterp.families.lookup("llama")
seconds.append(time.process_time())
print(*seconds)
"""


def rows() -> list[Row]:
    samples = Samples()
    for turn in range(PROCESSES + 1):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", STEPS], check=True, capture_output=True, text=True)
        start, nnsight, nnterp, modeling, family = map(float, done.stdout.split())
        if turn:  # the first compiles what is not compiled yet
            samples.seconds["nnsight"].append(nnsight - start)
            samples.seconds["nnterp"].append(nnterp - start)
            samples.seconds["modeling"].append(modeling - nnterp)
            samples.seconds["family"].append(family - nnterp)
    return [
        in_ms("import nnterp", "import nnsight", samples, "nnterp", "nnsight", 1.05),
        in_ms("first look-up of a family", "import its modeling module", samples, "family", "modeling", 1.05),
    ]
