"""Import every dependency that pyproject.toml names, so that a broken pin shows at set-up."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
import warnings
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

#: Not in the development environment (see docs/explanation/architecture.md), or nothing to import.
LEFT_OUT = {"scorekit", "vllm", "inspect-ai", "types-pyyaml", "ruff", "ipywidgets"}


def named_distributions() -> list[str]:
    """Return the names of all dependencies of pyproject.toml, extras included."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    names = {re.split(r"[\[<>=!~; ]", r, maxsplit=1)[0].lower() for r in requirements}
    return sorted(names - LEFT_OUT)


def main() -> int:
    """Import all dependencies and print a line for each that fails; return 1 if one fails."""
    warnings.simplefilter("ignore")
    modules: dict[str, list[str]] = {}
    for module, owners in packages_distributions().items():
        for owner in owners:
            modules.setdefault(owner.lower().replace("_", "-"), []).append(module)
    num_errors = 0
    for name in named_distributions():
        try:
            distribution(name)
            candidates = [m for m in modules[name.replace("_", "-")] if not m.startswith("_")]
            named = [m for m in candidates if m.lower() == name.replace("-", "_")]
            importlib.import_module((named or sorted(candidates, key=len))[0])
        except (PackageNotFoundError, ImportError, KeyError, IndexError) as error:
            print(f"setup: {name} does not import: {error!r}", file=sys.stderr)
            num_errors += 1
    print(f"setup: {len(named_distributions()) - num_errors} dependencies import", file=sys.stderr)
    return int(num_errors > 0)


if __name__ == "__main__":
    sys.exit(main())
