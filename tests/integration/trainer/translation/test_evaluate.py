"""Check that a policy always gets the same stats, and that evaluation does not affect training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.trainer.runs import (
    byte_level_tokenizer,
    example,
    letter_tokenizer,
    rollout,
    save_policy,
    tiny_llama,
)
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import read_jsonl
from trainer.runs.stats import compare
from trainer.translation.config import GenerationConfig, TranslationConfig
from trainer.translation.data import Example
from trainer.translation.evaluation.evaluate import _stats, evaluate_on_dataset
from trainer.translation.evaluation.run import run_evaluation
from trainer.translation.evaluation.stats import table
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.services import RewardClient


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XCOMET_URL", raising=False)


def only_metricx(url: str) -> RewardConfig:
    return RewardConfig(metricx_urls=[url], w_xcomet_span=0)


def test_an_evaluation_by_sampling_is_the_same_twice() -> None:
    """Check that the random state and the model's mode are unchanged."""
    tokenizer = letter_tokenizer()
    model = tiny_llama(tokenizer).train()
    generation = GenerationConfig(
        prompt_template="source", max_new_tokens=6, temperature=1.0, num_samples_per_prompt=1
    )
    examples = [example("ab", str(n)) for n in range(8)]
    texts = []
    with (
        running_service(FakeBackend("metricx")) as url,
        closing(RewardClient(only_metricx(url))) as rewarder,
    ):
        cfg = rewarder.cfg
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = torch.rand(1)
            torch.manual_seed(seed)
            report = evaluate_on_dataset(examples, model, tokenizer, generation, rewarder, cfg)
            assert torch.equal(torch.rand(1), expected)
            texts.append([line["mt"] for line in report.examples])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert model.training
    assert report["metricx_coverage"] == 1.0
    assert report["xcomet_coverage"] is None and report["xcomet_truncated_frac"] is None


def test_the_reward_stands_beside_its_coverage() -> None:
    """Check the reward that selects the best checkpoint."""
    tokenizer = letter_tokenizer("anxy")
    model = tiny_llama(tokenizer)
    generation = GenerationConfig(
        prompt_template="source", max_new_tokens=40, temperature=1.0, num_samples_per_prompt=1
    )
    examples = [example("ax", str(n)) for n in range(24)]
    with (
        running_service(FakeBackend("metricx")) as url,
        closing(RewardClient(only_metricx(url))) as rewarder,
    ):
        report = evaluate_on_dataset(examples, model, tokenizer, generation, rewarder, rewarder.cfg)
    scored = [line["metricx_score"] for line in report.examples if "nan" not in line["mt"]]
    assert 0 < len(scored) < 24  # the service fails on `nan`
    assert report.reward_mean == pytest.approx(sum(5 - score for score in scored) / len(scored))
    assert report.reward_coverage == report["metricx_coverage"] == len(scored) / 24
    rows = {row.title: row.before for row in compare(table(), report.stats(), {})}
    assert rows["reward coverage"] == f"{len(scored) / 24:.3f}"


