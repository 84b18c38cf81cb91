"""Say in one line which extra a package comes with that is not installed."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires

#: Where a module's name is not its distribution's.
_DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}
_OURS = ("scorekit", "services", "trainer", "synth", "synth_parallel", "deploy", "demo", "bench")
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([\w,-]+)\])?.*?;.*extra == ["']([\w-]+)["']""")


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to install for an import that failed; None where the module is one of ours."""
    name = (error.name or "").split(".")[0]
    if not name or name in _OURS:
        return None
    distribution = _DISTRIBUTIONS.get(name, name).lower().replace("_", "-")
    extras = sorted(e for e, names in _packages_of_extras().items() if distribution in names)
    if not extras:
        return f"{distribution} is not installed: pip install {distribution}"
    wanted = [extra for extra in extras if extra in _words_of_command()] or extras
    return f'{distribution} is not installed: `pip install -e ".[{wanted[0]}]"` in the checkout'


def _words_of_command() -> set[str]:
    """Return the parts of the module that runs and the words behind it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = spec.name if spec is not None else re.split(r"[/\\]", sys.argv[0])[-1].split("_")[0]
    return {*start.split("."), *sys.argv[1:]}


def _packages_of_extras() -> dict[str, set[str]]:
    """Return the distributions that each extra of scorekit installs, by name, but for `all`."""
    try:
        lines = requires("scorekit") or []
    except PackageNotFoundError:  # the code of an image, which is copied there
        return {}
    direct: dict[str, set[str]] = {}
    included: dict[str, set[str]] = {}
    for match in filter(None, map(_REQUIREMENT.match, lines)):
        name, inner, extra = match.groups()
        direct.setdefault(extra, set())
        if name == "scorekit":
            included.setdefault(extra, set()).update(inner.split(","))
        else:
            direct[extra].add(name.lower().replace("_", "-"))
    for _ in included:  # an extra within an extra within an extra
        for extra, parts in included.items():
            direct[extra] |= set().union(*(direct.get(part, set()) for part in parts))
    return {extra: names for extra, names in direct.items() if extra not in ("all", "dev")}
