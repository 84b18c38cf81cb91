"""Measure what there is to gain on new documents: an oracle, searchers without weights, the start.

    python -m evidence.search.headroom            # writes its JSON file and its table
    python -m evidence.search.headroom --report   # the table alone

All play the 320 questions of `evidence/search/new_documents` in the trainer's own episodes, with
the turns of `configs/search/demo_phase2.yaml`, and are judged alike:

- the oracle knows where each fact is printed: it searches with the page's own text, and crops what
  is too small to read. What it misses, no searcher can get.
- BM25 for the question's own words: its first page; and page after page, with a crop of each page's
  small print, until the turns are spent.
- a searcher by rules (`demo/search/searching.py`), and one whose actions are drawn.
- the start: its greedy episode; the mean of its samples; and the best of them, which is what its
  own samples could teach it.

Each of these is kept in runs/search_headroom when it is done.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from bench.common import RESULTS, ROOT, WORK, machine, markdown_table, write_between, write_json
from demo.search.answer_keys import Spot
from demo.search.answering import Answerer
from demo.search.measured_sets import MeasuredSet, service_settings, services_of_set
from demo.search.reading import Box, Reader, Sight, is_legible
from demo.search.searching import (
    asked_question,
    complete_tag,
    crop_tag,
    next_turn,
    shown_images,
    small_print,
)
from evidence.search.arms import MEASURED, NEW
from evidence.seeds import PAGES, cell
from scorekit.command import clean_exit
from scorekit.config import load_config
from scorekit.files import write_atomic
from scorekit.paired import mean_interval
from testing.processes import exit_on_sigterm, running_service
from trainer.runs.stats import mean_of
from trainer.search.config import SearchConfig
from trainer.search.evaluation.stats import values_of
from trainer.search.rollout.episode import Policy, TurnRequest
from trainer.search.rollout.policies import ScriptPolicy
from trainer.search.rollout.prompt import chat_messages

NEW_DOCUMENTS = MEASURED[NEW]
FOLDER = ROOT / "runs/search_headroom"
RESULT = "search_headroom.json"
#: Shows pictures, for searchers that look at them; the other one shows their lines, for the start.
PICTURES = ROOT / "configs/search/demo.yaml"
LINES = ROOT / "configs/search/demo_phase2.yaml"
SAMPLES = 4
#: How all are measured: a forced end is scored like any other, so turns cost nothing.
YARDSTICK = ("reward.preset=phase2", "reward.forced_completion=score")
PAGE = PAGES / "search.md"
BEGIN = "<!-- written by `python -m evidence.search.headroom --report` -->"
END = "<!-- end of the headroom -->"
#: Name of a player -> its row in the table.
TITLES = {
    "oracle": "oracle: knows where each fact is printed",
    "first-page": "BM25's first page for the question",
    "page-after-page": "BM25 page after page, small print cropped",
    "rules": "searcher by rules",
    "random-actions": "random actions",
    "greedy": "the start, greedy",
    "samples": f"the start, mean of {SAMPLES} samples",
    "best": f"the start, best of {SAMPLES} samples",
}
COLUMNS = {
    "right": "success_share",
    "gold seen": "gold_seen_share",
    "NDCG": "ndcg_mean",
    "turns": "turns_mean",
    "forced ends": "forced_share",
}
Messages = Sequence[Any]
Script = Callable[[Messages, str, random.Random], str]
console = Console(stderr=True, highlight=False)


class Searchers:
    """The searchers without weights. All see pictures only, but for the oracle's keys."""

    def __init__(self, measured: MeasuredSet) -> None:
        self._reader = Reader(*measured.corpora)
        self._answerer = Answerer(measured.corpora, measured.keys)
        pages = self._reader.pages.values()
        self._words = sorted(
            {word for page in pages for text, _ in page.lines for word in text.split()}
        )

    def oracle(self, messages: Messages, question: str, rng: random.Random) -> str:
        """Search for each page that has a fact, and crop the fact if it is too small."""
        key = self._answerer.key_of(question)
        assert key is not None, question
        sights = self._sights(messages)
        for spots in key.reads:
            if not any(_shows(sight, spot) for sight in sights for spot in spots):
                break
        else:
            return complete_tag()
        for sight in sights[-1:]:
            for spot in spots:
                if sight.page.page_id == spot.page_id:
                    return crop_tag(_with_margin(spot.box, sight), sight)
        page = self._reader.pages[spots[0].page_id]
        return _search(" ".join(text for text, _ in page.lines[:12]))

    def first_page(self, messages: Messages, question: str, rng: random.Random) -> str:
        """Search once, with the question's own words."""
        return complete_tag() if self._sights(messages) else _search(question)

    def page_after_page(self, messages: Messages, question: str, rng: random.Random) -> str:
        """Look at one page after another, and at the small print of each."""
        sights = self._sights(messages)
        is_crop = any(sight.page is sights[-1].page for sight in sights[:-1])
        if sights and not is_crop and (box := small_print(sights[-1])):
            return crop_tag(box, sights[-1])
        return _search(question)

    def rules(self, messages: Messages, question: str, rng: random.Random) -> str:
        """Follow the demo's rules."""
        return next_turn(messages, self._reader, rng)

    def random_actions(self, messages: Messages, question: str, rng: random.Random) -> str:
        """Draw the action: a search for three words of any pages, a crop, or the end."""
        sights = self._sights(messages)
        action = rng.random()
        if sights and action < 0.2:
            return complete_tag()
        if sights and action < 0.4:
            x1, y1, x2, y2 = sights[-1].region
            x, y = rng.uniform(x1, (x1 + x2) / 2), rng.uniform(y1, (y1 + y2) / 2)
            return crop_tag((x, y, x + (x2 - x1) / 2, y + (y2 - y1) / 2), sights[-1])
        return _search(" ".join(rng.sample(self._words, 3)))

    def _sights(self, messages: Messages) -> list[Sight]:
        located = map(self._reader.locate, shown_images(messages))
        return [sight for sight in located if sight is not None]


