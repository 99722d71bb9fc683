"""Distributions made for one test: a folder with a package and its metadata, on ``sys.path`` until its end."""

import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import importlib_metadata
import pytest

import nnterp.plugins
from nnterp import families

Install = Callable[..., Path]


def take_families_out() -> dict[str, ModuleType]:
    """Undo every look-up so far: no family is an attribute or in ``sys.modules`` under nnterp's name for it."""
    taken = {}
    for name in [name for name in sys.modules if name.startswith("nnterp.families.")]:
        if name != "nnterp.families.default":
            taken[name] = sys.modules.pop(name)
            vars(families).pop(name.split(".")[2], None)
    return taken


@pytest.fixture(autouse=True)
def discovered_anew() -> Iterator[None]:
    """Every test discovers the plugins itself, and leaves nothing of its own behind."""
    nnterp.plugins.catalogue.cache_clear()
    taken = take_families_out()
    yield
    take_families_out()
    for name in [name for name in sys.modules if name.startswith("plugin_")]:
        del sys.modules[name]
    families.REGISTRY.clear()
    nnterp.plugins.catalogue.cache_clear()
    for name, module in taken.items():
        sys.modules[name] = module
        if name.count(".") == 2:
            setattr(families, name.rpartition(".")[2], module)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install("acme", {"acme.py": FAMILY})``: distribution ``acme-nnterp``, package ``plugin_acme``, entry ``acme``.

    ``files`` are the package's; without an ``__init__.py`` among them it gets an empty one. Returns the folder that is
    on the path.
    """

    def install(
        name: str,
        files: dict[str, str],
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        entry: str | None = None,
    ) -> Path:
        site = tmp_path / f"{name}-site"
        package = site / f"plugin_{name}"
        for file, text in {"__init__.py": "", **files}.items():
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text(textwrap.dedent(text))
        metadata = site / f"{name}_nnterp-{version}.dist-info"
        metadata.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}-nnterp", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (metadata / "METADATA").write_text("\n".join(lines) + "\n")
        (metadata / "entry_points.txt").write_text(f"[nnterp.families]\n{name} = {entry or package.name}\n")
        monkeypatch.syspath_prepend(site)
        nnterp.plugins.catalogue.cache_clear()
        return site

    return install


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``only("nnterp-families-dense")``: as if no other distribution had an entry point."""
    every = importlib_metadata.entry_points

    def only(*distributions: str) -> None:
        def entry_points(**params: str) -> list[importlib_metadata.EntryPoint]:
            return [entry for entry in every(**params) if entry.dist.name in distributions]

        monkeypatch.setattr(importlib_metadata, "entry_points", entry_points)
        nnterp.plugins.catalogue.cache_clear()

    return only


@pytest.fixture(scope="session")
def acme_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample distribution as installed: its wheel, built and unpacked."""
    site = tmp_path_factory.mktemp("acme")
    source = Path(__file__).parent / "acme-nnterp"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", site], cwd=source, check=True)
    with zipfile.ZipFile(next(site.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return site
