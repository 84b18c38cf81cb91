"""A composite reward in a translation run is the one of every other trainer."""

from __future__ import annotations

from contextlib import closing

import pytest
import yaml
from sacrebleu import sentence_chrf

from scorekit.config import load_config, save_config
from scorekit.errors import UserError
from scorekit.rewards import SyncCompositeReward, load_definition
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.flaky_server import FAULTS, FlakyServer
from testing.servers import running_app, wait_ready
from tests.kits.trainer.rewards import reward_services
from tests.kits.trainer.runs import example, rollout
from tests.kits.trainer.toy_runs import read, toy_config, train_here
from trainer.translation.config import TranslationConfig
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.screening import check_references, check_target_languages
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.short_form import definition_of

SRC = "Please save all of your changes before you close the window, or they will be lost."
MT = "창을 닫기 전에 변경한 내용을 모두 저장하세요. 그렇지 않으면 변경 내용이 사라집니다."
ALONE = {"w_metricx": 0.0, "w_xcomet_span": 0.0}


@pytest.fixture(scope="module")
def services():
    with reward_services() as running:
        yield running


def rewards(cfg, *texts):
    rollouts = [
        rollout(
            [1],
            [5] * len(mt),
            mt,
            src_text=src,
            pair="en-US>ko-KR",
            token_char_offsets=[(i, i + 1) for i in range(len(mt))],
        )
        for src, mt in texts
    ]
    with closing(RewardClient(cfg)) as rewarder:
        scores = rewarder.score([item.scored_text for item in rollouts])
    return compute_rewards(rollouts, scores, cfg)


def composite(services, **definition):
    metricx = {"service": services.urls["metricx_urls"], "offset": 5.0, "scale": -1.0}
    parts = {"components": {"metricx": metricx}, "deadline_s": 10.0} | definition
    return RewardConfig(**ALONE, definition=parts)


def test_the_definition_of_a_config_gives_the_config_s_rewards(services):
    weights = {"w_metricx": 0.3, "w_xcomet_seq": 1.5, "guards": {"w_copy": 0.7, "w_length": 0.2}}
    cfg = services.config(w_xcomet_span=0.0, **weights)
    texts = [
        (SRC, MT), (SRC, SRC), (SRC, MT * 3), (SRC, "nan"), (SRC, "a long text"),
        (SRC, "x\0"), ("a\0", MT), ("a\0", "x\0"),
    ]  # fmt: skip
    expected = rewards(cfg, *texts)
    results = rewards(RewardConfig(**ALONE, definition=definition_of(cfg)), *texts)
    for reward, other in zip(results, expected, strict=True):
        assert (reward.r_seq is None) == (other.r_seq is None)
        assert reward.r_seq is None or reward.r_seq == pytest.approx(other.r_seq, abs=1e-12)
    assert [reward.r_seq is None for reward in results] == [False] * 3 + [True] + [False] * 2 + [
        True
    ] * 2
    assert results[6].source_error is not None and results[3].service_error is not None


def test_a_closed_gate_leaves_the_sample_out_and_is_no_penalty(services):
    cfg = composite(services, gates={"copy": {"rule": "copy"}})
    copied, scored = rewards(cfg, (SRC, SRC), (SRC, MT))
    assert copied.r_seq is None and "gate copy: closed" in str(copied.service_error)
    assert copied.text_error is None and not copied.is_transient
    assert scored.r_seq == scored.score("definition")
    strict = cfg.model_copy(update={"on_failure": "fail"})  # a gate that closes is no failure
    assert [reward.r_seq for reward in rewards(strict, (SRC, SRC), (SRC, MT))] == [
        None,
        scored.r_seq,
    ]


def test_a_gate_knows_the_languages_of_the_row(services):
    cfg = composite(services, gates={"language": {"rule": "language"}})
    english, korean = rewards(cfg, (SRC, SRC.upper()), (SRC, MT))
    assert english.r_seq is None and "gate language: closed" in str(english.service_error)
    assert korean.r_seq is not None


def test_a_language_that_a_gate_does_not_know_ends_the_check_and_the_run(tmp_path):
    gate = {"rule": "language"}
    cfg = load_definition({"components": {"a": {"rule": "copy"}}, "gates": {"g": gate}})
    check_target_languages(cfg, "reward.definition", ["ko-KR", "de-DE"])
    check_target_languages(None, "reward.definition", ["tlh"])
    with pytest.raises(UserError, match=r"^reward.definition: gates.g: py3langid does not know"):
        check_target_languages(cfg, "reward.definition", ["ko-KR", "tlh"])


