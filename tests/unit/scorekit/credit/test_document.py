"""Check that the Python of docs/how-to/reward-tokens.md runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "docs/how-to/reward-tokens.md").read_text(encoding="utf-8")
CREDIT, ADVANTAGES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(code: str) -> None:
    exec(compile(code, "docs/how-to/reward-tokens.md", "exec"), {"__name__": "__example__"})


def test_the_tokens_of_the_span_are_penalized(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run(CREDIT)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    penalized = [line for line in lines if line.endswith(" -5.0")]
    assert penalized and all(set("열고") & set(line) for line in penalized)
    assert lines[-1] == "'' 0.0" and len(lines) > len(penalized) + 1
    assert all(line.endswith(" 0.0") for line in lines if line not in penalized)
    assert not any(set("열고") & set(line) for line in lines if line not in penalized)


def test_the_sample_without_a_reward_has_advantages_of_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(ADVANTAGES)
    first, second, third = eval(capsys.readouterr().out)
    assert any(first) and second == [0.0, 0.0] and third[2] == 0.0 and third[0] != 0
