"""Metrics that evaluations show and no reward reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.kit.servers import free_port, running_service
from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend
from scorekit.server.scoring import ScoreDescription
from tests.kits.trainer.rewards import Recorder
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, write_examples
from trainer.runs.runlog import read_jsonl
from trainer.translation.check import check_run
from trainer.translation.config import TrainerConfig
from trainer.translation.data import load_held_out, load_train
from trainer.translation.evaluation.report import write_report
from trainer.translation.evaluation.run import run_evaluation
from trainer.translation.tables import evaluation_line
from trainer.translation.train import Artifacts, run_toy_rl


class Metric(Recorder):
    """Another model than the reward's, that reads references as `ref` says; its score falls with
    every evaluation of two samples."""

    def __init__(self, ref: Any) -> None:
        super().__init__("xcomet")
        self.ref, self.scored = ref, 0

    def load(self) -> ScoreDescription:
        description = super().load()
        description.model = "other"
        description.inputs = {"src": "required", "mt": "required", "ref": self.ref}
        return description

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for _ in batch:
            self.scored += 1
            outcomes.append({"score": 1 / (1 + self.scored), "error_spans": []})
        return outcomes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], str]]:
    """Settings of a run, and the URL of its reward's service."""
    folder = tmp_path_factory.mktemp("held-out")
    save_policy(folder / "policy", byte_level_tokenizer())
    train = write_examples(folder / "t.jsonl", [f"Open {n}." for n in range(4)])
    held_out = write_examples(folder / "e.jsonl", ["Save.", "Go."], ref="저장")
    with running_service(FakeBackend("metricx")) as url:
        yield (
            [
                f"policy.path={folder}/policy",
                f"data.train={train}",
                f"data.eval={held_out}",
                "generation.prompt_template=source",
                "generation.max_new_tokens=6",
                "generation.num_samples_per_prompt=2",
                f"reward.metricx_urls={url}",
                "reward.w_xcomet_span=0",
                "rl.num_updates=2",
                "rl.batch_size=2",
                "eval.eval_every_n_updates=1",
                "misc.device=cpu",
                "misc.threads=1",
                "reward.timeout_s=2",
            ],
            url,
        )


def trained(place: tuple[list[str], str], folder: Path, *overrides: str) -> Artifacts:
    cfg = load_config(TrainerConfig, None, [*place[0], f"misc.run_dir={folder}", *overrides])
    return run_toy_rl(load_train(cfg), load_held_out(cfg), cfg)


def said(place: tuple[list[str], str], folder: Path, *overrides: str) -> str:
    """What `check` says of the metrics."""
    cfg = load_config(TrainerConfig, None, [*place[0], f"misc.run_dir={folder}", *overrides])
    (found,) = [c.found for c in check_run(cfg).checks if c.name == "eval.metrics"]
    return found


