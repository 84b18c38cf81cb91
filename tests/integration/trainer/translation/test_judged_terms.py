"""Test the judge's reward components and chrF over real HTTP, from the check to the pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from typer.testing import CliRunner

from scorekit.errors import UserError
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.trainer.rewards import FakeJudge, Services, judge_service, reward_services
from tests.kits.trainer.runs import byte_level_tokenizer, rollout, save_policy
from trainer.__main__ import app
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.services import RewardClient

OFF = {"w_metricx": 0, "w_xcomet_span": 0, "deadline_s": 10.0}
#: Seconds of retries of what fails every time.
RETRIED_S = 2.0
Judge = tuple[FakeJudge, str]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judge_service() as running:
        yield running


@pytest.fixture(scope="module")
def metrics() -> Iterator[Services]:
    with reward_services() as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    judge[0].asked.clear()
    for name in ("METRICX_URL", "XCOMET_URL", "JUDGE_URL"):
        monkeypatch.delenv(name, raising=False)


def rewards(cfg: RewardConfig, *texts: tuple[str, str], ref: str | None = None) -> Any:
    """Return the rewards of (source, translation) pairs from English to Korean, one token a
    character."""
    rollouts = [
        rollout(
            [1],
            [5] * (len(mt) + 1),
            mt,
            src_text=src,
            pair="en-US>ko-KR",
            token_char_offsets=[*((i, i + 1) for i in range(len(mt))), (len(mt), len(mt))],
            ref_text=ref,
        )
        for src, mt in texts
    ]
    with closing(RewardClient(cfg)) as rewarder:
        scores = rewarder.score([sampled.scored_text for sampled in rollouts])
    return compute_rewards(rollouts, scores, cfg)


def test_mqm_marks_spans_and_omissions(judge: Judge) -> None:
    cfg = RewardConfig(**OFF, urls={"judge": judge[1]}, w_mqm_span=1, w_omission=1)
    (first, second) = rewards(cfg, ("[Save] the [file]", "a열기"), ("[Save]", "Save"))
    assert first.token_rewards == [-1, 0, 0, -10] and first.score("mqm") == 11
    assert second.token_rewards == [-5] * 4 + [0]
    sent = [request for request in judge[0].asked if request["mt"] == "Save"]
    assert sent == [
        {"task": "mqm", "src": "[Save]", "mt": "Save", "src_lang": "en-US", "tgt_lang": "ko-KR"}
    ]


def test_the_metrics_are_asked_as_before(judge: Judge, metrics: Services) -> None:
    metrics.xcomet.samples.clear()
    changes = {"w_metricx": 0, "w_mqm_span": 1, "urls": {"judge": judge[1]}}
    cfg = metrics.config(**changes, span_sources_combine="max", w_chrf=0.01)
    (reward,) = rewards(cfg, ("Open.", "ab열기"), ref="열기")
    assert reward.token_rewards == [-1, -1, 0, 0, 0]
    (seen,) = metrics.xcomet.samples
    assert (seen.src, seen.mt, seen.ref) == ("Open.", "ab열기", None)
    assert (seen.src_lang, seen.tgt_lang) == (None, None)
    assert "열기" not in {text for request in judge[0].asked for text in request.values()}


def test_a_rubric_is_a_term_of_the_sequence(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_URL", judge[1])
    (reward,) = rewards(RewardConfig(**OFF, w_judge=4), ("Open.", "열기ab"))
    assert reward.r_seq == 2.0 and reward.token_rewards == [0.0] * 5
    mapped = {"text": "mt", "language": "tgt_lang"}
    cfg = RewardConfig(**OFF, w_judge=4, judge_rubric="fluency", judge_variables=mapped)
    (reward,) = rewards(cfg, ("Open.", "열기abcd.."))
    assert reward.r_seq == 1.0
    assert judge[0].asked[-1] == {"task": "fluency", "text": "열기abcd..", "language": "ko-KR"}


@pytest.mark.parametrize("weight", ["w_judge", "w_mqm_span", "w_omission"])
def test_a_failed_verdict_is_no_reward(judge: Judge, weight: str) -> None:
    changes = {weight: 1, "urls": {"judge": judge[1]}, "deadline_s": RETRIED_S}
    cfg = RewardConfig(**(OFF | changes))
    failed, scored = rewards(cfg, ("Open.", "nan"), ("Open.", "열기"))
    assert failed.r_seq is None and "model_failure" in str(failed.service_error)
    assert scored.r_seq is not None
    with pytest.raises(Exception, match="model_failure"):
        rewards(cfg.model_copy(update={"on_failure": "fail"}), ("Open.", "nan"))


def test_a_source_that_no_translation_helps_is_not_charged(judge: Judge) -> None:
    cfg = RewardConfig(**OFF, w_mqm_span=1, urls={"judge": judge[1]})
    (nul_source, nul_translation) = rewards(cfg, ("a\0b", "열기"), ("Open.", "열\0기"))
    assert nul_source.r_seq is None and "bad_source" in str(nul_source.source_error)
    assert nul_translation.r_seq == cfg.text_error_reward


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_mqm_span": 1, "urls": {}}, "reward.urls.judge: required. Set the URL .* JUDGE_URL"),
        ({"w_judge": 1, "urls": {}}, "reward.urls.judge: required"),
        ({"w_judge": 1, "judge_rubric": "mqm"}, "gives no verdict for 'mqm'"),
        ({"w_judge": 1, "judge_rubric": "typo"}, "no answer of the task 'typo' .*no task 'typo'"),
        ({"w_judge": 1, "judge_variables": {"candidate": "mt"}}, "'translation_filter' .*variab"),
        ({"w_omission": 1, "judge_model_name": "gpt"}, "runs 'fake-judge', but reward.judge_model"),
        ({"w_judge": 1, "urls": {"judge": "no.module:Judge"}}, "a judge requires a URL"),
        (
            {"w_judge": 1, "urls": {"judge": "http://127.0.0.1:9"}, "deadline_s": RETRIED_S},
            "cannot be reached",
        ),
    ],
)
def test_the_judge_is_checked_first(judge: Judge, changes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardClient(RewardConfig(**(OFF | {"urls": {"judge": judge[1]}} | changes)))


def test_a_service_that_is_no_such_judge_is_refused(metrics: Services) -> None:
    wrong = {"judge": metrics.urls["xcomet_urls"]}
    with pytest.raises(UserError, match="is a xcomet service"):
        RewardClient(RewardConfig(**OFF, w_omission=1, urls=wrong))
    for settings, message in (
        ({"lower": False}, "higher_is_better=True"),
        ({"has_mqm": False}, "mqm"),
    ):
        with judge_service(**settings) as (_, url), pytest.raises(UserError, match=message):
            RewardClient(RewardConfig(**OFF, w_omission=1, urls={"judge": url}))


def test_a_judge_without_weight_is_never_asked(judge: Judge, metrics: Services) -> None:
    with closing(RewardClient(metrics.config(urls={"judge": judge[1]}))) as rewarder:
        assert rewarder.available == ("metricx", "xcomet")
        rewarder.score([("Open.", "열기", "en", "ko")], rewarder.available)
    assert judge[0].asked == []


def test_chrf_is_that_of_sacrebleu() -> None:
    (reward,) = rewards(RewardConfig(**OFF, w_chrf=0.1), ("Open.", "문 열기"), ref="창문 열기")
    assert reward.r_seq == pytest.approx(
        0.1 * sacrebleu.sentence_chrf("문 열기", ["창문 열기"]).score
    )
    assert 0 < reward.r_seq < 10


def config_file(folder: Path, urls: dict[str, Any], refs: bool = True, **reward: Any) -> Path:
    """Write the config of one update over eight rows."""
    policy = save_policy(folder / "policy", byte_level_tokenizer(), seed=1)
    data = folder / "data.jsonl"
    rows = [
        {"src_text": f"[Save] {n}.", "src_lang": "English", "tgt_lang": "Korean"} for n in range(8)
    ]
    for row in rows if refs else rows[1:]:
        row["ref_text"] = "저장"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = folder / "run.yaml"
    config.write_text(
        json.dumps(
            {
                "data": {"train": str(data), "eval": str(data)},
                "policy": {"path": str(policy)},
                "generation": {"prompt_template": "source", "max_new_tokens": 4},
                "reward": {**urls, **reward},
                "rl": {"num_updates": 1, "batch_size": 4, "warmup_updates": 0},
                "misc": {"device": "cpu", "threads": 1, "run_dir": str(folder / "run")},
            }
        )
    )
    return config


def test_the_terms_are_in_check_log_console_dump_and_report(
    judge: Judge, metrics: Services, tmp_path: Path
) -> None:
    weights = {"w_metricx": 0, "w_mqm_span": 0.5, "w_omission": 1, "w_judge": 2, "w_chrf": 0.1}
    urls = metrics.urls | {"urls": {"judge": judge[1]}}
    config = config_file(tmp_path, urls, **weights)
    checked = CliRunner().invoke(app, ["check", "--config", str(config)])
    assert checked.exit_code == 0, checked.output
    for component_text in (
        "mqm_spans 0.5",
        "omissions 1",
        "judge 2",
        "chrf_reward 0.1",
        "fake-judge",
    ):
        assert component_text in checked.output
    trained = CliRunner().invoke(app, ["train", "--config", str(config)], env={"COLUMNS": "300"})
    assert trained.exit_code == 0, trained.output
    (line,) = [json.loads(text) for text in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    (path,) = (tmp_path / "run/completions").glob("train-*.jsonl")
    dump = [json.loads(text) for text in path.open()]
    for key, value_of in (
        ("omissions_mean", lambda x: len(x["omissions"])),
        ("mqm_spans_mean", lambda x: len(x["mqm_spans"])),
        ("mqm_score_mean", lambda x: x["mqm_score"]),
        ("judge_score_mean", lambda x: x["judge_score"]),
        ("chrf_reward_mean", lambda x: x["chrf"]),
    ):
        values = [value_of(x) for x in dump if x["error"] is None]
        assert values and line[key] == pytest.approx(sum(values) / len(values)), key
    assert line["omissions_mean"] == 1 and line["omission_penalty_mean"] == -5
    assert line["mqm_coverage"] == line["judge_coverage"] == 1
    assert all(x["token_rewards"][-1] <= -5 for x in dump)
    assert dump[0]["judge_verdict"] == {"pass": True, "reason_code": "ok", "notes": ""}
    for column in ("omit", "mqm_sp", "judge", "chrf"):
        assert column in trained.stderr
    assert "omissions 1.000" in trained.stderr  # of the evaluation
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    for title in ("omissions a segment", "MQM errors a segment", "judge&#39;s score"):
        assert title in page, title
    assert "chrF (a reward)" in page and "chrF (never a reward)" not in page
    assert "BLEU (never a reward)" in page


def test_a_row_without_a_reference_is_told_before_training(
    metrics: Services, tmp_path: Path
) -> None:
    config = config_file(tmp_path, metrics.urls, refs=False, w_chrf=1)
    for command in ("check", "train", "evaluate"):
        result = CliRunner().invoke(app, [command, "--config", str(config)])
        assert result.exit_code == 2 and "1 of 8 rows have no ref_text" in result.output.replace(
            "\n", " "
        ), (command, result.output)
        assert "data.jsonl line 1" in result.output.replace("\n", " ")
    assert not list(tmp_path.glob("run/log.jsonl"))


class WithoutSpans(FakeBackend):
    """A scorer that marks no spans in translations, as COMET-22 and CometKiwi do."""

    def _outcome(self, sample: TranslationSample) -> Any:
        return {"score": super()._outcome(sample)["score"]}


def test_a_model_that_marks_no_spans_is_told_before_training(
    metrics: Services, tmp_path: Path
) -> None:
    with running_service(WithoutSpans("xcomet")) as url:
        urls = metrics.urls | {"xcomet_urls": url}
        config = config_file(tmp_path, urls)
        for command in ("check", "train"):
            result = CliRunner().invoke(
                app, [command, "--config", str(config)], env={"COLUMNS": "300"}
            )
            message = (
                "reward.xcomet_urls: the model there marks no error spans. Set reward.w_xcomet_s"
            )
            assert result.exit_code == 2 and message in result.output, (command, result.output)
        assert not list(tmp_path.glob("run/log.jsonl"))
        for command, weight in (("train", 0), ("evaluate", 1)):  # both commands accept the model
            weighed = [
                "--set",
                f"reward.w_xcomet_span={weight}",
                "--set",
                f"misc.run_dir={tmp_path}/{command}",
            ]
            done = CliRunner().invoke(app, [command, "--config", str(config), *weighed])
            assert done.exit_code == 0, (command, done.output)


def test_runs_without_these_terms_show_nothing_of_them(
    metrics: Services, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_URL", judge[1])
    config = config_file(tmp_path, metrics.urls)
    trained = CliRunner().invoke(app, ["train", "--config", str(config)])
    assert trained.exit_code == 0, trained.output
    (line,) = [json.loads(text) for text in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert not [key for key in line if "mqm" in key or "omission" in key or "judge" in key]
    assert "omit" not in trained.stderr and "judge" not in trained.output
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "omissions" not in page.split("<pre")[0] and judge[0].asked == []
    assert "chrF (never a reward)" in page
