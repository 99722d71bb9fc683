"""What an import and a look-up load, each in an interpreter of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADED = """
import json, sys
print(json.dumps({
    "modeling": sorted(m for m in sys.modules if m.startswith("transformers.models.") and ".modeling_" in m
                       and not m.startswith("transformers.models.auto.")),
    "plugins": sorted(m for m in sys.modules if m.startswith(("nnterp_", "acme_nnterp"))),
    "families": sorted(m for m in sys.modules if m.startswith("nnterp.families.")),
    "machinery": sorted({"pluggy", "importlib_metadata"} & set(sys.modules)),
}))
"""

#: The family that is the core's own: it comes with nnterp, and the others one by one.
DEFAULT = "nnterp.families.default"


def loaded_after(code: str, *path: Path) -> dict[str, list[str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONWARNINGS": "error::UserWarning:nnterp",
    }
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LOADED}"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_nnterp_loads_no_plugin_and_no_modeling_code():
    loaded = loaded_after("import nnterp, nnterp.families")
    assert loaded == {"modeling": [], "plugins": [], "families": [DEFAULT], "machinery": []}


def test_discovery_loads_the_plugins_packages_and_no_family(acme_site):
    loaded = loaded_after("from nnterp import families; families.plugins(), families.known(), dir(families)", acme_site)
    assert loaded["modeling"] == [] and loaded["families"] == [DEFAULT]
    assert "acme_nnterp" in loaded["plugins"]
    assert all("." not in name for name in loaded["plugins"])


@pytest.mark.parametrize("code", ["families.lookup('llama')", "families.llama", "import nnterp.families.llama"])
def test_a_look_up_loads_that_family_alone(code):
    loaded = loaded_after(f"from nnterp import families\n{code}")
    assert loaded["modeling"] == ["transformers.models.llama.modeling_llama"]
    assert [name for name in loaded["plugins"] if "." in name] == ["nnterp_families_dense.llama"]
    assert loaded["families"] == [DEFAULT, "nnterp.families.llama"]


def test_a_third_party_look_up_loads_that_family_alone(acme_site):
    loaded = loaded_after("from nnterp import families\nfamilies.lookup('acme')", acme_site)
    own = [name for name in loaded["plugins"] if "." in name]
    assert own == ["acme_nnterp._modeling", "acme_nnterp.acme"]
    assert sorted(loaded["families"]) == ["nnterp.families.acme", DEFAULT]
