"""Make scorekit/text/han_variants.txt: characters that only one standard of Chinese uses.

The data comes from the dictionaries of OpenCC (Apache-2.0), as the package
opencc-python-reimplemented contains them. A character is in the result if OpenCC always converts it
to another one, and neither Taiwan nor Hong Kong keeps it.

    pip download opencc-python-reimplemented==0.1.7 --no-deps, unzip it, and
    python -m tools.han_variants FOLDER/opencc/dictionary
"""

from __future__ import annotations

import sys
from pathlib import Path

from scorekit.command import run_command

OUT = Path(__file__).parents[1] / "scorekit/text/han_variants.txt"
NOTICE = """\
# Characters of Chinese that only Simplified (first line) or Traditional text (second line) has.
# Made by tools/han_variants.py of dictionary data developed by OpenCC, which is under the Apache
# License 2.0: https://github.com/BYVoid/OpenCC
"""
#: Simplified ones that Traditional text writes, too, which OpenCC's tables do not say.
ALSO_TRADITIONAL = set("踪强内霉")


def main() -> None:
    """Read the folder that the command names, and write the table."""
    folder = Path(sys.argv[1])
    simplified, traditional = (_changed(folder / f"{name}Characters.txt") for name in ("ST", "TS"))
    shared = {
        target
        for name in ("TW", "HK")
        for targets in _table(folder / f"{name}Variants.txt").values()
        for target in targets
    }
    only_simplified = simplified - traditional - shared - ALSO_TRADITIONAL
    lines = ("".join(sorted(chars)) for chars in (only_simplified, traditional - simplified))
    OUT.write_text(NOTICE + "".join(f"{line}\n" for line in lines), encoding="utf-8")


def _changed(path: Path) -> set[str]:
    """Return characters of the Basic Multilingual Plane that the table never leaves unchanged."""
    return {c for c, targets in _table(path).items() if c not in targets and ord(c) < 0x10000}


def _table(path: Path) -> dict[str, list[str]]:
    rows = (line.rstrip("\n").split("\t") for line in path.open(encoding="utf-8"))
    return {key: targets.split(" ") for key, targets in rows}


if __name__ == "__main__":
    run_command(main)
