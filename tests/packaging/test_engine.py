"""nnterp and its vLLM package with the engine for CPUs, from wheels."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "nnterp-vllm/README.md"

pytestmark = pytest.mark.packaging


def test_one_script_on_both_classes(fresh):
    """What the README prints, by the class on transformers and by the one on the engine, which it starts by itself."""
    environment = fresh("nnterp", "nnterp-vllm[cpu]", engine=True)
    assert environment.distributions() == {"nnterp", "nnterp-core", "nnterp-families-dense", "nnterp-vllm"}
    text = README.read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    (environment.folder / "study.py").write_text(script)
    for name in ("StandardizedTransformer", "StandardizedVLLM"):
        said = environment.run("study.py", name, VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
        assert said.splitlines()[-4:] == printed.splitlines(), name
    served = environment.report("""
import json
from nnterp import families
print(json.dumps({name: families.lookup(name, engine="vllm").__name__ for name in families.known("vllm")}))
""")
    assert len(served) >= 9
    assert served == {name: f"nnterp_vllm.families.{name}" for name in served}
