"""Names the extra that installs a missing package, and how this installation gets it."""

from __future__ import annotations

import json
import traceback
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import FrameType

#: Module names that differ from the name of their distribution.
_DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
}
_OURS = ("scorekit", "services", "trainer", "synth", "synth_parallel", "deploy", "demo", "bench")
#: The extra of a part of the code. A part that runs for another counts for that one: the longest
#: name counts, and those of scorekit last.
_EXTRAS = {
    "services.metricx": "metricx",
    "services.xcomet": "xcomet",
    "services.judge": "judge",
    "services.embedder": "embedder",
    "services.retriever": "retriever",
    "services.reward_model": "reward-model",
    "synth": "synth",
    "trainer": "trainer",
    "trainer.roleplay": "roleplay",
    "trainer.search": "search",
}
_EXTRAS_OF_SCOREKIT = {
    "scorekit.adapters": "server",
    "scorekit.hub": "metricx",
    "scorekit.metaeval": "meta-eval",
    "scorekit.rewards": "rewards",
    "scorekit.server": "server",
    "scorekit.text": "rewards",
}


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a failed import, or None if the module belongs to this project."""
    name = (error.name or "").split(".")[0]
    if not name or name in _OURS:
        return None
    package = _DISTRIBUTIONS.get(name, name).lower().replace("_", "-")
    extra = _extra_of(error)
    command = f"pip install {package}" if extra is None else install_command(extra)
    return f"{package} is not installed: {command}"


def install_command(extra: str) -> str:
    """Return how an extra is added to this installation.

    Never the bare name: on the public index it is not ours.
    """
    if (Path(__file__).parents[1] / "pyproject.toml").exists():
        return f'`pip install -e ".[{extra}]"` in the checkout'
    try:
        origin = distribution("scorekit").read_text("direct_url.json")
    except PackageNotFoundError:  # an image copies the code and does not install it
        origin = None
    if origin is None:
        return f"install the extra {extra!r} of scorekit from where scorekit was installed"
    requirement = f"scorekit[{extra}] @ {_url_of(json.loads(origin))}"
    return f'pip install "{requirement}"'


def _url_of(origin: dict[str, dict[str, str]] | dict[str, str]) -> str:
    """Return the URL for pip of a direct_url.json (PEP 610)."""
    vcs, url = origin.get("vcs_info"), str(origin["url"])
    if isinstance(vcs, dict):
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return url


def _extra_of(error: ModuleNotFoundError) -> str | None:
    """Return the extra of the code that wanted the module; None if that code is not ours."""
    modules = [_module(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [name for name in modules if not name.startswith("importlib")]
    if not modules or modules[-1].partition(".")[0] not in _OURS:
        return None
    for extras in (_EXTRAS, _EXTRAS_OF_SCOREKIT):
        parts = [
            part
            for part in extras
            for name in modules
            if name == part or name.startswith(f"{part}.")
        ]
        if parts:
            return extras[max(parts, key=len)]
    return None


def _module(frame: FrameType) -> str:
    """Return the module of a frame, also of one that runs as `__main__`."""
    spec = frame.f_globals.get("__spec__")
    return str(getattr(spec, "name", None) or frame.f_globals.get("__name__", ""))
