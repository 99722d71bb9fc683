"""What is inside the distributions."""

import zipfile
from email.parser import Parser

import pytest

pytestmark = pytest.mark.packaging

IMPORTED = {
    "nnterp-core": "nnterp",
    "nnterp-families-dense": "nnterp_families_dense",
    "nnterp-families-moe": "nnterp_families_moe",
    "nnterp-families-recurrent": "nnterp_families_recurrent",
    "nnterp-vision": "nnterp_vision",
    "nnterp-vllm": "nnterp_vllm",
}


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.namelist(), Parser().parsestr(archive.read(metadata).decode())


def test_every_distribution_is_built(wheels):
    assert set(wheels) == {"nnterp", "acme-nnterp", *IMPORTED}


def test_nnterp_itself_has_no_code(wheels):
    names, metadata = contents(wheels["nnterp"])
    assert all(".dist-info/" in name for name in names)
    assert set(metadata.get_all("Provides-Extra")) == {"moe", "recurrent", "vision", "vllm", "all"}
    assert {"nnterp-core<3,>=2.0", "nnterp-families-dense<3,>=2.0"} <= set(metadata.get_all("Requires-Dist"))


@pytest.mark.parametrize("distribution", IMPORTED)
def test_a_package_holds_its_code_types_licence_and_entry_point(wheels, distribution):
    names, metadata = contents(wheels[distribution])
    package = IMPORTED[distribution]
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {package}
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    if distribution != "nnterp-core":
        assert "nnterp-core<3,>=2.0" in metadata.get_all("Requires-Dist")
        assert any(name.endswith("entry_points.txt") for name in names)


def test_each_engine_is_an_extra(wheels):
    """vLLM is built for one kind of machine or another, and comes by itself with neither."""
    _, metadata = contents(wheels["nnterp-vllm"])
    brought = {line for line in metadata.get_all("Requires-Dist") if line.startswith("vllm")}
    assert {line.split(";")[1].strip() for line in brought} == {"extra == 'gpu'", "extra == 'cpu'"}
    _, metadata = contents(wheels["nnterp"])
    assert any(
        line.startswith("vllm<") and line.endswith("extra == 'vllm'") for line in metadata.get_all("Requires-Dist")
    )
