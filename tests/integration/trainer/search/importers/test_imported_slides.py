"""Import a small SlideVQA, index its pages, and let a scripted policy search for its questions."""

from __future__ import annotations

from contextlib import closing

import pytest
from typer.testing import CliRunner

from scorekit.retrieval.client import Retriever
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.index.ingest import ingest
from services.retriever.index.reader import ReadingRules
from services.retriever.model import RetrieverBackend
from testing.servers import running_service
from tests.kits.trainer.searching.episodes import COMPLETE, search
from tests.kits.trainer.searching.published_files import KOREAN, slide_row, write_slides
from trainer.search.cli import app
from trainer.search.config import SearchConfig
from trainer.search.data import hold_against_index, load_train
from trainer.search.reward import RewardStream
from trainer.search.rollout.episode import TurnRequest
from trainer.search.rollout.episode_runner import EpisodeRunner
from trainer.search.rollout.policies import ScriptPolicy
from trainer.search.services import has_page
from trainer.search.trajectories.store import TrajectoryStore


def test_questions_of_slidevqa_are_searched_for_with_the_right_ndcg(tmp_path):
    """The first question's gold page is shown second; the other's two pages come first."""
    rows = [slide_row(1, "deck", [2]), slide_row(2, KOREAN, [1, 3])]
    write_slides(tmp_path / "SlideVQA", "train", rows)
    out = tmp_path / "imported"
    done = CliRunner().invoke(
        app, ["import", "slidevqa", str(tmp_path / "SlideVQA"), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert f"ingest {out}/pages --index {out}/index" in done.stdout
    rules = ReadingRules(ocr="tests.kits.retrieval.hooks:read_shade")
    ingest([out / "pages"], tmp_path / "index", [Bm25Builder("bigrams")], rules, workers=1)
    cfg = SearchConfig.model_validate(
        {"data": {"train": str(out / "train.jsonl")}, "reward": {"preset": "phase1", "gate": False}}
    )
    # the shades of the pages, which `write_slides` numbers by deck
    queries = {"1-0-0": ["shade 3", "shade 2"], "1-1-0": ["shade 11", "shade 13"]}

    def script(request: TurnRequest) -> str:
        shades = queries[request.trajectory_id]
        return search(shades[request.turn - 1]) if request.turn <= len(shades) else COMPLETE

    with running_service(RetrieverBackend(tmp_path / "index")) as url:
        with closing(Retriever(url)) as retriever:
            questions = hold_against_index(
                load_train(cfg), lambda page: has_page(retriever, page), cfg.data
            )
            store = TrajectoryStore(tmp_path / "trajectories", "run")
            stream = RewardStream(cfg.reward, None, store.read_image)
            runner = EpisodeRunner(cfg, retriever, stream, store)
            finished = runner.run(ScriptPolicy(script), list(enumerate(questions)), step=1)
            final = runner.collect_rewards(1, finished)
    assert final["1-0-0"].shown_pages == ["deck_3", "deck_2"]
    assert final["1-0-0"].ndcg == pytest.approx(0.6309, abs=1e-4)  # 1 / log2(3)
    assert final["1-1-0"].shown_pages == [f"{KOREAN}_1", f"{KOREAN}_3"]
    assert final["1-1-0"].ndcg == 1.0


def test_a_problem_of_a_dataset_ends_the_command_with_code_2(tmp_path):
    write_slides(tmp_path / "SlideVQA", "train", [slide_row(1, "deck", [9])])
    arguments = ["import", "slidevqa", str(tmp_path / "SlideVQA"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "page 9 is out of range" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["SlideVQA"]
