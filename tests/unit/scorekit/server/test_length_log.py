"""Check when a line on inputs that are too long is written, and what it says."""

from __future__ import annotations

from typing import Any

from scorekit.errors import SampleError
from scorekit.server.backend import Encoded
from scorekit.server.tokenizers import PERIOD_S, LengthLog


class Written:
    """A log of lines and counts, with a clock that a test sets."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, int, dict[str, int]]] = []
        self.counts: list[str] = []
        self.now = 100.0
        self.log = LengthLog(
            lambda *line: self.lines.append(line), self.counts.append, lambda: self.now
        )


def encoded(**truncated: bool) -> Encoded:
    return Encoded(3, {"tokens": 3, "truncated": truncated}, None)


def test_the_first_line_comes_at_once_and_the_next_after_a_minute() -> None:
    written = Written()
    cut_twice = encoded(src=True, mt=True, ref=False)
    written.log.note([encoded(src=False, mt=False), cut_twice, encoded(src=False, mt=True)])
    assert written.lines == [(2, 0, {"src": 1, "mt": 2})]
    for _ in range(1000):
        written.log.note([cut_twice])
    written.now += PERIOD_S - 1
    written.log.note([SampleError("overlong", "9 tokens")])
    assert len(written.lines) == 1
    written.now += 1
    written.log.note([encoded(src=False, mt=False)])
    assert len(written.lines) == 1  # nothing is too long: nobody looks at the clock
    written.log.note([cut_twice])
    assert written.lines[1:] == [(1001, 1, {"src": 1001, "mt": 1001})]
    assert written.counts.count("src") == 1002 and written.counts.count("mt") == 1003


def test_what_no_line_has_said_is_said_at_the_end() -> None:
    written = Written()
    written.log.flush()
    assert written.lines == []
    written.log.note([encoded(input=True)])
    written.log.note([encoded(input=True)])
    written.log.flush()
    written.log.flush()
    assert written.lines == [(1, 0, {"input": 1}), (1, 0, {"input": 1})]


def test_what_is_not_too_long_is_not_noted() -> None:
    written = Written()
    unnoted: list[Any] = [None, SampleError("invalid_input", "NUL"), Encoded(1, {}, None)]
    written.log.note([*unnoted, encoded(src=False, mt=False, ref=False)])
    written.log.flush()
    assert written.lines == [] and written.counts == []
