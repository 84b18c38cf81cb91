"""Texts that are made to be slow for a regular expression, and the expressions of the project.

    python -m tests.kits.hostile_texts patterns|functions

This runs each expression or function on the slowest of its texts, a million characters long. The
limit of CPU seconds is far above linear work and far below quadratic work. If it is exceeded, the
process is killed, and the last line that it printed names the cause.
"""

from __future__ import annotations

import ast
import heapq
import importlib
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parse  # type: ignore[attr-defined]
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("scorekit", "services", "synth", "trainer")
SHORT, LONG, LIMIT_S = 2_000, 100_000, 8
_SEARCHES = frozenset({"search", "findall", "finditer", "sub", "subn", "split"})
_CALLS = _SEARCHES | {"match", "fullmatch", "compile"}
_REPEATS = {sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT}
_CANDIDATES = "a1 -.\t\n:<({[`|@%가A_=>"


class Call(NamedTuple):
    """A call `re.X(pattern)` in the code.

    function: its function; None at module level.
    """

    module: str
    function: str | None
    line: int
    pattern: str | bytes | None  # None: no literal


class Found(NamedTuple):
    """A pattern.

    searched: whether it is searched for in a text, not only matched at its start.
    """

    name: str
    pattern: re.Pattern[Any]
    searched: bool


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of the project, parsed."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))


def calls_of_re(module: str, tree: ast.Module) -> Iterator[Call]:
    """Yield all calls of functions of `re` that take a pattern."""
    owner = {
        id(node): scope.name
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        callee = node.func.value
        if isinstance(callee, ast.Name) and callee.id == "re" and node.func.attr in _CALLS:
            first = node.args[0]
            literal = first.value if isinstance(first, ast.Constant) else None
            assert literal is None or isinstance(literal, str | bytes)
            yield Call(module, owner.get(id(node)), node.lineno, literal)


def patterns(
    pattern_makers: dict[tuple[str, str], Callable[[], list[re.Pattern[str]]]],
) -> Iterator[Found]:
    """Yield all patterns: those of the modules, literals in functions, and those that functions
    make.
    """
    for module, tree in sources():
        calls = list(calls_of_re(module, tree))
        for call in calls:
            if call.function and call.pattern is not None:
                name = f"{module}:{call.line}"
                yield Found(name, re.compile(call.pattern), searched=True)
        if any(call.function is None for call in calls):
            searched = _searched_names(tree)
            for name, pattern in _module_patterns(importlib.import_module(module)):
                yield Found(f"{module}.{name}", pattern, name in searched)
    for (module, function), make in pattern_makers.items():
        for pattern in make():
            yield Found(f"{module}.{function}", pattern, searched=True)


def _module_patterns(module: Any) -> Iterator[tuple[str, re.Pattern[Any]]]:
    for name, value in vars(module).items():
        candidates = value.values() if isinstance(value, dict) else value
        for candidate in (
            candidates if isinstance(candidates, tuple | list | type({}.values())) else [candidates]
        ):
            if isinstance(candidate, re.Pattern):
                yield name, candidate


def _searched_names(tree: ast.Module) -> set[str]:
    """Return names that are used in any other way than `NAME.match(` and `NAME.fullmatch(`."""
    anchored = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("match", "fullmatch")
    }
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if id(node) not in anchored
    }


# -- texts out of a pattern's own parts ------------------------------------------------------------


def pumps(pattern: re.Pattern[Any]) -> list[tuple[str, str]]:
    """Return (start of the text, repeated part) for each part of the pattern that may repeat."""
    results: dict[tuple[str, str], None] = {}
    for lead, chars, full_text in _runs(list(sre_parse.parse(pattern.pattern, pattern.flags)), ""):
        words = [char for char in chars if char.isalnum()][:1]
        symbols = [char for char in chars if not char.isalnum()]
        bodies = [*chars, full_text, *(word + other for word in words for other in symbols)]
        for body in filter(None, bodies):
            results |= {("", body): None, (lead, body): None, ("", lead + body): None}
            results |= {(lead[:1], body): None}
    return list(results) or [("", "a")]


