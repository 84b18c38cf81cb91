"""Finish reasons of chat servers: which texts are whole."""

from __future__ import annotations

import pytest

from scorekit.llm.wire import common_reason, unfinished_reason


@pytest.mark.parametrize("reason", ["stop", "STOP", "eos_token", "end_turn", "COMPLETE", None, ""])
def test_a_text_that_the_model_ended_is_whole(reason: str | None) -> None:
    assert unfinished_reason(reason) is None


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("length", "length"),
        ("MAX_TOKENS", "length"),
        ("content_filter", "refused"),
        ("content_filter: PROHIBITED_CONTENT", "refused"),
        ("SAFETY", "refused"),
        ("tool_calls", "malformed"),
        ("function_call", "malformed"),
        ("repetition", "malformed"),
        ("abort", "malformed"),
        ("some new word", "malformed"),
    ],
)
def test_a_text_that_ended_in_another_way_is_not(reason: str, kind: str) -> None:
    assert unfinished_reason(reason) == kind


@pytest.mark.parametrize(
    ("reason", "word"),
    [(None, "unknown"), (" : x", "unknown"), ("Stop", "stop"), ("tool_calls", "tool_calls")],
)
def test_words_of_servers_become_those_of_the_chat_api(reason: str | None, word: str) -> None:
    assert common_reason(reason) == word
