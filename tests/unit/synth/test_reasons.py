"""Check that every reason code of a stage has an explanation."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scorekit.errors import SAMPLE_ERROR_TYPES
from scorekit.llm.errors import LLM_ERROR_TYPES
from services.judge.rubrics import load_rubrics
from services.judge.rules import _RULES
from synth.filters import RULES
from synth.reasons import FAILURES, REASONS, UNKNOWN, VERDICTS, explain

ROOT = Path(__file__).parents[4]
BROKEN = ("cut", "empty", "looping", "content_filter")
#: f-strings that build a code, with {} for inserted values -> the possible codes.
FAMILIES = {
    "{}_{}": {f"{which}_{code}" for which in ("greedy", "sample") for code in BROKEN}
    | {f"{service}_{kind}" for service in ("score", "judge") for kind in SAMPLE_ERROR_TYPES},
    "{}_score_{}": {
        f"{source}_score_{kind}" for source in ("greedy", "sample") for kind in SAMPLE_ERROR_TYPES
    },
    "teacher_{}": {f"teacher_{kind}" for kind in LLM_ERROR_TYPES},
    "score_{}": {f"score_{kind}" for kind in SAMPLE_ERROR_TYPES},
    "judge_error:{}": {f"judge_error:{kind}" for kind in SAMPLE_ERROR_TYPES},
    "judge:{}": {"judge:a_word_of_its_own"},
    **{
        f"doubt_{outcome}:{{}}": {f"doubt_{outcome}:numbers_missing"}
        for outcome in ("passed", "refused", "unjudged")
    },
}
#: Calls that take a code -> its position among the arguments.
CALLS = {
    "RejectedRecord": 1,
    "DeferredRecord": 1,
    "TemporaryFailure": 0,
    "SourceFailed": 0,
    "KeptRecord": 1,
    "_CandidateCheck": 1,
    "_replace": 99,  # only by keyword
    "broken": 1,
    "note_broken": 1,
}
#: Dictionaries of counts by code.
COUNTS = ("rejected", "unread", "out", "left_out", "open", "noted")
#: Functions that return a code, by the end of their names.
RETURN = re.compile(r"(_code|^broken_output|^_check_candidate)$")


def _codes_in(tree: ast.AST) -> set[str]:
    """Return the string constants and f-strings that are used as codes."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            position = CALLS.get(name)
            if position is not None:
                nodes += node.args[position : position + 1]
                nodes += [
                    k.value for k in node.keywords if k.arg in ("reason_code", "code", "note_code")
                ]
        elif isinstance(node, ast.Subscript):
            name = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if name in COUNTS:
                nodes.append(node.slice)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and RETURN.search(node.name):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return):
                    nodes.append(inner.value)
    return {text for node in nodes for text in _texts(node)}


def _texts(node: ast.AST | None) -> set[str]:
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
        return {"".join(map(str, parts))}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value} if re.fullmatch(r"[a-z_:]{2,}", node.value) else set()
    if not isinstance(node, ast.IfExp | ast.BoolOp | ast.Tuple):
        return set()
    parts = [getattr(node, name, None) for name in ("body", "orelse")]
    parts += [*getattr(node, "values", ()), *getattr(node, "elts", ())]
    return {text for part in parts for text in _texts(part)}


def possible_codes() -> set[str]:
    """Return every code that the stages can give."""
    codes: set[str] = set(RULES)
    for path in sorted((ROOT / "synth").rglob("*.py")):
        for code in _codes_in(ast.parse(path.read_text(encoding="utf-8"))):
            if "{" not in code:
                codes.add(code)
            elif re.fullmatch(r"[a-z_:{}]+", code):
                assert code in FAMILIES, f"{path.name}: say in FAMILIES what {code!r} may become"
                codes |= FAMILIES[code]
    return codes


def test_the_search_finds_the_codes_of_every_stage():
    all_codes = possible_codes()
    assert {
        "broken_gzip",
        "no_text",
        "noise_html",
        "too_long",
        "duplicate",
        "not_sampled",
        "not_selected",
        "greedy_looping",
        "teacher_overlong",
        "cut",
        "no_candidate",
        "numbers_missing",
        "judge_error:upstream",
    } <= all_codes


@pytest.mark.parametrize("code", sorted(possible_codes()))
def test_each_code_is_explained_in_one_sentence(code):
    explanation = explain(code)
    assert re.fullmatch(r"[A-Z][^\n]{10,140}\.", explanation), explanation
    assert "{" not in explanation and UNKNOWN[:-1] not in explanation


def test_every_word_of_the_rubric_and_of_the_rules_has_its_explanation():
    reasons = load_rubrics()["translation_filter"].score.fail_reasons
    assert {*reasons, *_RULES} <= set(VERDICTS)
    assert {*LLM_ERROR_TYPES, *SAMPLE_ERROR_TYPES} == set(FAILURES)


def test_no_line_of_the_table_is_left_over():
    families = {key[:-1] for key in REASONS if key.endswith("*")}
    codes = possible_codes()
    for key in REASONS:
        used = key in codes or any(f"{family}{key}" in codes for family in families)
        assert used or any(code.startswith(key.rstrip("*")) for code in codes), key


def test_a_code_of_another_version_stops_no_report():
    assert explain("no_such_code") == UNKNOWN
    assert "does not know" in explain("teacher_eloped")
