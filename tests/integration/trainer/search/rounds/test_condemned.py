"""Check that what `hallucinations` decides reaches focus and distill of the loop, and its page.

The curation commands are the real ones, with real servers. Episodes that were written beforehand
replace the trainings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from scorekit.config import check_config
from tests.integration.trainer.search.rounds.test_planted import in_process
from tests.kits.trainer.searching.asked_again import knowing
from tests.kits.trainer.searching.cold import READING, save_model, text_episode, text_run
from tests.kits.trainer.searching.curated import decisions_of, kept_rows, make_question, write_rows
from tests.kits.trainer.searching.episodes import COMPLETE, search
from tests.kits.trainer.searching.finished import page, sha256_of
from trainer.search.records import GeneratedAnswer, Question, Trajectory
from trainer.search.rounds.config import RoundsConfig
from trainer.search.rounds.loop import run_loop
from trainer.search.rounds.steps import Steps

#: Question -> (page of its right episode, page of a further right one).
SEEN: Mapping[str, tuple[str, str | None]] = {
    "known": ("other_1", None),
    "lucky": ("deck_1", "other_1"),
    "good": ("deck_1", None),
}
PAGES = {name: name for name in ("deck_1", "other_1")}
#: What the generator says without a picture, and from the gold page.
SAYS = {
    f"What is {name}?": ({"": "12 %"} if name == "known" else {}) | {"deck_1": "12 %"}
    for name in SEEN
}


def episodes(question: Question) -> list[Trajectory]:
    """Return eight episodes, of which one or two are judged right from the pages of SEEN."""
    played = []
    for n in range(8):
        page_id = SEEN[question.id][n] if n < 2 else None
        shown_page = page_id or "other_1"
        episode = text_episode(
            question,
            search(f"{question.id} {n}"),
            COMPLETE,
            sample=n,
            judge=float(page_id is not None),
            reward=float(page_id is not None),
            ndcg=float(shown_page == "deck_1"),
        )
        episode.turns[0].views = [page(shown_page)]
        answer = GeneratedAnswer(status="ok", text="12 %", evidence=[sha256_of(shown_page)])
        played.append(episode.model_copy(update={"answer": answer}))
    return played


def test_focus_and_distill_leave_out_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [
        make_question(name, 1, question=f"What is {name}?", reference_answer="12 %")
        for name in SEEN
    ]
    model = save_model(tmp_path / "model", READING)
    data = write_rows(tmp_path / "questions.jsonl", questions)
    played = [episode for question in questions for episode in episodes(question)]
    run = text_run(
        tmp_path / "run", played, *questions, policy={"path": str(model)}, data={"train": str(data)}
    )
    monkeypatch.setattr(Steps, "_run", in_process(model, {"01-one": run}))
    with knowing(PAGES, SAYS) as services:
        value = dict(setting.removeprefix("--set=").split("=", 1) for setting in services.settings)
        values = {
            "rounds": [{"name": "one", "then": ["hallucinations", "focus", "distill"]}],
            "train": {
                "task": "search",
                "data": {"train": str(data)},
                "policy": {"path": str(model)},
                "retriever": {"url": value["retriever.url"]},
                "answering": {
                    "generator": {
                        "base_url": value["answering.generator.base_url"],
                        "model": "generator",
                    },
                    "judge": {"url": value["answering.judge.url"]},
                },
            },
            "curation": {"focus": {"take": ["last_round"]}, "distill": {"evidence": "any"}},
        }
        cfg = check_config(RoundsConfig, values, "rounds.yaml")
        assert run_loop(cfg, tmp_path / "out") is None
    folder = tmp_path / "out/01-one"
    kinds = {id: row["reason"] for id, row in decisions_of(folder / "hallucinations").items()}
    assert kinds == {"known": "own_knowledge", "lucky": "luck", "good": "none"}
    focused = decisions_of(folder / "focus")
    assert {id for id, row in focused.items() if row["kept"]} == {"lucky", "good"}
    assert focused["known"]["reason"] == "hallucinations: own_knowledge"
    distilled = {(row["question_id"], row["seed"]) for row in _rows_of(folder / "distill")}
    assert distilled == {("lucky", 0), ("good", 0)}
    reasons = [row["reason"] for row in decisions_of(folder / "distill").values()]
    assert reasons.count("hallucinations: own_knowledge") == 1
    assert reasons.count("hallucinations: luck") == 1
    text = (tmp_path / "out/rounds.html").read_text(encoding="utf-8")
    lines = " ".join(text.replace('<td class="number">', "<td>").split())
    assert "<td>focus: left out for hallucinations</td><td>1</td>" in lines
    assert "<td>distill: left out for hallucinations</td><td>2</td>" in lines


def _rows_of(folder: Path) -> list[dict[str, object]]:
    """Return the kept rows, each with the number of its episode as `seed`."""
    return [row | {"seed": int(str(row["id"]).rpartition("-")[2])} for row in kept_rows(folder)]
