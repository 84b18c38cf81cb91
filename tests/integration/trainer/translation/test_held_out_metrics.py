"""Test metrics that evaluations show and that no reward uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import SecretStr

from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend
from scorekit.server.score_endpoint import ScoreDescription
from scorekit.server.settings import Secrets
from testing.servers import free_port, running_service
from tests.kits.embedder import ToyEmbedder
from tests.kits.trainer.rewards import FakeJudge, OtherMetric, switched_service
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, write_examples
from trainer.runs.run_log import read_jsonl
from trainer.translation.check import check_run
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_held_out, load_train
from trainer.translation.evaluation.evaluate import evaluation_line
from trainer.translation.evaluation.held_out import HeldOutMetrics
from trainer.translation.evaluation.report import write_report
from trainer.translation.evaluation.run import run_evaluation
from trainer.translation.rewards.services import RewardClient
from trainer.translation.train import Artifacts, train_translation

#: These tests look at the charts (tests/integration/trainer/conftest.py).
DRAWS_CHARTS = ("test_metrics_stand_beside_the_reward_and_leave_it_as_it_was",)


class FallingScorer(OtherMetric):
    """A scorer whose score falls with every sample."""

    scored = 0

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for _ in batch:
            self.scored += 1
            outcomes.append({"score": 1 / (1 + self.scored), "error_spans": []})
        return outcomes


@pytest.fixture(scope="module")
def run_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], str]]:
    """Yield the settings of a run, and the URL of its reward service."""
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


def config(run_settings: tuple[list[str], str], folder: Path, *overrides: str) -> TranslationConfig:
    return load_config(
        TranslationConfig, None, [*run_settings[0], f"misc.run_dir={folder}", *overrides]
    )


def trained(
    run_settings: tuple[list[str], str], folder: Path, *overrides: str, resume: bool = False
) -> Artifacts:
    cfg = config(run_settings, folder, *overrides)
    return train_translation(load_train(cfg), load_held_out(cfg), cfg, resume=resume)


def check_message(run_settings: tuple[list[str], str], folder: Path, *overrides: str) -> str:
    """Return the message of `check` about the metrics."""
    cfg = config(run_settings, folder, *overrides)
    (message,) = [c.result for c in check_run(cfg).checks if c.name == "eval.metrics"]
    return message


def test_metrics_stand_beside_the_reward_and_leave_it_as_it_was(
    run_settings, tmp_path, no_second_try
) -> None:
    """Check that metrics do not change the run.

    One has references, one has none, one is down, and one fails in an evaluation."""
    alone = trained(run_settings, tmp_path / "alone")
    reference_metric, blind = (
        OtherMetric("required"),
        OtherMetric("ignored", model="blind", higher=False),
    )
    with (
        running_service(reference_metric) as a,
        running_service(blind) as b,
        switched_service("xcomet") as (switch, c),
    ):
        bodies: list[str] = []
        switch.down = lambda body: bodies.append(body) or len(bodies) == 2  # type: ignore[func-returns-value]
        away = f"http://127.0.0.1:{free_port()}"
        named = {"reads": a, "blind": b, "comes": c, "away": away}
        metrics = [f"eval.metrics.{name}={url}" for name, url in named.items()]
        artifacts = trained(run_settings, tmp_path / "run", *metrics, "misc.caching=false")
        cfg = config(run_settings, tmp_path / "evaluated", *metrics)
        evaluated = run_evaluation(cfg, load_held_out(cfg))
    for name in ("reward_mean", "r_seq_mean", "loss"):
        assert [u.get(name) for u in artifacts.updates] == [u.get(name) for u in alone.updates]
    evals = read_jsonl(tmp_path / "run" / "eval.jsonl")
    assert len(evals) == 3
    for line in evals:
        assert line["metric_reads_coverage"] == line["metric_blind_coverage"] == 1.0
        assert 0 < line["metric_reads_mean"] < 1 and line["metric_reads_better"] == "higher"
        assert line["metric_blind_better"] == "lower"
        assert line["metric_away_mean"] is None and line["metric_away_coverage"] == 0.0
    assert [line["metric_comes_coverage"] for line in evals] == [1.0, 0.0, 1.0]
    assert evals[1]["metric_comes_mean"] is None and evals[2]["metric_comes_mean"] is not None
    dumped = read_jsonl(tmp_path / "run" / evals[0]["completions"])
    scores = [line["metrics"]["reads"]["score"] for line in dumped]
    assert sum(scores) / len(scores) == pytest.approx(evals[0]["metric_reads_mean"])
    assert {sample.ref for sample in reference_metric.samples if sample.mt} >= {"저장"}
    assert all(sample.ref is None for sample in blind.samples)
    eval_line = evaluation_line(0, artifacts.reports[0][1])
    assert "metric_reads 0." in eval_line and "metric_away - (of 0%)" in eval_line
    page = write_report(tmp_path / "run").read_text()
    assert "reads (never a reward)" in page and "held-out blind" in page
    assert "comes after update 1 (0%)" in page
    assert "other" in evaluated[0].evaluation.stats["metric_reads_model"]
    assert "reads (never a reward)" in evaluated[0].page.read_text()


def test_a_rising_reward_and_a_falling_metric_end_the_run(
    run_settings, tmp_path, monkeypatch
) -> None:
    """Check the page and the exit code.

    A resumed run stops at once for the same reason, and continues if the rule is changed."""
    from trainer.translation.evaluation.evaluate import Report

    # The test policy does not learn: this checks how the loop handles a rising reward.
    ratings = iter(range(1000))
    monkeypatch.setattr(Report, "rating", property(lambda report: float(next(ratings))))
    run = tmp_path / "run"
    menus = write_examples(tmp_path / "menus.jsonl", ["Open."], ref="열기")
    with running_service(FallingScorer()) as url:
        sets = (f"data.eval_sets.menus={menus}", "eval.best_by=eval")
        options = (*sets, f"eval.metrics.m={url}", "rl.num_updates=4", "misc.caching=false")
        artifacts = trained(run_settings, run, *options, "stop.held_out_falls=2")
        assert artifacts.exit_code == 1 and artifacts.stopped is not None
        assert artifacts.stopped.startswith("update 2: ") and len(artifacts.updates) == 2
        assert artifacts.checkpoint is not None
        lines = read_jsonl(run / "eval.jsonl")
        assert [line["set"] for line in lines if "got worse" in line.get("stopped", "")] == ["eval"]
        assert "got worse" in write_report(run).read_text()

        resumed = trained(run_settings, run, *options, "stop.held_out_falls=2", resume=True)
        assert (resumed.exit_code, resumed.stopped) == (1, artifacts.stopped)
        assert len(read_jsonl(run / "eval.jsonl")) == len(lines)
        further = trained(run_settings, run, *options, "stop.held_out_falls=3", resume=True)
        assert further.stopped is not None and further.stopped.startswith("update 3: in 3 ")
        without_rule = trained(run_settings, run, *options, resume=True)
    assert (without_rule.exit_code, without_rule.stopped, len(without_rule.updates)) == (0, None, 4)


def start_messages(run_settings: tuple[list[str], str], **metrics: str) -> list[str]:
    """Return the descriptions of the metrics at the start of a run."""
    cfg = config(
        run_settings, Path("run"), *(f"eval.metrics.{name}={u}" for name, u in metrics.items())
    )
    with closing(RewardClient(cfg.reward)) as rewarder:
        return HeldOutMetrics(cfg.eval.metrics, rewarder).check(load_held_out(cfg))


class CopiedModel(OtherMetric):
    """A copy of a model folder: its revision is the digest of the same files."""

    def __init__(self, service: str, model: str, digest: str = "0123456789abcdef" * 2) -> None:
        super().__init__(model=model, higher=service != "metricx")
        self.service, self.digest = service, digest

    def load(self) -> ScoreDescription:
        description = super().load()
        description.revision = self.digest
        return description


def test_a_reward_is_no_held_out_metric(run_settings, tmp_path) -> None:
    """Check a reward's URL, its model behind another URL, and the digest of a copy."""
    message = check_message(run_settings, tmp_path, f"eval.metrics.m={run_settings[1]}/")
    assert message.startswith("eval.metrics.m: ") and "is a reward's" in message
    with running_service(FakeBackend("metricx")) as replica, running_service(OtherMetric()) as free:
        for urls, message_part in (
            (f"{run_settings[1]}/", "is a reward's. A held-out"),
            (f"{free},{run_settings[1]}", "is a reward's. A held-out"),
            (replica, "which is a reward's model"),
            (f"{free},{replica}", "scores of one run must be of one model"),
            (f"{replica},{free}", "scores of one run must be of one model"),
        ):
            with pytest.raises(
                UserError, match=rf"^eval\.metrics\.m: .*{message_part}"
            ) as error_info:
                start_messages(run_settings, n=free, m=urls)
            assert "\n" not in str(error_info.value)
        with pytest.raises(UserError, match="which is a reward's model"):
            trained(run_settings, tmp_path / "run", f"eval.metrics.m={replica}")
        assert start_messages(run_settings, n=free, m=f"{free}/") == [
            f"{name}: other, higher is better" for name in "nm"
        ]
    with (
        running_service(CopiedModel("metricx", "a")) as reward,
        running_service(CopiedModel("xcomet", "b")) as copy,
        running_service(CopiedModel("xcomet", "a", "f" * 32)) as later,
    ):
        with_it = ([*run_settings[0], f"reward.metricx_urls={reward}"], reward)
        with pytest.raises(UserError, match=r"runs b .* which is a reward's model"):
            start_messages(with_it, m=copy)
        assert start_messages(with_it, m=later) == ["m: a, higher is better"]  # another revision


