"""An installed package has its files and its version, and says little."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import scorekit

ROOT = Path(__file__).parents[2]


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


def test_a_checkout_knows_its_commit_and_an_image_the_one_that_it_was_built_from(tmp_path) -> None:
    def commit(folder: Path, **variables: str) -> str:
        command = [sys.executable, "-S", "-c", "import scorekit; print(scorekit.commit())"]
        env = {"PATH": os.environ["PATH"], **variables}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
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
    assert len(found := commit(tmp_path)) >= 7 and head.startswith(found)
    code.write_text(code.read_text() + "# changed\n")
    assert commit(tmp_path) == f"{found}-dirty"
    assert commit(tmp_path, SCOREKIT_COMMIT="abc1234") == "abc1234"
    assert commit(tmp_path, PATH="") == "None"  # no git


def test_bitsandbytes_does_not_say_in_every_process_that_it_could_be_quicker(tmp_path) -> None:
    """It says so where it is imported on a CPU with AVX512-BF16, which is feigned here."""
    told = "Failed to load CPU gemm_4bit_forward from kernels-community: %s."
    lines = Path(find_spec("bitsandbytes").origin).parent / "backends/cpu/ops.py"
    assert told in lines.read_text(), "its words have changed: change the filter of scorekit, too"
    code = (
        "import logging; {first}; log = logging.getLogger('bitsandbytes.backends.cpu.ops'); "
        f"log.warning({told!r}, 'no kernels'); log.warning('something else')"
    )
    for first, said in (("import scorekit", 1), ("pass", 2)):
        command = [sys.executable, "-S", "-c", code.format(first=first)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr.count("\n") == said and "something else" in done.stderr


def test_the_version_is_that_of_the_change_log_and_of_the_images() -> None:
    newest = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == scorekit.__version__
    files = [*ROOT.glob("*.yml"), *(ROOT / "deploy").rglob("*.yaml")]
    image = re.compile(r"\bscorekit-[a-z-]+:([0-9][\w.]*)|\bnewTag: (\S+?)\}")
    tags = {(f.name, a or b) for f in files for a, b in image.findall(f.read_text())}
    assert {tag for _, tag in tags} == {scorekit.__version__} and len(tags) > 8
