"""Print what an image installs, with the hashes of the files: the packages of hashes.txt that some
extras need. `torch` stands for what torch needs, `torch-cuda` for torch with its CUDA packages."""

from __future__ import annotations

import sys
from pathlib import Path

HASHES = Path(__file__).with_name("hashes.txt")


def requirements(extras: list[str], hashes: str) -> str:
    """Return the requirements of the extras. Raises SystemExit for an extra without any.

    hashes: the text of hashes.txt, in which a line `# for EXTRA...` stands before each package.
    """
    blocks = [block.partition("\n") for block in hashes.split("# for ")[1:]]
    for extra in extras:
        if not any(extra in names.split() for names, _, _ in blocks):
            sys.exit(
                f"{extra}: no extra of an image: add it to tools/image_hashes.py and make lock"
            )
    return "".join(
        requirement for names, _, requirement in blocks if not {*names.split()}.isdisjoint(extras)
    )


if __name__ == "__main__":
    print(requirements(sys.argv[1:], HASHES.read_text(encoding="utf-8")), end="")