def test_metrics_stand_beside_the_reward_and_leave_it_as_it_was(place, tmp_path) -> None:
    """One with references, one without, one that is down: the run is the same one."""
    alone = trained(place, tmp_path / "alone")
    reads, blind = Metric("required"), Metric("ignored")
    with running_service(reads) as a, running_service(blind) as b:
        metrics = [f"eval.metrics.{n}={u}" for n, u in (("reads", a), ("blind", b))]
        metrics.append(f"eval.metrics.away=http://127.0.0.1:{free_port()}")
        artifacts = trained(place, tmp_path / "run", *metrics, "misc.caching=false")
        evaluated = run_evaluation(
            load_config(
                TrainerConfig, None, [*place[0], *metrics, f"misc.run_dir={tmp_path}/evaluated"]
            ),
            load_held_out(load_config(TrainerConfig, None, place[0])),
        )
    for name in ("reward_mean", "r_seq_mean", "loss"):
        assert [u.get(name) for u in artifacts.updates] == [u.get(name) for u in alone.updates]
    evals = read_jsonl(tmp_path / "run" / "eval.jsonl")
    assert len(evals) == 3
    for line in evals:
        assert line["metric_reads_coverage"] == line["metric_blind_coverage"] == 1.0
        assert 0 < line["metric_reads_mean"] < 1 and line["metric_reads_better"] == "higher"
        assert line["metric_away_mean"] is None and line["metric_away_coverage"] == 0.0
    dumped = read_jsonl(tmp_path / "run" / evals[0]["completions"])
    scores = [line["metrics"]["reads"]["score"] for line in dumped]
    assert sum(scores) / len(scores) == pytest.approx(evals[0]["metric_reads_mean"])
    assert {sample.ref for sample in reads.samples if sample.mt} >= {"저장"}
    assert all(sample.ref is None for sample in blind.samples)
    told = evaluation_line(0, artifacts.reports[0][1])
    assert "metric_reads 0." in told and "metric_away - (of 0%)" in told
    page = write_report(tmp_path / "run").read_text()
    assert "reads (never a reward)" in page and "held-out blind" in page
    assert "other" in evaluated[0].evaluation.figures["metric_reads_model"]
    assert "reads (never a reward)" in evaluated[0].page.read_text()


def test_a_rising_reward_and_a_falling_metric_end_the_run(place, tmp_path, monkeypatch) -> None:
    """Told in the page and by the exit code; going on stops at once for the same reason."""
    from trainer.translation.evaluation.evaluate import Report

    # The policy of a test learns nothing: what counts here is what the loop does with a rise.
    ratings = iter(range(100))
    monkeypatch.setattr(Report, "rating", property(lambda report: float(next(ratings))))
    with running_service(Metric("optional")) as url:
        options = (f"eval.metrics.m={url}", "rl.num_updates=9", "stop.held_out_falls=2")
        artifacts = trained(place, tmp_path / "run", *options, "misc.caching=false")
    assert artifacts.exit_code == 1 and artifacts.stopped.startswith("update 2: ")
    assert artifacts.checkpoint is not None and len(artifacts.updates) == 2
    assert "got worse" in read_jsonl(tmp_path / "run" / "eval.jsonl")[-1]["stopped"]
    assert "got worse" in write_report(tmp_path / "run").read_text()


def test_a_reward_is_no_held_out_metric(place, tmp_path) -> None:
    same_url = f"eval.metrics.m={place[1]}/"
    assert "is a reward's" in said(place, tmp_path, same_url)
    with running_service(FakeBackend("metricx")) as replica:
        same_model = f"eval.metrics.m={replica}"
        assert "which is a reward's model" in said(place, tmp_path, same_model)
        for wrong in (same_url, same_model):
            with pytest.raises(UserError, match=r"eval\.metrics\.m: ") as refused:
                trained(place, tmp_path / "run", wrong)
            assert "\n" not in str(refused.value)


def test_missing_references_and_unknown_metrics_are_told_before_anything_loads(
    place, tmp_path
) -> None:
    bare = write_examples(tmp_path / "bare.jsonl", ["Save.", "Go."])
    with running_service(Metric("required")) as url:
        metric = f"eval.metrics.m={url}"
        assert said(place, tmp_path, metric) == "m: other, higher is better"
        message = said(place, tmp_path, metric, f"data.eval={bare}")
        assert "needs references, and 2 of 2 rows of data.eval have none" in message
        with pytest.raises(UserError, match="needs references, which no reward reads"):
            trained(place, tmp_path / "r", f"reward.xcomet_urls={url}", "reward.w_xcomet_seq=1")
    for wrong in ("stop.held_out_falls=2", "stop.held_out_metric=m"):
        with pytest.raises(UserError, match=r"no metric of eval\.metrics"):
            load_config(TrainerConfig, None, [*place[0], wrong])
    away = f"eval.metrics.m=http://127.0.0.1:{free_port()}"
    assert "does not answer" in said(place, tmp_path, away)