def test_a_rule_that_raises_for_each_sample_ends_the_run(services):
    component = {"rule": f"{__name__}:broken"}
    cfg = composite(services, components={"own": component})
    with pytest.raises(UserError, match=r"components.own: none of the first 8 samples has a value"):
        rewards(cfg, *[(SRC, f"{MT} {index}") for index in range(8)])


def broken(sample):
    """Raise as a function with a mistake does."""
    raise KeyError("level")


def test_a_refused_text_has_the_definition_s_reward_or_the_config_s(services):
    (plain,) = rewards(composite(services), (SRC, "a long text"))
    assert plain.r_seq == RewardConfig().text_error_reward
    (penalized,) = rewards(
        composite(services, refused_text_reward={"overlong": -7.0}), (SRC, "a long text")
    )
    assert penalized.r_seq == -7.0


def test_spans_and_a_composite_reward_add_up(services):
    cfg = composite(services).model_copy(
        update={"w_xcomet_span": 1.0, "xcomet_urls": [services.urls["xcomet_urls"]]}
    )
    (reward,) = rewards(cfg, (SRC, "bad"))
    with SyncCompositeReward(cfg.definition) as alone:
        (result,) = alone.score([{"src": SRC, "mt": "bad"}])
    assert reward.r_seq == result.reward and any(reward.token_rewards)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"components": {"a": {"service": "http://127.0.0.1:9", "reference": True}}},
            r"components\.a\.reference: services get no reference in this trainer",
        ),
        (
            {
                "components": {
                    "a": {"service": "http://a", "task": "t", "variables": {"text": "ref"}}
                }
            },
            r"components\.a\.variables: services get no reference in this trainer",
        ),
        (
            {
                "components": {"a": {"service": "http://127.0.0.1:9"}},
                "token_rewards": {"spans": {"a": 1.0}},
            },
            r"token_rewards: tokens are rewarded by the keys of a run's reward",
        ),
    ],
)
def test_what_this_trainer_does_not_give_is_refused_and_not_printed(keys, line):
    cfg = RewardConfig(**ALONE, definition=keys)
    for refused in (RewardClient, definition_of):
        with pytest.raises(UserError, match=rf"^reward\.definition\.{line}"):
            refused(cfg)


def test_rules_read_the_reference_the_end_and_the_group_of_a_sample(services):
    """Check them in a group, in an evaluation, and in the definition for other trainers."""
    rules = {
        "chrf": {"rule": "chrf", "weight": 0.1},
        "truncated": {"rule": "truncated", "weight": -4.0},
        "duplicates": {"rule": "duplicates", "weight": -1.0},
        "place": {"rule": f"{__name__}:order", "group": True},
    }
    cfg = RewardConfig(**ALONE, definition={"components": rules})
    rollouts = [
        rollout(
            [1],
            [5] * len(mt),
            mt,
            src_text=SRC,
            token_char_offsets=[(i, i + 1) for i in range(len(mt))],
            ref_text=MT,
            finish_reason=reason,
            group=group,
        )
        for mt, reason, group in ((MT, "eos", 0), (MT, "length", 0), ("열기", "eos", 1))
    ]
    with closing(RewardClient(cfg)) as rewarder:
        batch = rewarder.batch()
        parts = [rollouts[:2], rollouts[2:]]
        groups = [batch.submit([item.reward_fields for item in part]) for part in parts]
        trained = [
            reward.r_seq
            for part, group in zip(parts, groups, strict=True)
            for reward in compute_rewards(part, group.result(), cfg)
        ]
        evaluated = compute_rewards(rollouts, rewarder.score(rollouts), cfg)
    (short,) = (0.1 * sentence_chrf("열기", [MT]).score,)
    assert trained == pytest.approx([10.0 - 1.0, 10.0 - 4.0 - 1.0 + 1.0, short])
    assert [reward.r_seq for reward in evaluated] == pytest.approx([10.0, 6.0, short])
    with SyncCompositeReward(definition_of(cfg)) as reward:
        samples = [item.reward_fields for item in rollouts]
        results = reward.score(samples, groups=[0, 0, 1])
    assert [result.reward for result in results] == trained


def order(samples):
    """Return each sample's place in its group."""
    return range(len(samples))


def test_a_rule_that_reads_references_needs_them_in_each_row():
    chrf = {"components": {"own": {"rule": "chrf", "weight": 0.1}, "copy": {"rule": "copy"}}}
    rows = [example("Open.", "0"), example("Save.", "1", "저장")]
    line = (
        r"^data.train: 1 of 2 rows have no ref_text \(0\), which reward.definition.components.own"
    )
    with pytest.raises(UserError, match=line):
        check_references(rows, RewardConfig(**ALONE, definition=chrf), "data.train")
    check_references(rows, RewardConfig(**ALONE, definition=chrf, terms={"own": 0.0}), "data.train")
    check_references(rows[1:], RewardConfig(**ALONE, definition=chrf), "data.train")