def test_what_is_no_metric_is_refused_at_the_start_and_left_out_later(run_settings) -> None:
    """Check another service, a wrong path, a missing key, and no URL: a retry helps none of
    them."""
    locked = Secrets(api_keys=SecretStr("right"))
    with (
        running_service(OtherMetric(), locked) as closed,
        running_service(ToyEmbedder()) as embeds,
        running_service(FakeJudge()) as judge,
    ):
        for url, message in (
            (judge, "a judge does not score translations"),
            (embeds, "not a scoring service"),
            (f"{run_settings[1]}/page", "not_found"),
            (closed, "no key was sent"),
            ("services.xcomet.model:XCometXLScorer", "is not the URL of a service"),
        ):
            with pytest.raises(UserError, match=rf"^eval\.metrics\.m: .*{message}"):
                start_messages(run_settings, m=url)
        cfg = config(run_settings, Path("run"), f"eval.metrics.m={closed}")
        with closing(RewardClient(cfg.reward)) as rewarder:
            metrics = HeldOutMetrics(cfg.eval.metrics, rewarder)
            assert metrics.score([("Save.", "저장", None)]) == {"m": ([None], None)}
    with pytest.raises(UserError, match=r"eval\.metrics\.m"):
        config(run_settings, Path("run"), "eval.metrics.m=")


