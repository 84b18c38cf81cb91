"""The environment beside the main one has what it needs, and an installed package its files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import scorekit

ROOT = Path(__file__).parents[2]


#: What a build of torch for GPUs needs, which is here where there is one; the environment of
#: unbabel-comet computes on the CPU.
OF_GPUS = ("nvidia-", "cuda-", "triton")


def needed(requirements: list[str], collected: set[str]) -> set[str]:
    """Return the names of what these requirements need, and of what that needs, as it is here."""
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        extras = {"", *requirement.extras}
        new = {f"{name}[{extra}]" for extra in extras} - collected
        if name.startswith(OF_GPUS) or not new:
            continue
        collected |= new
        try:
            texts = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        needed([text for text in texts if _applies(text, extras)], collected)
    return collected


def _applies(text: str, extras: set[str]) -> bool:
    marker = Requirement(text).marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def test_the_environment_of_unbabel_comet_holds_what_it_pins() -> None:
    """Check its list, because the environment is installed without resolving dependencies."""
    listed = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)$",
            (ROOT / "tools/oracle-requirements.txt").read_text(),
            re.MULTILINE,
        )
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["server"]
    have = {canonicalize_name(name) for name in listed}
    names = {name.partition("[")[0] for name in needed(requirements, set())}
    assert names - have == set()
    assert listed["unbabel-comet"] == "2.2.7" and listed["transformers"].startswith("4.")
    assert listed["numpy"].startswith("1.")


def test_an_installed_package_has_its_files() -> None:
    """Check templates, tables and contracts: files that are not Python are installed by name."""
    patterns_by_package = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]["package-data"]
    files = {
        str(path.relative_to(ROOT))
        for package in patterns_by_package
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "README.md"
    }
    installed = {
        str(path.relative_to(ROOT))
        for package, patterns in patterns_by_package.items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    assert files - installed == set()


def test_each_upper_bound_has_its_reason_beside_it() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    bounds = [line for line in lines if re.search(r'"[a-z][^";]*<', line)]
    assert len(bounds) > 5
    assert [line for line in bounds if " # " not in line] == []


def test_code_that_is_not_installed_knows_its_version_as_it_does_in_an_image() -> None:
    command = [sys.executable, "-S", "-c", "import scorekit; print(scorekit.__version__)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == scorekit.__version__


def test_a_checkout_knows_its_commit_and_an_image_the_one_that_it_was_built_from(tmp_path) -> None:
    def commit(folder: Path, **variables: str) -> str:
        command = [sys.executable, "-S", "-c", "import scorekit; print(scorekit.commit())"]
        env = {"PATH": os.environ["PATH"], **variables}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    code = tmp_path / "scorekit/__init__.py"
    code.parent.mkdir()
    code.write_text((ROOT / "scorekit/__init__.py").read_text())
    assert commit(tmp_path) == "None"
    git("init")
    git("add", "scorekit/__init__.py")
    git("commit", "-m", "All of it")
    head = git("rev-parse", "HEAD")
    assert len(revision := commit(tmp_path)) >= 7 and head.startswith(revision)
    code.write_text(code.read_text() + "# changed\n")
    assert commit(tmp_path) == f"{revision}-dirty"
    assert commit(tmp_path, SCOREKIT_COMMIT="abc1234") == "abc1234"
    assert commit(tmp_path, PATH="") == "None"  # no git


def test_bitsandbytes_does_not_say_in_every_process_that_it_could_be_quicker(tmp_path) -> None:
    """Check the filter of its warning, which it logs on a CPU with AVX512-BF16 (simulated here)."""
    warning = "Failed to load CPU gemm_4bit_forward from kernels-community: %s."
    lines = Path(find_spec("bitsandbytes").origin).parent / "backends/cpu/ops.py"
    assert warning in lines.read_text(), (
        "its words have changed: change the filter of scorekit, too"
    )
    code = (
        "import logging; {first}; log = logging.getLogger('bitsandbytes.backends.cpu.ops'); "
        f"log.warning({warning!r}, 'no kernels'); log.warning('something else')"
    )
    for first, num_lines in (("import scorekit", 1), ("pass", 2)):
        command = [sys.executable, "-S", "-c", code.format(first=first)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr.count("\n") == num_lines and "something else" in done.stderr


def test_the_version_is_that_of_the_change_log_and_of_the_images() -> None:
    newest = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == scorekit.__version__
    files = [*ROOT.glob("*.yml"), *(ROOT / "deploy").rglob("*.yaml")]
    image = re.compile(r"\bscorekit-[a-z-]+:([0-9][\w.]*)|\bnewTag: (\S+?)\}")
    tags = {(f.name, a or b) for f in files for a, b in image.findall(f.read_text())}
    assert {tag for _, tag in tags} == {scorekit.__version__} and len(tags) > 8