def test_a_service_that_is_away_or_does_not_fit_is_one_line(services):
    nobody = {"components": {"a": {"service": "http://127.0.0.1:9"}}, "deadline_s": 0.5}
    with pytest.raises(UserError, match=r"^reward.definition: http://127.0.0.1:9"):
        RewardClient(RewardConfig(**ALONE, definition=nobody))
    wrong = {"components": {"a": {"service": services.urls["metricx_urls"]}}}
    with pytest.raises(UserError, match=r"^reward.definition: components.a: lower values"):
        RewardClient(RewardConfig(**ALONE, definition=wrong))
    with pytest.raises(UserError, match=r"no-such.yaml: cannot be read"):
        RewardConfig(definition="no-such.yaml")


@pytest.mark.parametrize("failure", FAULTS)
def test_a_sick_service_gives_no_reward_and_recovers(services, failure):
    flaky = FlakyServer(create_app(FakeBackend("xcomet"), ServiceSettings(cache="memory")))
    with running_app(flaky) as url:
        wait_ready(url)
        parts = {
            "metricx": {"service": services.urls["metricx_urls"], "offset": 5.0, "scale": -1.0},
            "xcomet": {"service": url},
        }
        cfg = RewardConfig(
            **ALONE, definition={"components": parts, "timeout_s": 1.0, "deadline_s": 2.0}
        )
        flaky.mood = lambda path, body: failure if path.endswith("score") else None
        failed, other = rewards(cfg, (SRC, MT), (SRC, "열기"))
        assert failed.r_seq is other.r_seq is None and failed.text_error is None
        assert "xcomet: " in str(failed.service_error)
        # A 500 without a type may be a text that ends its server: it is not asked for again.
        assert failed.is_transient == (failure != "500")
        flaky.recover()
        scored, _ = rewards(cfg, (SRC, MT), (SRC, "열기"))
    assert scored.r_seq is not None and scored.service_error is None


def test_evaluations_without_the_cache_say_so_to_the_services(services):
    cfg = composite(services)
    services.metricx.samples.clear()
    with closing(RewardClient(cfg, caching=False)) as rewarder:
        for _ in range(2):
            rewarder.score([(SRC, MT, "en", "ko")])
    assert len(services.metricx.samples) == 2
    (model, _) = next(iter(rewarder_models(cfg)))
    assert model == "fake-metricx"


def rewarder_models(cfg):
    with closing(RewardClient(cfg)) as rewarder:
        assert rewarder.needed_urls == set(cfg.definition.components["metricx"].service)
        return rewarder.needed_models


def test_a_run_learns_from_it_and_keeps_its_content(tmp_path):
    with toy_config(tmp_path) as config:
        run = yaml.safe_load(config.read_text())
        urls = run["reward"]["metricx_urls"]
        definition = {
            "components": {
                "metricx": {"service": urls, "offset": 5.0, "scale": -1.0},
                "repetition": {"rule": "repetition", "weight": -1.0},
            },
            "gates": {"copy": {"rule": "copy", "factor": 0.5}},
        }
        path = tmp_path / "reward.yaml"
        path.write_text(yaml.safe_dump(definition))
        flags = [f"reward.{key}={value}" for key, value in ALONE.items()]
        out = tmp_path / "out"
        artifacts = train_here(config, out, *flags, f"reward.definition={path}")
        assert artifacts.exit_code == 0
        lines = read(out / "log.jsonl")
        for line in lines:
            assert line["definition_coverage"] > 0.5  # the policy may write a NUL
            mean = 5.0 - line["definition_component_metricx_mean"]
            mean -= line["definition_component_repetition_mean"]
            assert line["definition_score_mean"] == pytest.approx(mean, abs=1e-9)
            assert line["definition_gate_closed_copy_mean"] == 0.0
        path.write_text("components: {}")
        definition = load_config(TranslationConfig, out / "config.yaml").reward.definition
        assert list(definition.components) == ["metricx", "repetition"]
        save_config(definition, tmp_path / "again.yaml")
        assert RewardConfig(definition=str(tmp_path / "again.yaml")).definition == definition
    rows = [row for path in (out / "completions").glob("train-*.jsonl") for row in read(path)]
    scored = [row for row in rows if row["definition_score"] is not None]
    assert scored and all(
        row["definition_stats"].keys()
        == {"component/metricx", "component/repetition", "gate_closed/copy"}
        for row in scored
    )
