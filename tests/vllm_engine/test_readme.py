"""The README's script prints what the README says, on both classes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "nnterp-vllm/README.md"


@pytest.mark.parametrize("name", ["StandardizedTransformer", "StandardizedVLLM"])
def test_the_script(name, tmp_path):
    text = README.read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    (tmp_path / "study.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "study.py", name],
        cwd=tmp_path,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-4:] == printed.splitlines()
