"""Run configs/search/rounds.yaml over planted cases: condemned cases reach no SFT row.

The curation commands are the real ones, with real servers. Episodes of a policy that reads text are
written beforehand and replace the trainings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure
from typer.testing import CliRunner

from scorekit.config import load_config
from scorekit.report.page import chart_image
from testing.openai_server import FakeOpenAI
from tests.kits.trainer.searching.cold import READING, save_model, text_episode, text_run
from tests.kits.trainer.searching.curated import decisions_of, kept_rows, make_question, write_rows
from tests.kits.trainer.searching.episodes import COMPLETE, search
from tests.kits.trainer.searching.finished import page, sha256_of
from tests.kits.trainer.searching.verifying import SAID, VerifyServers, verifying
from trainer.search.cli import app
from trainer.search.records import Question, Trajectory
from trainer.search.rounds.config import RoundsConfig
from trainer.search.rounds.loop import run_loop
from trainer.search.rounds.steps import StepRecord, Steps

ROOT = Path(__file__).parents[5]
#: Kind -> (what verifier and generator answer, the pages that the right episode sees).
KINDS: Mapping[str, tuple[tuple[str, str], Sequence[str]]] = {
    "wrong": (("15", "15"), ["deck_1"]),
    "late": (("15", "15"), ["deck_9", "deck_8", "deck_7", "deck_1"]),
    "lucky": (("12", "12"), ["deck_9"]),
    "good": (("12", "12"), ["deck_1"]),
    "unsent": (("12", "12"), [*(f"deck_{n}" for n in range(2, 10)), "deck_1"]),
}
#: At most so many images are sent to the generator.
SENT = 8


@pytest.fixture(scope="module")
def servers() -> Iterator[VerifyServers]:
    with verifying() as running:
        yield running


def questions(count: int) -> list[Question]:
    return [
        make_question(
            f"{kind}-{n}", 1, question=f"What is {kind}-{n}, exactly?", reference_answer="12"
        )
        for kind in KINDS
        for n in range(min(count, 10) if kind == "unsent" else count)
    ]


def episodes(question: Question, step: int) -> list[Trajectory]:
    """Return four episodes, one of which is judged right."""
    page_ids = KINDS[question.id.partition("-")[0]][1]
    ndcg = 0.0 if "deck_1" not in page_ids else 1 / (1 + page_ids.index("deck_1"))
    texts = [search(f"{question.id} {step} {n}") for n in range(len(page_ids))]
    trajectories = [
        text_episode(
            question,
            *(*texts, COMPLETE),
            sample=n,
            judge=float(not n),
            reward=float(not n),
            ndcg=ndcg,
            answer="12",
        )
        for n in range(4)
    ]
    for trajectory in trajectories:
        for turn, page_id in zip(trajectory.turns, page_ids, strict=False):
            turn.views = [page(page_id)]
        if trajectory.answer is not None:
            trajectory.answer.evidence = [sha256_of(page_id) for page_id in page_ids[:SENT]]
    return trajectories


def in_process(model: Path, runs: Mapping[str, Path]) -> Callable[..., int]:
    """Run a step's process in this process.

    runs: the training's output by round.
    """

    def run(
        steps: Steps, name: str, record: StepRecord, command: Sequence[str], env: object
    ) -> int:
        if "search" in command:
            result = CliRunner().invoke(app, list(command[command.index("search") + 1 :]))
            assert result.exit_code == 0, result.output
        elif "export" in command:
            shutil.copytree(model, command[command.index("--to") + 1])
        elif name == "train":
            shutil.copytree(runs[steps.folder.name], steps.folder / "train")
        else:
            (steps.folder / name).mkdir()
        return 0

    return run


@pytest.fixture(autouse=True)
def charts_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay out each chart once: the rounds draw all of theirs anew after each of their steps.

    All are drawn, but without texts that are measured, and without SVG.
    """
    titles: set[str] = set()
    plain_axes = Figure().subplots()

    def chart(title: str, label: str, fill: Callable[[Any], int]) -> Any:
        if title in titles:
            plain_axes.clear()
            fill(plain_axes)
            return None
        image = chart_image(title, label, fill)
        titles.update([title] if image else [])
        return image

    for module in ("trainer.search.rounds.page", "scorekit.report.page"):  # of the steps
        monkeypatch.setattr(f"{module}.chart_image", chart)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("verified_first", "count"),
    [
        pytest.param(True, 2, id="as it is"),
        pytest.param(True, 30, id="as it is, 30 of a kind", marks=pytest.mark.slow),
        pytest.param(False, 30, id="verified late, 30 of a kind", marks=pytest.mark.slow),
    ],
)
def test_what_the_rounds_condemn_reaches_no_row(
    verified_first: bool,
    count: int,
    tmp_path: Path,
    servers: VerifyServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the rows. verified late: without `verify` in phases 1 and 2, the default rule chooses.

    count: questions of each kind; of those whose gold page was not sent, at most 10."""
    question_rows = questions(count)
    for question_row in question_rows:
        monkeypatch.setitem(SAID, question_row.id, KINDS[question_row.id.partition("-")[0]][0])
    model = save_model(tmp_path / "model", READING)
    data = write_rows(tmp_path / "questions.jsonl", question_rows)
    runs = {}
    for name, judge in (("01-phase1", None), ("02-phase2", 0.0)):
        played = [
            text_episode(question_row, COMPLETE, judge=judge, ndcg=0.3, reward=0.0).model_copy(
                update={"trajectory_id": f"{name}-{question_row.id}"}
            )
            for question_row in question_rows
        ]
        runs[name] = text_run(tmp_path / "runs" / name, played, *question_rows)
    for step, name in ((1, "03-round1"), (2, "04-round2")):
        played = [
            trajectory.model_copy(update={"trajectory_id": f"{name}-{trajectory.trajectory_id}"})
            for question_row in question_rows
            for trajectory in episodes(question_row, step)
        ]
        runs[name] = text_run(tmp_path / "runs" / name, played, *question_rows)
    runs["05-round3"] = runs["01-phase1"]
    for folder in runs.values():
        raw_config = load(folder / "config.yaml") | {"policy": {"path": str(model)}}
        raw_config["data"] = {"train": str(data)}
        (folder / "config.yaml").write_text(json.dumps(raw_config))
    fake = FakeOpenAI("rewriter", respond=rephrased)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Steps, "_run", in_process(model, runs))
    with fake.running() as url:
        settings = [
            *(flag for flag in servers.flags if flag != "--set"),
            "rewrite.rewriter.model=rewriter",
            f"rewrite.rewriter.base_url={url}",
        ]
        settings = [setting for setting in settings if not setting.startswith("verify.prompts")]
        overrides = [f"train.policy.path={model}", f"train.data.train={data}"]
        for setting in settings:
            section = "curation" if setting.split(".")[0] in ("verify", "rewrite") else "train"
            overrides.append(f"{section}.{setting}")
        overrides.append("train.answering.generator.api=vllm")
        overrides.append("train.answering.judge.model=null")
        cfg = load_config(RoundsConfig, ROOT / "configs/search/rounds.yaml", overrides)
        if not verified_first:
            for phase in cfg.rounds[:2]:
                phase.then.remove("verify")
        assert run_loop(cfg, tmp_path / "out") is None
    out = tmp_path / "out"
    rows = kept_rows(out / "04-round2/rewrite")
    assert {row["question_id"].partition("-")[0] for row in rows} == {"good"}
    assert len({row["question_id"] for row in rows}) == count
    sft_data = load(out / "04-round2/sft.yaml")["data"]
    assert sft_data["train"] == str(out / "04-round2/rewrite/rows.jsonl")
    assert sft_data["record"] == str(out / "04-round2/verify/record.jsonl")
    diagnosed = decisions_of(out / "04-round2/diagnose")
    unsent_ids = [row.id for row in question_rows if row.id.startswith("unsent")]
    assert [id for id, row in diagnosed.items() if row["reason"] == "not_sent"] == unsent_ids
    assert [id for id, row in diagnosed.items() if "not_sent" in row["causes"]] == unsent_ids
    bucket_a = [row["id"] for row in kept_rows(out / "01-phase1/focus")]
    assert load(out / "02-phase2/train.yaml")["data"]["train"] == str(
        out / "01-phase1/focus/rows.jsonl"
    )
    hard_a = decisions_of(out / "02-phase2/focus")
    assert [id for id, row in hard_a.items() if row["kept"]] == bucket_a
    assert {row["bucket"] for row in hard_a.values()} == {"A"}, "phase 1's"
    second, third = (load(out / name / "train.yaml") for name in ("04-round2", "05-round3"))
    assert second["policy"]["path"] == str(out / "03-round1/policy"), "not one of SFT"
    assert second["data"]["train"] == str(out / "03-round1/focus/rows.jsonl")
    assert third["policy"]["path"] == str(out / "04-round2/sft-policy")
    focus_ids = [row["id"] for row in kept_rows(out / "04-round2/focus")]
    assert third["data"]["train"] == str(out / "04-round2/focus/rows.jsonl")
    assert focus_ids == [row["id"] for row in kept_rows(out / "03-round1/focus")]
    verified = decisions_of(out / "03-round1/verify").values()
    dropped_ids = [row["id"] for row in verified if not row["kept"]]
    assert dropped_ids == [
        question_row.id
        for question_row in question_rows
        if question_row.id.startswith(("wrong", "late"))
    ]


def rephrased(body: dict[str, Any], seed: int | None) -> str:
    turns = json.loads(body["messages"][-1]["content"])["turns"]
    thoughts = [{"turn": t["turn"], "thought": f"well, {t['thought']} again"} for t in turns]
    return json.dumps({"turns": thoughts})
