"""Write deploy/docker/hashes.txt: the packages of the images, with the hashes of their files.

    python -m tools.image_hashes    of the versions in constraints.txt; `make lock` does it, too

An image installs these files alone (deploy/docker/install.sh): pip refuses one with another hash.
Each package names the extras that need it. Torch's build for CPUs is not on PyPI and has no hash
here; the packages that torch needs are listed under `torch`, its CUDA build under `torch-cuda`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scorekit.command import run_command
from scorekit.errors import UserError

HASHES = Path("deploy/docker/hashes.txt")
HEADER = "# The files that images install, of constraints.txt; made by `make lock`, not by hand.\n"
#: Extras that an image may have: --build-arg EXTRAS.
EXTRAS = (
    "metricx",
    "xcomet",
    "judge",
    "embedder",
    "retriever",
    "reward-model",
    "trainer",
    "roleplay",
    "search",
    "qlora",
    "synth",
    "ray",
)
_TORCH = ("torch", "torch-cuda")


def is_of_cuda(name: str) -> bool:
    """Return whether a package belongs to torch's build, which an image installs by itself."""
    return name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))


def compile_requirements(source: str, *options: str) -> dict[str, str]:
    """Return the requirements of a source by name, as uv writes them: with markers and hashes.

    source: `pyproject.toml`, or `-` for torch alone. Raises UserError if uv fails.
    """
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-q", source]
    command += ["-c", "constraints.txt", "--universal", "--python-version", "3.11"]
    command += ["--no-annotate", "--no-header", *options]
    # Wheels of this machine are not what others get: no UV_FIND_LINKS.
    environment = {name: text for name, text in os.environ.items() if name != "UV_FIND_LINKS"}
    done = subprocess.run(command, input="torch\n", env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{source}: " + " ".join(done.stderr.split())[:600])
    requirements: dict[str, str] = {}
    name = ""
    for line in done.stdout.splitlines():
        if "==" in line and not line.startswith(" "):
            name = line.partition("==")[0]
            requirements[name] = ""
        if name:
            requirements[name] += f"{line}\n"
    return requirements


def make_hashes() -> str:
    """Return the content of the file. Raises UserError if uv fails."""
    options = [word for extra in EXTRAS for word in ("--extra", extra)]
    all_requirements = compile_requirements("pyproject.toml", "--generate-hashes", *options)
    extras_by_name: dict[str, list[str]] = {}
    for name in compile_requirements("-"):
        extras_by_name[name] = ["torch-cuda"] if is_of_cuda(name) else list(_TORCH)
    for extra in EXTRAS:
        for name in compile_requirements("pyproject.toml", "--extra", extra):
            if not is_of_cuda(name):
                extras_by_name.setdefault(name, []).append(extra)
    return HEADER + "".join(
        f"# for {' '.join(extras_by_name[name])}\n{requirement}"
        for name, requirement in sorted(all_requirements.items())
    )


def main() -> None:
    """Write the file."""
    content = make_hashes()
    HASHES.write_text(content, encoding="utf-8")
    print(f"{HASHES}: {content.count('# for ')} packages, {content.count('--hash=')} files")


if __name__ == "__main__":
    run_command(main)