def test_the_reward_of_an_evaluation_is_the_mean_token_s_whatever_the_length() -> None:
    """Check that a long text with errors is no worse than a short one with the same errors."""
    for tokens in (2, 20):
        reward = SampleReward(1.0, [-5.0, 0.0] * (tokens // 2), [True] * tokens)
        done = rollout([1], [2] * tokens, "x", pair="en-US>ko-KR")
        stats = _stats([example("a")], [done], [reward], RewardConfig())
        assert stats["reward_mean"] == pytest.approx(1.0 - 2.5)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save two policies that differ."""
    folder = tmp_path_factory.mktemp("policies")
    return [save_policy(folder / str(seed), byte_level_tokenizer(), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, list[str]]]:
    with (
        running_service(FakeBackend("metricx")) as metricx,
        running_service(FakeBackend("xcomet")) as xcomet,
    ):
        yield {"metricx_urls": [metricx], "xcomet_urls": [xcomet]}


def config(policy: Path, folder: Path, services: dict[str, list[str]]) -> TranslationConfig:
    return TranslationConfig.model_validate(
        {
            "policy": {"path": str(policy)},
            "generation": {"prompt_template": "source", "max_new_tokens": 6},
            "reward": {**services, "guards": {"shown": True}},
            "misc": {"device": "cpu", "run_dir": str(folder)},
        }
    )


SOURCES = [
    *(example(f"Save <{n}>.", str(n), "저장") for n in range(12)),
    *(
        Example(f"d{n}", f"Open {n}.", "English", "German", "en-US", "de-DE", "Datei öffnen")
        for n in range(11)
    ),
]


def test_two_policies_stand_side_by_side(
    policies: list[Path], services: dict[str, list[str]], tmp_path: Path
) -> None:
    """Check stats as JSON and as pages, for all sources and for each language pair.

    An earlier evaluation is used unchanged."""
    cfg = config(policies[0], tmp_path / "a", services)
    (compared,) = run_evaluation(cfg, {DEFAULT_EVAL_SET: SOURCES}, str(policies[1]))
    assert compared.groups is not None and set(compared.groups) == {
        "all",
        "en-US>ko-KR",
        "en-US>de-DE",
    }
    folder = tmp_path / "a"
    stats = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert stats["samples"] == 23 and stats["bleu"] is None
    assert [stats["pairs"][pair]["samples"] for pair in stats["pairs"]] == [12, 11]
    assert stats["pairs"]["en-US>de-DE"]["bleu_tokenize"] == "13a"
    lines = read_jsonl(folder / "evaluation.jsonl")
    spans = sum(len(line["error_spans"] or []) for line in lines)
    assert sum(row["spans"] for row in stats["severities"]) == spans > 0
    written = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    assert written["first"] == str(policies[1]) and written["second"] == str(policies[0])
    by_key = {row["key"]: row for row in written["groups"]["all"]}
    second_lines = read_jsonl(folder / "against/evaluation.jsonl")
    both = [
        (a["metricx_score"], b["metricx_score"]) for a, b in zip(second_lines, lines, strict=True)
    ]
    differences = [b - a for a, b in both if None not in (a, b)]
    row = by_key["metricx_score_mean"]
    assert row["sources"] == len(differences) and row["left_out"] == 23 - len(differences)
    assert row["difference"] == pytest.approx(sum(differences) / len(differences))
    assert row["low"] <= row["difference"] <= row["high"]
    assert by_key["guard_copy_mean"]["sources"] == 23
    assert by_key["guard_copy_mean"]["second"] == pytest.approx(stats["guard_copy_mean"])
    assert "<td>guard: copy</td>" in (folder / "evaluation.html").read_text(encoding="utf-8")
    pages = [
        (folder / name).read_text(encoding="utf-8")
        for name in ("evaluation.html", "comparison.html", "against/evaluation.html")
    ]
    assert all("<mark class=" in page and "Save &lt;3&gt;." in page for page in pages[:2])
    assert all("Save <3>" not in page and "<script" not in page for page in pages)

    earlier = config(policies[1], tmp_path / "b", services)
    (repeated,) = run_evaluation(earlier, {DEFAULT_EVAL_SET: SOURCES}, str(folder))
    assert (
        repeated.groups is not None
        and repeated.earlier is not None
        and repeated.earlier.examples == lines
    )
    assert not (tmp_path / "b/against").exists()
    turned = {stat.key: stat for stat in repeated.groups["all"]}
    assert turned["metricx_score_mean"].difference == pytest.approx(-row["difference"])


def test_an_evaluation_that_cannot_be_compared_is_told_before_weights_load(
    policies: list[Path], services: dict[str, list[str]], tmp_path: Path
) -> None:
    run_evaluation(config(policies[0], tmp_path / "a", services), {DEFAULT_EVAL_SET: SOURCES[:2]})
    cfg = config(tmp_path / "gone", tmp_path / "b", services)
    with pytest.raises(UserError, match="that are not these 3 in this order"):
        run_evaluation(cfg, {DEFAULT_EVAL_SET: SOURCES[:3]}, str(tmp_path / "a"))
    with pytest.raises(UserError, match=r"neither evaluation.jsonl .* nor config.json"):
        run_evaluation(cfg, {DEFAULT_EVAL_SET: SOURCES[:2]}, str(tmp_path))
    written = tmp_path / "a/evaluation.json"
    stats = json.loads(written.read_text(encoding="utf-8"))
    stats["scored_by"]["metricx"] = "another"
    written.write_text(json.dumps(stats), encoding="utf-8")
    with pytest.raises(UserError, match="scored by the metricx model 'another'"):
        run_evaluation(cfg, {DEFAULT_EVAL_SET: SOURCES[:2]}, str(tmp_path / "a"))