def _search(query: str) -> str:
    return f"<search>{query}</search>"


def _with_margin(box: Box, sight: Sight) -> Box:
    """Return a box of a page with what surrounds it: a crop has a least size."""
    x1, y1, x2, y2 = sight.region
    return (
        max(box[0] - 130, x1),
        max(box[1] - 55, y1),
        min(box[2] + 130, x2),
        min(box[3] + 30, y2),
    )


def _shows(sight: Sight, spot: Spot) -> bool:
    return sight.page.page_id == spot.page_id and is_legible(sight, spot.box)


def script_policy(script: Script) -> Policy:
    """Return a policy of a script; its random numbers depend on the conversation alone."""

    def turn(request: TurnRequest) -> str:
        messages = chat_messages(request.messages)
        state = f"{request.trajectory_id} {request.turn}".encode()
        rng = random.Random(hashlib.sha256(state).digest())
        text = script(messages, asked_question(messages), rng)
        return text if text.startswith("<think>") else f"<think>-</think>\n{text}"

    return ScriptPolicy(turn)


def play(
    make_policy: Callable[[SearchConfig], Policy],
    config: Path,
    settings: Sequence[str],
    out: Path,
    samples: int,
    limit: int | None,
) -> None:
    """Play episodes of each question, and write a line of stats for each episode.

    settings: changes to `config`.
    out: file of the lines. What it has is not played again.
    samples: episodes of a question.
    limit: of the questions.
    """
    from trainer.search.data import load_held_out
    from trainer.search.rollout.episode_runner import EpisodeRunner
    from trainer.search.services import open_services
    from trainer.search.trajectories.store import FOLDER as STORE
    from trainer.search.trajectories.store import TrajectoryStore

    if out.is_file():
        return
    folder = out.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    of_run = [f"misc.run_dir={folder}", "misc.threads=1", f"data.eval={NEW_DOCUMENTS.questions}"]
    cfg = load_config(SearchConfig, config, [*YARDSTICK, *settings, *of_run])
    (questions,) = load_held_out(cfg).values()
    store = TrajectoryStore(folder / STORE, out.stem)
    with open_services(cfg, run=store.run, load_image=store.read_image) as services:
        runner = EpisodeRunner(cfg, services.retriever, services.stream, store)
        numbered = list(enumerate(questions[:limit]))
        trajectories = runner.run(make_policy(cfg), numbered, step=0, samples=samples)
        final = runner.collect_rewards(0, trajectories).values()
    lines = [
        {"question": t.question.id, "type": t.question.question_type, **values_of(t)} for t in final
    ]
    write_atomic(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    shutil.rmtree(folder)


def measure(folder: Path, limit: int | None) -> dict[str, Any]:
    """Let all play, and return the results."""
    from trainer.search.rollout.sampled import local_policy

    before, searchers = machine(), Searchers(NEW_DOCUMENTS)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as running:
        judge = running.enter_context(running_service("judge", folder))
        urls = {"judge": judge, **services_of_set(folder, NEW_DOCUMENTS, running)}
        services = [f"{key}={value}" for key, value in service_settings(urls).items()]
        services.append(f"answering.answers={folder / 'answers.sqlite'}")

        def played(name: str, samples: int = 1, *settings: str) -> None:
            console.print(TITLES[name])
            out, script = folder / f"{name}.jsonl", getattr(searchers, name.replace("-", "_"), None)
            if script is not None:
                play(lambda cfg: script_policy(script), PICTURES, services, out, samples, limit)
            else:
                play(local_policy, LINES, [*services, *settings], out, samples, limit)

        for name in ("oracle", "first-page", "page-after-page", "rules", "random-actions"):
            played(name)
        played("greedy", 1, "generation.temperature=0")
        played("samples", SAMPLES)
    return {"machine": before, "samples": SAMPLES, "players": summarise(folder)}


def summarise(folder: Path) -> dict[str, Any]:
    """Return for each player the values of each question: the means of its samples.

    The player "best" has those of the start's best sample. An answer that was not judged is no
    wrong one: "right" is the mean of the judged samples, None without any, and coverage the share
    of the samples that were judged.
    """
    players: dict[str, Any] = {}
    for path in sorted(folder.glob("*.jsonl")):
        episodes: dict[str, list[dict[str, Any]]] = {}
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            episodes.setdefault(row["question"], []).append(row)
        players[path.stem] = {question: _values(rows) for question, rows in episodes.items()}
        if path.stem == "samples":
            players["best"] = {
                question: _values([max(rows, key=_right)]) | {"coverage": _coverage(rows)}
                for question, rows in episodes.items()
            }
    return players


def _values(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the type of the rows' question, coverage, and the mean of each column."""
    means: dict[str, Any] = {
        key: mean_of([row[key] for row in rows if row[key] is not None]) for key in COLUMNS.values()
    }
    return {"type": rows[0]["type"], "coverage": _coverage(rows), **means}


def _coverage(rows: Sequence[dict[str, Any]]) -> float:
    return fmean(row["success_share"] is not None for row in rows)


def _right(row: dict[str, Any]) -> float:
    return -1.0 if row["success_share"] is None else row["success_share"]


def table(results: dict[str, Any]) -> str:
    """Return the table: the share of questions with a right answer, and what led there."""
    rows = []
    for name, title in TITLES.items():
        values = list(results["players"][name].values())
        small = [row for row in values if row["type"] == "small print"]
        low, high = mean_interval([r for row in values if (r := row["success_share"]) is not None])
        cells = [cell(_mean(values, key), 3) for key in list(COLUMNS.values())[1:]]
        # results of before coverage was noted have none
        covered = _mean(values, "coverage") if "coverage" in values[0] else None
        rows.append(
            [title, f"{_mean(values, 'success_share'):.3f} [{low:.3f}, {high:.3f}]",
             cell(_mean(small, "success_share"), 3), *cells, cell(covered, 3)]
        )  # fmt: skip
    head = ["", "right [95 %]", "right, small print", *list(COLUMNS)[1:], "coverage"]
    return markdown_table(head, rows)


def in_words(results: dict[str, Any]) -> str:
    """Return what the table says, made of its numbers."""
    right = {
        name: _mean(list(values.values()), "success_share") or 0.0
        for name, values in results["players"].items()
    }
    count = len(results["players"]["oracle"])
    return (
        f"Of {count} questions the oracle gets {right['oracle']:.2f} right, and the start "
        f"{right['greedy']:.2f}. The first page of BM25 alone gives {right['first-page']:.2f}, "
        f"page after page {right['page-after-page']:.2f}, random actions "
        f"{right['random-actions']:.2f}. A sample of the start is right in {right['samples']:.2f}, "
        f"one of {results['samples']} samples in {right['best']:.2f}: that much its own samples "
        "could teach it."
    )


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    return mean_of([row[key] for row in rows if row[key] is not None])


def main(
    quick: Annotated[bool, typer.Option(help="Six questions: does it run at all?")] = False,
    report: Annotated[bool, typer.Option(help="Only write the table, from the results.")] = False,
) -> None:
    """Measure what there is to gain on new documents; write the results and the table."""
    exit_on_sigterm()
    out = (WORK if quick else RESULTS) / RESULT
    with clean_exit(stdout="log"):
        if not report:
            folder = WORK / "search_headroom" if quick else FOLDER
            write_json(out, measure(folder, 6 if quick else None))
        results = json.loads(out.read_text(encoding="utf-8"))
        console.print(Markdown(table(results)), in_words(results))
        if not quick:
            words = textwrap.fill(in_words(results), 110)
            write_between(BEGIN, END, f"{table(results)}\n\n{words}", PAGE)


if __name__ == "__main__":
    typer.run(main)