def _runs(tree: list[Any], lead: str) -> Iterator[tuple[str, list[str], str]]:
    """Yield (start, characters, an example) of each repeated part."""
    for op, value in tree:
        if op in _REPEATS and value[1] > 16:
            yield lead, _characters(value[2]), _example(value[2])
        for inner in _inner(op, value):
            yield from _runs(list(inner), lead)
        lead += _example([(op, value)])


def _inner(op: Any, value: Any) -> list[Any]:
    if op in _REPEATS:
        return [value[2]]
    if op is sre.BRANCH:
        return list(value[1])
    if op is sre.SUBPATTERN:
        return [value[3]]
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        return [value[1]]
    return [value] if op is sre.ATOMIC_GROUP else []


def _characters(tree: Any) -> list[str]:
    """Return characters that match a part, a few of each class."""
    characters: dict[str, None] = {}
    for op, value in tree:
        if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            characters |= dict.fromkeys(_of_class(op, value))
        for inner in _inner(op, value):
            characters |= dict.fromkeys(_characters(inner))
    return list(characters)[:12]


def _of_class(op: Any, value: Any) -> list[str]:
    if op is sre.LITERAL:
        return [chr(value)]
    if op is sre.ANY:
        return ["a", " "]
    if op is sre.NOT_LITERAL:
        return [char for char in _CANDIDATES if ord(char) != value][:4]
    members = [part for part in value if part[0] is not sre.NEGATE]
    if len(members) < len(value):
        return [c for c in _CANDIDATES if not any(_holds(part, c) for part in members)]
    literals = [
        chr(v if op is sre.LITERAL else v[0]) for op, v in members if op is not sre.CATEGORY
    ]
    return [c for c in _CANDIDATES if any(_holds(part, c) for part in members)] or literals


def _holds(part: tuple[Any, Any], char: str) -> bool:
    op, value = part
    if op is sre.LITERAL:
        return ord(char) == value
    if op is sre.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    name = str(value)
    holds = (
        char.isspace()
        if "SPACE" in name
        else char.isdigit()
        if "DIGIT" in name
        else (char.isalnum() or char == "_")
    )
    return holds != ("NOT" in name)


def _example(tree: Any) -> str:
    """Return a text that a part matches, nearly the shortest."""
    text = ""
    for op, value in tree:
        if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            text += (_of_class(op, value) or [""])[0]
        elif op in _REPEATS:
            text += _example(value[2]) * value[0]
        elif op is sre.BRANCH:
            text += _example(value[1][0])
        elif op in (sre.SUBPATTERN, sre.ATOMIC_GROUP):
            text += "".join(map(_example, _inner(op, value)))
    return text


def written(pump: tuple[str, str], size: int) -> str:
    """Return a long text for a pump; its end does not match."""
    lead, body = pump
    return lead + (body * (size // len(body) + 1))[:size] + "\0"


# -- running ---------------------------------------------------------------------------------------


def run(
    name: str, work: Callable[[str], object], texts: list[tuple[str, str]], max_length: int
) -> None:
    """Run the work on all short texts, then on the slowest long one under the time limit."""

    def seconds(pump: tuple[str, str]) -> float:
        text = written(pump, min(SHORT, max_length // 50))
        started = time.process_time()
        work(text)
        return time.process_time() - started

    for pump in heapq.nlargest(3, texts, key=seconds):
        print(f"{name}: {pump!r}", flush=True)
        used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT_S, resource.RLIM_INFINITY))
        work(written(pump, max_length))


def searching(source: Found) -> Callable[[str], object]:
    """Return a function that applies a pattern in every way it is used."""

    def work(text: str) -> None:
        subject = text.encode() if isinstance(source.pattern.pattern, bytes) else text
        source.pattern.match(subject)
        source.pattern.fullmatch(subject)
        if source.searched:
            for _ in source.pattern.finditer(subject):
                pass

    return work
