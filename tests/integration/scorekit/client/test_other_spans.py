"""Check spans of another service: any word as severity, optional confidence and text.

A client, its cache, the pages and the trainer accept them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scorekit.client import SyncScoringClient
from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.report.render import OTHER_COLOUR, as_html, as_rich_text
from scorekit.schemas import ErrorSpan, Scored
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.trainer.rewards import rewards_of
from tests.kits.trainer.runs import byte_level_tokenizer, example, save_policy
from trainer.runs.stats import compare
from trainer.translation.config import TranslationConfig
from trainer.translation.evaluation.report import write_report
from trainer.translation.evaluation.stats import reward_stats, severity_counts, table
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.train import train_translation

SPANS = [
    {"start": 0, "end": 1, "severity": "minor"},
    {"start": 1, "end": 2, "severity": "Neutral", "confidence": 0.25},
    {"start": 2, "end": 3, "severity": "CRITICAL", "confidence": None, "text": None},
]


class OtherSpans(FakeBackend):
    """Mark the first characters of each translation with its own severities."""

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        return [
            {"score": 0.5, "error_spans": [s for s in SPANS if s["end"] <= len(sample.payload.mt)]}  # type: ignore[operator]
            for sample in batch
        ]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_service(OtherSpans("xcomet")) as url:
        yield url


def spans_of(url: str, **kwargs: Any) -> list[ErrorSpan]:
    with SyncScoringClient(url, **kwargs) as client:
        (result,) = client.score([{"src": "a", "mt": "빨간 집"}])
    assert isinstance(result, Scored) and result.error_spans is not None
    return result.error_spans


def test_a_client_and_its_cache_take_them(url: str, tmp_path: Path) -> None:
    first = spans_of(url, cache_db=tmp_path / "scores.sqlite")
    assert [span.severity for span in first] == ["MINOR", "NEUTRAL", "CRITICAL"]
    assert [span.confidence for span in first] == [None, 0.25, None]
    assert [span.text for span in first] == [None] * 3
    with SyncScoringClient(url, cache_db=tmp_path / "scores.sqlite") as client:
        (repeated,) = client.score([{"src": "a", "mt": "빨간 집"}])
    assert isinstance(repeated, Scored) and repeated.cached and repeated.error_spans == first


@pytest.mark.parametrize("severity", ["", "  ", "x" * 41, None, 1])
def test_a_severity_that_is_no_word_is_refused(severity: Any) -> None:
    with pytest.raises(ValueError, match="severity"):
        ErrorSpan.model_validate({"start": 0, "end": 1, "severity": severity})


def test_they_are_rendered_and_nothing_in_them_is_markup(url: str) -> None:
    html = as_html("빨간 집", spans_of(url))
    assert f'background:{OTHER_COLOUR};color:#1b1b1f" title="NEUTRAL 0.25">간</mark>' in html
    assert 'title="MINOR">빨</mark>' in html
    odd = ErrorSpan(start=0, end=1, severity='"><script>\x1b')
    assert "&quot;&gt;&lt;SCRIPT&gt;\u241b" in as_html("ab", [odd])
    assert as_rich_text("ab", [odd]).plain == "ab"


def reward_config(url: str, **changes: Any) -> RewardConfig:
    return RewardConfig(**({"xcomet_urls": url, "w_metricx": 0} | changes))


def test_every_word_has_a_weight_and_is_counted(url: str) -> None:
    cfg = reward_config(url, severity_weights={"unknown": -0.5})
    (reward,) = rewards_of(cfg, "빨간 집")
    assert reward.token_rewards == [-1.0, -0.5, -10.0, 0, 0]
    (sure,) = rewards_of(cfg.model_copy(update={"use_confidence": True}), "빨간 집")
    assert sure.token_rewards == [-1.0, -0.125, -10.0, 0, 0]
    stats = reward_stats([reward], cfg)
    names = ("MINOR", "MAJOR", "CRITICAL", "UNKNOWN")
    assert [stats[f"spans_{name}_mean"] for name in names] == [1, 0, 1, 1]
    with pytest.raises(UserError, match=r"'NEUTRAL'.*severity_weights\.UNKNOWN"):
        rewards_of(reward_config(url), "빨간 집")


def test_a_run_shows_them(url: str, tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", byte_level_tokenizer())
    settings = [
        f"policy.path={tmp_path}/policy",
        "generation.prompt_template=source",
        "reward.w_metricx=0",
        "generation.max_new_tokens=12",
        "rl.num_updates=1",
        "rl.batch_size=2",
        "misc.device=cpu",
        f"reward.xcomet_urls={url}",
        "reward.severity_weights={UNKNOWN: -0.5}",
        f"misc.run_dir={tmp_path}/out",
    ]
    examples = [example("Open it.", "a"), example("Save it.", "b")]
    artifacts = train_translation(
        examples, examples, load_config(TranslationConfig, None, settings)
    )
    (_, before), (_, after) = artifacts.reports
    assert after["spans_UNKNOWN_mean"] is not None and after["spans_UNKNOWN_mean"] > 0
    rows = {row.title: row.before for row in compare(table(), before.stats(), after.stats())}
    assert rows["· other"] == f"{before['spans_UNKNOWN_mean']:.2f}"
    assert [row.severity for row in severity_counts(before.examples)][3:] == ["NEUTRAL"]
    page = write_report(tmp_path / "out").read_text(encoding="utf-8")
    assert '<mark class="other" title="NEUTRAL 0.25">' in page
    dump = (tmp_path / "out/completions/eval-000000.jsonl").read_text(encoding="utf-8")
    spans = [span for line in dump.splitlines() for span in json.loads(line)["error_spans"]]
    assert {"MINOR", "NEUTRAL"} <= {span["severity"] for span in spans}


def test_a_severity_of_which_there_is_none_has_no_row() -> None:
    assert all(row.title != "· other" for row in compare(table(), {"spans_UNKNOWN_mean": 0.0}, {}))
