"""Print the requirements of some extras of pyproject.toml, one a line, torch left out: an image
installs it in a layer of its own, and the packages of this repository not at all."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str], project: dict[str, object]) -> list[str]:
    """Return the requirements of the extras, with `scorekit[other]` resolved."""
    groups = project["optional-dependencies"]
    assert isinstance(groups, dict)
    lines: list[str] = [*project["dependencies"]]  # type: ignore[misc]
    for extra in extras:
        for line in groups[extra]:
            inner = re.fullmatch(r"scorekit\[([\w,-]+)\]", line)
            lines += requirements(inner[1].split(","), project) if inner else [line]
    return sorted(set(lines))


if __name__ == "__main__":
    data = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    lines = requirements(sys.argv[1:], data["project"])
    print("\n".join(line for line in lines if not re.match(r"torch\b", line)))
