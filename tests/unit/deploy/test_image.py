"""Check that the image contains each project file that its program may import."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = {"scorekit", "services", "trainer", "demo", "deploy", "synth", "bench", "tools", "tests"}
ROLES = ("metricx", "xcomet", "judge", "embedder", "retriever", "reward_model")


def copied(stage: str, role: str = "") -> set[Path]:
    """Return the project files that a Dockerfile stage and its base stages copy."""
    stages: dict[str, tuple[str, list[str]]] = {}
    for line in (ROOT / "deploy/docker/Dockerfile").read_text().splitlines():
        words = line.split()
        if words[:1] == ["FROM"]:
            stages[words[3]] = (words[1], now := [])
        elif words[:1] == ["COPY"] and not words[1].startswith("--from"):
            now += words[1:-1]
    paths: set[Path] = set()
    while stage in stages:
        stage, names = stages[stage]
        for path in (ROOT / name.replace("${ROLE}", role) for name in names):
            assert path.exists(), path
            paths |= {path} if path.is_file() else set(path.rglob("*.py"))
    return paths


@cache
def imported(file: Path) -> list[Path]:
    """Return the project files that a file imports, at module level or in a function."""
    paths: list[Path] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.split(".")[0] in PACKAGES:
                path = ROOT.joinpath(*name.split("."))
                paths += filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))
    return paths


@pytest.mark.parametrize(
    ("stage", "role", "start"),
    [("service", role, f"services/{role}/__main__.py") for role in ROLES]
    + [("teacher", "", "demo/llm_server.py"), ("ray", "", "deploy/ray/apps.py")],
)
def test_an_image_carries_what_its_program_imports(stage, role, start):
    available, reached, todo = copied(stage, role), set(), [ROOT / start]
    while todo:
        file = todo.pop()
        if file not in reached:
            reached.add(file)
            assert file in available, f"{file.relative_to(ROOT)} is not in the image"
            todo += imported(file)
    assert len(reached) > 5