def test_two_policies_are_compared_by_a_held_out_metric(run_settings, tmp_path) -> None:
    """Check its direction and interval; there is no result if its model changed in between."""
    other = save_policy(tmp_path / "other", byte_level_tokenizer(), seed=3, initializer_range=0.5)
    sources = write_examples(tmp_path / "e.jsonl", [f"Save {n}." for n in range(10)], ref="저장")
    metric = OtherMetric(higher=False)
    with running_service(metric) as url:
        overrides = (f"data.eval={sources}", f"eval.metrics.m={url}", f"policy.path={other}")
        cfg = config(run_settings, tmp_path / "new", *overrides)
        (first,) = run_evaluation(cfg, load_held_out(cfg), str(run_settings[0][0].split("=")[1]))
    assert first.groups is not None and first.comparison is not None
    (row,) = [row for row in first.groups["all"] if row.key == "metric_m_mean"]
    values = [[line["metrics"]["m"]["score"] for line in read_jsonl(tmp_path / "new" / folder)]
              for folder in ("against/evaluation.jsonl", "evaluation.jsonl")]  # fmt: skip
    assert row.first == pytest.approx(sum(values[0]) / 10) and row.sources == 10
    assert row.second == pytest.approx(sum(values[1]) / 10) and row.first != row.second
    assert row.higher_is_better is False and row.low is not None
    assert "m (never a reward)" in first.comparison.read_text(encoding="utf-8")
    with running_service(OtherMetric(model="new")) as url:
        cfg = config(run_settings, tmp_path / "again", *overrides, f"eval.metrics.m={url}")
        with pytest.raises(UserError, match=r"eval\.metrics\.m .*cannot be compared"):
            run_evaluation(cfg, load_held_out(cfg), str(tmp_path / "new"))


def test_missing_references_and_unknown_metrics_are_told_before_anything_loads(
    run_settings, tmp_path
) -> None:
    bare = write_examples(tmp_path / "bare.jsonl", ["Save.", "Go."])
    with running_service(OtherMetric("required")) as url:
        metric = f"eval.metrics.m={url}"
        assert check_message(run_settings, tmp_path, metric) == "m: other, higher is better"
        message = check_message(run_settings, tmp_path, metric, f"data.eval={bare}")
        assert "needs references, and 2 of 2 rows of data.eval have none" in message
        with pytest.raises(UserError, match="needs references, which no reward provides"):
            trained(
                run_settings, tmp_path / "r", f"reward.xcomet_urls={url}", "reward.w_xcomet_seq=1"
            )
    for wrong in ("stop.held_out_falls=2", "stop.held_out_metric=m"):
        with pytest.raises(UserError, match=r"no metric of eval\.metrics"):
            load_config(TranslationConfig, None, [*run_settings[0], wrong])
    away = f"eval.metrics.m=http://127.0.0.1:{free_port()}"
    assert "does not answer" in check_message(run_settings, tmp_path, away)
