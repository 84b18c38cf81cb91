"""Check replies that repeat the user: their share, the guard and the warning."""

from __future__ import annotations

import logging

import pytest

from trainer.roleplay.evaluation.diagnostics import ECHO, MAX_RISE, WINDOW, EchoWatch
from trainer.roleplay.formulas import ReplyContext, is_echo, score_grounding
from trainer.roleplay.reply import ParsedReply

USER = "오늘은 몇 시에 나갈 거야?"


def _reply(quote, user=USER):
    return ReplyContext(ParsedReply(f'유나는 웃었다.\n"{quote}"'), user)


@pytest.mark.parametrize(
    "quote", [USER, "오늘은 몇 시에 나갈 거예요?", "오늘은 몇 시에, 나갈 거야!"]
)
def test_the_users_turn_as_the_quotation_is_an_echo(quote):
    assert is_echo(_reply(quote))


@pytest.mark.parametrize(
    "quote",
    [
        "여섯 시쯤 나가려고요.",
        "오늘은 몇 시에 나갈 거냐고요? 글쎄요, 비가 그치면 시장에 들렀다가 돌아올까 해요.",
        "",
    ],
)
def test_a_reply_with_words_of_its_own_is_no_echo(quote):
    assert not is_echo(_reply(quote))


@pytest.mark.parametrize(
    ("user", "quote"),
    [
        ("오늘 학교에 갔다 왔어요?", "네, 오늘 학교에 갔다 왔어요."),
        ("안녕하세요.", "안녕하세요."),
        ("새해 복 많이 받으세요.", "새해 복 많이 받으세요."),
    ],
)
def test_an_answer_in_the_words_of_its_question_and_a_greeting_are_no_echo(user, quote):
    assert not is_echo(_reply(quote, user))


def test_a_question_that_is_asked_back_and_a_statement_said_again_are_echoes():
    assert is_echo(_reply("아, 오늘 학교에 갔다 왔어요?", "오늘 학교에 갔다 왔어요?"))
    assert is_echo(_reply("네, 오늘 학교에 갔다 왔어요.", "오늘 학교에 갔다 왔어요."))


def test_a_reply_without_a_quotation_is_read_whole():
    assert is_echo(ReplyContext(ParsedReply(USER), USER))
    assert not is_echo(ReplyContext(ParsedReply(""), USER))
    assert not is_echo(ReplyContext(ParsedReply(USER), ""))


def test_the_guard_takes_all_of_the_similarity_and_is_off_by_default():
    echo, answer = _reply(USER), _reply("여섯 시쯤 나가려고요.")
    assert score_grounding(echo, 0.9, 0.9).value == pytest.approx(0.8)
    assert score_grounding(echo, 0.9, 0.9).components[ECHO] == 1
    guarded = score_grounding(echo, 0.9, 0.9, echo_guard=True)
    assert guarded.value == 0 and "it echoes the user turn" in guarded.reasons
    for echo_guard in (False, True):
        score = score_grounding(answer, 0.9, 0.9, echo_guard)
        assert score.value == 0.9 and score.components[ECHO] == 0


def _warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_rise_over_the_first_evaluation_is_warned_of_once(caplog):
    watch = EchoWatch()
    for update, share in enumerate([0.1, 0.1 + MAX_RISE, 0.0]):
        watch.add_evaluation(update, {ECHO: share})
    assert not _warnings(caplog)
    watch.add_evaluation(3, {ECHO: 0.3})
    watch.add_evaluation(4, {ECHO: 0.4})
    (warning,) = _warnings(caplog)
    assert "grounded/echo: 0.30 at update 3 (evaluation), 0.10 at the start" in warning
    assert "reward.echo_guard" in warning


def test_training_is_compared_by_windows_of_updates(caplog):
    watch = EchoWatch()
    for update in range(2 * WINDOW - 1):
        watch.add_update(update, {ECHO: float(update >= WINDOW)})
    assert not _warnings(caplog)
    watch.add_update(2 * WINDOW, {ECHO: 1.0})
    assert "1.00 at update 20 (training), 0.00 at the start" in _warnings(caplog)[0]


def test_a_resumed_run_is_compared_with_its_own_start(caplog):
    watch = EchoWatch([{ECHO: 0.0}, {}], [{ECHO: 0.0}] * WINDOW + [{ECHO: 1.0}] * (WINDOW - 1))
    watch.add_evaluation(30, {ECHO: 0.5})
    watch.add_update(30, {ECHO: 1.0})
    assert len(_warnings(caplog)) == 2


def test_runs_that_logged_no_share_are_not_compared(caplog):
    watch = EchoWatch([{"reward_mean": 0.5}])
    watch.add_evaluation(1, {})
    watch.add_update(1, {ECHO: None})
    assert not _warnings(caplog)
