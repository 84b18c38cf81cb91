"""Check the five functions on any text: values in [0, 1], no order dependence, no errors."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit.client.embeddings import EmbeddingModel
from scorekit.errors import SampleError, ServiceUnreachable, UserError
from tests.kits.examples import examples
from trainer.roleplay import rewards
from trainer.roleplay.calibration import CANARIES, Anchors, Calibration
from trainer.roleplay.formulas import _ngram_overlap_ratio
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import (
    REWARDS,
    configure,
    explain,
    explain_all,
    reward_format,
    reward_grounded_to_user,
    reward_reference_alignment,
    reward_role_split,
    total,
    weights_of,
)
from trainer.roleplay.similarity import Similarity
from trainer.roleplay.turn import RoleplayTurn

GOOD = '유나는 웃었다.\n"오늘은 늦게까지 있을게요."'


class Letters:
    """An in-memory embedder whose vectors count a text's letters. It records its calls.

    odd: results to return instead, by text.
    """

    def __init__(self, **odd):
        self.calls, self.odd = [], odd

    def info(self):
        return EmbeddingModel("letters", "1", "mean", 16, 8192)

    def embed(self, texts, canary=None):
        self.calls.append([*texts, *([canary.text] if canary else [])])
        answered = canary and self.odd.get(canary.text, self.vector(canary.text))
        if canary and (reason := canary.find_error(answered)):
            raise ServiceUnreachable("letters", reason, retryable=False)
        return [self.odd.get(text) or self.vector(text) for text in texts]

    @staticmethod
    def vector(text):
        counts = np.full(16, 0.1)
        for letter in text:
            counts[ord(letter) % 16] += 1
        return list(counts / np.linalg.norm(counts))

    def close(self):
        pass


def letter_similarity(**odd):
    anchors = Anchors(low=0.2, high=0.9)
    canaries = {text: Letters.vector(text) for text in CANARIES}
    calibration = Calibration(
        model="letters", dimension=16, grounded=anchors, reference=anchors, canaries=canaries
    )
    return Similarity(Letters(**odd), calibration)


@pytest.fixture(autouse=True)
def similarity(monkeypatch):
    monkeypatch.setattr(rewards, "_setting", None)
    letters = letter_similarity()
    configure(RewardConfig(), letters, ["<end>", "[SEP]", "the"])
    return letters


def _all(completions, **row):
    n = len(completions)
    row = {"reference": GOOD, "player_name": "민수", "character_name": "유나"} | row
    columns = {"speech_level": ["polite"] * n} | {key: [value] * n for key, value in row.items()}
    prompts = [[{"role": "user", "content": "오늘은 언제까지 있어?"}]] * n
    return [reward.function(prompts, completions, **columns) for reward in REWARDS]


HOSTILE = [
    "",
    "\0",
    '유나는 웃었다.\0\n"가요."',
    "가" * 1_000_000,
    ('유나는 "웃었다". ' * 60_000)[:1_000_000],
    "\n" * 1_000_000,
    '"' * 1_000,
    "“" * 1_000,
    "“”" * 500,
    '“"가"”',
    '"“가”',
    "＂가요＂",
    "\u200b\u200b",
    '유\u200b나는 웃었다.\n\u200b"가요."\u200b',
    unicodedata.normalize("NFD", GOOD),
    '😀😀\n"😀"',
    GOOD.replace("\n", "\r\n"),
    GOOD.replace("\n", "\u2028"),
    "\ud800",
    "\udc00유나는 웃었다.",
    "a" + "\u0301" * 5_000,
    "요" * 5_000,
    "민수가 " * 2_000,
    "민수가민수는" * 2_000,
    "<|im_start|>" * 500,
    "user:" * 1_000,
    "\x1b[31m유나\x1b[0m",
    "\ufeff" + GOOD,
    "\u202e" + GOOD,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_have_numbers(text):
    for (value,) in _all([text]):
        assert 0 <= value <= 1
    for (value,) in _all([text], player_name=text[:50], character_name=text[:50], reference=text):
        assert 0 <= value <= 1


_WORDS = (
    "\r\n",
    "유나",
    "민수",
    "는 ",
    "가 ",
    "웃었다",
    "USER:",
    "< | im",
    "<|",
    "가자",
    "……",
    "ㅋㅋ",
)
_FRAGMENTS = st.sampled_from('"“”＂「」\n\u2028\0.요이 \u200b😀\u1100\u1161') | st.sampled_from(
    _WORDS
)
_TEXT = st.one_of(st.text(max_size=60), st.lists(_FRAGMENTS, max_size=14).map("".join))


@settings(max_examples=examples(50))
@given(st.lists(_TEXT, min_size=1, max_size=4), st.randoms())
def test_any_text_has_numbers_that_do_not_depend_on_its_batch(texts, chance):
    columns = _all(texts)
    for values in columns:
        assert all(isinstance(v, float) and 0 <= v <= 1 and math.isfinite(v) for v in values)
    order = list(range(len(texts)))
    chance.shuffle(order)
    shuffled_columns = _all([texts[k] for k in order])
    for values, shuffled in zip(columns, shuffled_columns, strict=True):
        assert shuffled == [values[k] for k in order]
    alone = [function[0] for function in _all([texts[0]])]
    assert alone == [values[0] for values in columns]


@settings(max_examples=examples(60))
@given(_TEXT, _TEXT)
def test_overlap_is_a_share(user, completion):
    assert 0 <= _ngram_overlap_ratio(user, completion) <= 1


def test_overlap_counts_words_and_letters_of_short_turns():
    assert _ngram_overlap_ratio("나는 오늘 집에 갔다", "나는 오늘 집에 갔다") == 1
    assert _ngram_overlap_ratio("나는 오늘 집에 갔다", "나는 오늘 집에 왔다") == 0.5
    assert _ngram_overlap_ratio("집에 갈래?", '"집에 갈래?" 유나가 되물었다.') == 1
    assert _ngram_overlap_ratio("응", "응") == 0
    assert _ngram_overlap_ratio("I Like Green Tea", "i like green tea!") == 1


@pytest.mark.parametrize(
    ("repeated", "penalty"), [(0.55, 0), (0.56, 0.05), (0.70, 0.05), (0.71, 0.1)]
)
def test_what_is_said_after_costs_a_little(monkeypatch, repeated, penalty):
    from trainer.roleplay import formulas

    monkeypatch.setattr(formulas, "_ngram_overlap_ratio", lambda *_: repeated)
    prompt, reply = ["가나다라"], ["가나다라마바"]
    (value,) = reward_grounded_to_user(prompt, reply)
    monkeypatch.setattr(formulas, "_ngram_overlap_ratio", lambda *_: 0.0)
    assert reward_grounded_to_user(prompt, reply)[0] - value == pytest.approx(penalty)


def test_a_question_that_is_far_from_the_reply_is_nothing(similarity):
    prompts = ["aaaa?", "aaaa"]
    low = Anchors(low=-1, high=1)
    similarity.calibration = similarity.calibration.model_copy(
        update={"grounded": Anchors(low=0.0, high=1.0), "reference": low}
    )
    question_value, statement_value = reward_grounded_to_user(prompts, ["bbbb", "bbbb"])
    assert question_value == 0 < statement_value < 0.2


def test_a_similarity_on_the_border_of_a_question_is_no_nothing(similarity, monkeypatch):
    """Check rounding: (0.16 - 0.1) / (0.4 - 0.1) is 0.19999999999999996 as floats."""
    anchors = Anchors(low=0.1, high=0.4)
    similarity.calibration = similarity.calibration.model_copy(update={"grounded": anchors})
    for cosine, value in ((0.16, 0.2), (0.159, 0.0)):
        monkeypatch.setattr(similarity, "cosines", lambda pairs, extra_texts, c=cosine: [c])
        assert reward_grounded_to_user(["aaaa?"], ["bbbb"]) == [pytest.approx(value)]


def test_a_row_without_reference_is_neutral_and_counted():
    logged = {}
    values = reward_reference_alignment(
        ["가", "가", "가"],
        [GOOD, GOOD, ""],
        reference=[GOOD, None, GOOD],
        log_metric=logged.__setitem__,
    )
    assert values == [1, 0.5, 0]
    assert logged["reference/missing"] == pytest.approx(1 / 3)
    assert logged["reference/not_embedded"] == 0.5


def test_each_component_of_the_table_is_logged_under_its_key_and_no_other():
    logged, reasons = {}, {}
    n = {"player_name": ["민수"], "character_name": ["유나"], "speech_level": ["plain"]}
    for reward in REWARDS:
        reward.function(
            ["어디 가?"],
            [GOOD],
            log_metric=logged.__setitem__,
            log_extra=reasons.__setitem__,
            reference=[GOOD],
            **n,
        )
    assert set(logged) == {component.key for reward in REWARDS for component in reward.components}
    assert set(reasons) == {f"{reward.short}/why" for reward in REWARDS}
    assert reasons["character/why"] == ["1 of 1 sentences are not plain"]


def test_a_batch_is_one_call_of_the_embedder_and_equal_texts_stand_in_it_once(similarity):
    _all([GOOD, GOOD, "다른 말.", "", "\0"])
    (texts,) = similarity.embedder.calls
    assert len(set(texts)) == len(texts)
    assert set(texts) == {CANARIES[0], GOOD, "다른 말.", "오늘은 언제까지 있어?"}


def test_a_text_that_the_server_refuses_is_nothing_and_another_failure_ends_the_run():
    refusing_similarity = letter_similarity(**{"너무 긴 글": SampleError("overlong", "too long")})
    configure(RewardConfig(), refusing_similarity)
    assert reward_grounded_to_user(["가", "가"], ["너무 긴 글", "가"])[0] == 0
    configure(RewardConfig(), letter_similarity(글=SampleError("model_failure", "broken")))
    with pytest.raises(SampleError):
        reward_grounded_to_user(["가"], ["글"])


@pytest.mark.parametrize(
    "vector", [[math.nan] * 16, [math.inf] * 16, [0.0] * 16, [1.0] * 8, list(np.eye(16)[3])]
)
def test_a_server_that_becomes_another_ends_the_run(vector):
    configure(RewardConfig(), letter_similarity(**{CANARIES[0]: vector}))
    with pytest.raises(ServiceUnreachable, match="not the model of this run's calibration"):
        reward_grounded_to_user(["가"], ["나"])


def test_without_a_server_the_two_that_embed_say_what_to_do(monkeypatch):
    monkeypatch.setattr(rewards, "_setting", None)
    monkeypatch.delenv("REWARD_EMBEDDING_URL", raising=False)
    assert reward_format(["가"], [GOOD]) == [1]
    with pytest.raises(UserError, match="REWARD_EMBEDDING_URL"):
        reward_grounded_to_user(["가"], ["나"])


def test_special_tokens_of_the_model_are_markers_and_its_words_are_not():
    assert reward_role_split(["가"], ["유나 <end> 는"]) == [pytest.approx(0.55)]
    assert reward_role_split(["가"], ["유나 [sep] 는"]) == [pytest.approx(0.55)]
    assert reward_role_split(["가"], ["유나 the 는"]) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "USER:",
        "user :",
        "U S E R:",
        "u\u200bser:",
        "ＵＳＥＲ：",
        "role: user",
        "assistant：",
        "**User**:",
        "사용자: 안녕",
        "### User",
        "[INST]",
        "</s>",
        "[SYSTEM]",
        "<|im_start|>",
        "< | im_start | >",
        "<|IM_END|>",
    ],
)
def test_markers_in_any_form(text):
    assert reward_role_split(["가"], [f"유나는 웃었다.\n{text}"])[0] <= 0.55 + 1e-9


@pytest.mark.parametrize(
    "text",
    ["시스템 종료를 눌렀다.", "<b>유나</b>", "superuser는", "3:00", "유나: 네", "http://user:8000"],
)
def test_what_is_no_marker(text):
    assert reward_role_split(["가"], [text]) == [1]


def test_explain_is_what_the_functions_give_with_one_request(similarity):
    turn = RoleplayTurn(
        "1", ({"role": "user", "content": "언제 가?"},), GOOD, "민수", "유나", "polite"
    )
    texts = [GOOD, "민수는 웃었다.", ""]
    explanations = explain_all([turn] * 3, texts)
    assert len(similarity.embedder.calls) == 1
    for reward in REWARDS:
        values = reward.function(
            [list(turn.prompt)] * 3,
            [[{"role": "assistant", "content": text}] for text in texts],
            reference=[GOOD] * 3,
            player_name=["민수"] * 3,
            character_name=["유나"] * 3,
            speech_level=["polite"] * 3,
        )
        assert values == [row[reward.name].value for row in explanations]
    assert explain(turn, GOOD) == explanations[0]
    assert total(explanations[0]) == pytest.approx(
        sum(reward.weight * explanations[0][reward.name].value for reward in REWARDS)
    )
    assert all(row.reasons for row in explanations[1].values() if row.value < 1)


def test_weights_that_are_wrong_are_named():
    with pytest.raises(UserError, match="did you mean reward_format"):
        weights_of(RewardConfig(weights={"reward_fromat": 1}))
    with pytest.raises(UserError, match="negative"):
        weights_of(RewardConfig(weights={"reward_format": -1}))
    with pytest.raises(UserError, match="all weights are 0"):
        weights_of(RewardConfig(weights={reward.name: 0 for reward in REWARDS}))
    assert weights_of(RewardConfig(weights={"reward_format": 0}))[0] == 0


def test_functions_are_found_by_name_and_need_no_torch():
    for reward in REWARDS:
        assert pickle.loads(pickle.dumps(reward.function)) is reward.function
        assert reward.function.__name__ == reward.name
    code = (
        "import sys; from trainer.roleplay.rewards import reward_format; "
        "assert reward_format(['a'], ['b']) == [0.3]; "
        "print([m for m in ('torch', 'transformers', 'kiwipiepy', 'trl') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_forked_process_reads_korean_too():
    _all([GOOD])
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"%d" % (_all([GOOD])[3] == [1.0]))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"1"
    os.waitpid(child, 0)
