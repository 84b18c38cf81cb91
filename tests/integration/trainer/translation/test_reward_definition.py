"""A reward definition gives the rewards of a run, of texts and of tokens."""

from __future__ import annotations

from contextlib import closing

import pytest

from scorekit.rewards import SyncCompositeReward, token_rewards
from tests.kits.trainer.rewards import judge_service, reward_services
from tests.kits.trainer.runs import rollout
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.short_form import definition_of

SRC = "Please save all of your changes before you close the window, or they will be lost."
MT = "창을 닫기 전에 변경한 내용을 모두 저장하세요. 그렇지 않으면 변경 내용이 사라집니다."
#: (source, translation, finish reason). Recorder fails `nan`, and refuses `long` as overlong.
TEXTS = [
    (SRC, MT, "eos"),
    (SRC, MT * 3, "length"),
    (SRC, SRC, "eos"),
    (SRC, "저장하세요. " * 20, "length"),
    (SRC, "nan", "eos"),
    (SRC, "a long text", "eos"),
    (SRC, "a long text, cut", "length"),
    (SRC, "a long text\0", "eos"),
    (SRC, "x\0", "eos"),
    (SRC, "", "eos"),
    ("a\0", MT, "eos"),
    ("a\0", "x\0", "length"),
]
#: A definition of rules, with another name for the same one.
NESTED = {
    "components": {
        "loops": {"rule": "repetition", "weight": -2.0},
        "other_script": {"rule": "script", "weight": -1.0, "offset": 0.5},
        "cut": {"rule": "language", "weight": 1.0},
    }
}
GATES = {
    "gates": {
        "copy": {"rule": "copy", "factor": 0.5},
        "length": {"rule": "length", "reward": -9.0},
    }
}
GUARDS = {f"w_{name}": 0.7 for name in ("language", "script", "copy", "length", "repetition")}


@pytest.fixture(scope="module")
def services():
    with reward_services() as running:
        yield running


def both(cfg):
    """Return the trainer's rewards, and those of the definition, of the same texts; checks that
    the rewards of tokens are equal."""
    rollouts = [
        rollout(
            [1],
            [5] * (len(mt) + 1),
            mt,
            token_char_offsets=[*((k, k + 1) for k in range(len(mt))), (len(mt), len(mt))],
            src_text=src,
            finish_reason=reason,
            pair="en-US>ko-KR",
            ref_text="변경한 내용을 저장하세요.",
        )
        for src, mt, reason in TEXTS
    ]
    with closing(RewardClient(cfg)) as rewarder:
        scores = rewarder.score([item.scored_text for item in rollouts])
    rewards = compute_rewards(rollouts, scores, cfg)
    trained = [reward.r_seq for reward in rewards]
    samples = [
        {
            "src": item.src_text,
            "mt": item.completion_text,
            "src_lang": "en-US",
            "tgt_lang": "ko-KR",
            "finish_reason": item.finish_reason,
            "ref": item.ref_text,
        }
        for item in rollouts
    ]
    definition = definition_of(cfg)
    with SyncCompositeReward(definition) as reward:
        results = reward.score(samples)
    for item, expected, result in zip(rollouts, rewards, results, strict=True):
        credit = token_rewards(definition, result, item.completion_text, item.token_char_offsets)
        tokens = expected.token_rewards, expected.valid, expected.uncovered_tokens
        assert credit == (None if expected.r_seq is None else tokens)
    return trained, [result.reward for result in results]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"w_metricx": 0.3, "metricx_offset": 2.0, "w_xcomet_seq": 1.5, "xcomet_seq_scale": 3.0},
        {"guards": GUARDS, "no_eos_penalty": 4.0},
        {"guards": {"shown": True}, "w_chrf": 0.1},
        {"overlong": "skip", "no_eos_penalty": 4.0},
        {"overlong": "penalty", "text_error_reward": -30.0, "w_xcomet_seq": 1.0},
        {"overlong": "windows", "max_input_length": 64},
        {"w_xcomet_span": 1.0},
        {"w_xcomet_span": 0.5, "span_combine": "spread", "use_confidence": True},
        {"w_xcomet_span": 0.5, "severity_weights": {"MINOR": -2}, "uncovered": "sequence_only"},
        {"definition": NESTED, "w_definition": 0.5},
        {"definition": NESTED | GATES, "w_metricx": 0.0, "w_definition": 0.5},
    ],
)
def test_both_give_the_same_numbers(services, changes):
    cfg = services.config(**({"w_xcomet_span": 0.0} | changes))
    trained, composite = both(cfg)
    # at most 10 addends of size 100, whose sums round by 100 * 2**-52 each at most
    assert [reward is None for reward in composite] == [reward is None for reward in trained]
    assert composite == [r if r is None else pytest.approx(r, rel=0, abs=1e-12) for r in trained]
    if "definition" in changes and not cfg.w_metricx:  # no service, so nothing is refused
        assert None not in trained
        return
    refused = trained[8]
    assert refused == cfg.text_error_reward and trained[4] is None
    assert trained[10] is trained[11] is None
    if cfg.overlong != "windows":  # by which "long" is read, too
        cut = cfg.text_error_reward - cfg.no_eos_penalty
        assert trained[5] == (None if cfg.overlong == "skip" else cfg.text_error_reward)
        assert trained[6] == (None if cfg.overlong == "skip" else cut)
    assert len({reward for reward in trained if reward is not None}) >= 5


def test_a_judge_s_verdict_is_a_component(services):
    with judge_service() as (_, url):
        cfg = services.config(
            w_xcomet_span=0.0,
            w_judge=2.0,
            urls={"judge": url},
            judge_rubric="fluency",
            judge_variables={"text": "mt", "language": "tgt_lang"},
        )
        trained, composite = both(cfg)
    assert composite == [r if r is None else pytest.approx(r, rel=0, abs=1e-12) for r in trained]
    assert trained[0] is not None and trained[4] is None
