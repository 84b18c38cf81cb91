"""Environments beside the main one have what they need, too, and an installed package its files."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import scorekit

ROOT = Path(__file__).parents[2]
#: Of the trainer's extra, what its tests under transformers 5 do without: a bench compares with it.
LEFT_OUT = {"trl"}
#: What a build of torch for GPUs needs, which is here where there is one; that environment computes
#: on the CPU.
OF_GPUS = ("nvidia-", "cuda-", "triton")


def needed(texts: list[str], found: set[str]) -> set[str]:
    """Names of what these requirements need, and what that needs, as it is installed here."""
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        extras = {"", *requirement.extras}
        asked = {f"{name}[{extra}]" for extra in extras} - found
        if name in LEFT_OUT or name.startswith(OF_GPUS) or not asked:
            continue
        found |= asked
        try:
            texts_of = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        needed([text for text in texts_of if _applies(text, extras)], found)
    return found


def _applies(text: str, extras: set[str]) -> bool:
    marker = Requirement(text).marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def test_the_environment_of_transformers_5_is_complete() -> None:
    """It is installed without looking at dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    trainer = project["dependencies"] + project["optional-dependencies"]["trainer"]
    listed = re.findall(
        r"^[\w.-]+", (ROOT / "tools/tf5-requirements.txt").read_text(), re.MULTILINE
    )
    have = {canonicalize_name(name) for name in listed}
    wanted = {name.partition("[")[0] for name in needed(trainer, set())}
    assert wanted - have == set()


def test_an_installed_package_has_its_files() -> None:
    """Templates, tables, contracts: what is not Python is installed by name."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    files = {
        str(path.relative_to(ROOT))
        for package in told
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "README.md"
    }
    installed = {
        str(path.relative_to(ROOT))
        for package, patterns in told.items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    assert files - installed == set()


def test_code_that_is_not_installed_knows_its_version_as_it_does_in_an_image() -> None:
    command = [sys.executable, "-S", "-c", "import scorekit; print(scorekit.__version__)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == scorekit.__version__
    assert f"\n## {scorekit.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
