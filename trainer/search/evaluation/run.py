"""`python -m trainer evaluate`: a searcher's evaluation as files, alone or beside another one's.

misc.run_dir gets evaluation.json (figures), evaluation.jsonl (an episode a line) and
evaluation.html; against another policy, also comparison.json and comparison.html, and the other's
evaluation in `against/`. Of a set with a name the files are evaluation-NAME.json and so on. Beside
them `evaluation/` has the episodes with their pictures, a step a set, and their page: a folder of
its own, since a training run may stand in misc.run_dir with its own. What an earlier call wrote is
never replaced unasked; what it paid for stays in answers.sqlite, and is not paid for again.

Under torchrun or accelerate the processes share the questions; the main one writes and prints.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from scorekit.errors import UserError
from scorekit.files import remove_folder
from trainer.rl.policy import prepare_torch
from trainer.rl.world import World
from trainer.runs.config import THE_SET, set_key
from trainer.runs.runlog import open_run_dir, write_json, write_jsonl
from trainer.runs.verbs.paired import PairedFigure, comparison_values
from trainer.search.answer.money import MoneySpent
from trainer.search.config import SearchConfig
from trainer.search.data import check_gold, hold_against_index
from trainer.search.episodes import Episodes
from trainer.search.evaluation.candidates import SearchCandidate, candidate_of, opened
from trainer.search.evaluation.compare import asked, compare_episodes
from trainer.search.evaluation.evaluate import SearchReport, evaluate_questions
from trainer.search.evaluation.report import read_episodes, write_comparison, write_evaluation
from trainer.search.neighbours import Around, has_page, services
from trainer.search.records import Question, Trajectory
from trainer.search.training.loading import fitting_questions
from trainer.search.trajectories.store import FOLDER, TrajectoryStore
from trainer.search.trajectories.view import write_view

log = logging.getLogger(__name__)
Sets = Mapping[str, Sequence[Question]]
#: Beside the files of an evaluation: its episodes with their pictures.
EPISODES = "evaluation"
#: What makes scores, as an evaluation notes it -> in words.
_SCORED = {
    "index": "searched in the index",
    "generator": "answered by",
    "judge": "judged by",
    "weights": "summed with",
}


@dataclass(frozen=True, slots=True)
class EvaluatedSearch:
    """policy: its path or URL. figures: those of `SearchReport`, and what made them (`_SCORED`)."""

    policy: str
    figures: Mapping[str, Any]
    episodes: Sequence[Trajectory]


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What became of one set. earlier: the other policy's evaluation; groups: what
    `compare_episodes` gives for it and `evaluation`. page, comparison: files."""

    name: str
    evaluation: EvaluatedSearch
    page: Path
    earlier: EvaluatedSearch | None = None
    groups: Mapping[str, Sequence[PairedFigure]] | None = None
    comparison: Path | None = None


def run_evaluation(
    cfg: SearchConfig, sets: Sets, against: str | None = None, *, overwrite: bool = False
) -> list[SearchOutcome]:
    """Evaluate the policy on sets of questions by name, and compare it with `against`: another
    policy's folder, hub id or URL (`URL#MODEL`), or the folder of an earlier evaluation, whose
    episodes are taken as they are.

    A policy may be a folder of adapters, such as a run's checkpoint. overwrite: replace what an
    earlier call wrote. Every process of the world has to call it; the main one gets the outcomes.
    Raises UserError on what the user can mend, before weights load where that can be known;
    ServiceUnreachable.
    """
    world = World(prepare_torch(cfg.misc.device, cfg.misc.threads), patience_s=cfg.misc.patience_s)
    cfg = cfg.model_copy(update={"generation": cfg.eval_generation()})
    folder = Path(cfg.misc.run_dir)
    world.on_main(lambda: _check_folder(cfg, sets, against is not None, overwrite))
    earlier = Path(against) if against is not None and _is_evaluation(Path(against)) else None
    candidates = [candidate_of(cfg, folder)]
    if against is not None and earlier is None:
        candidates.append(_other(cfg, folder / "against", against))
    with world.together():
        try:
            found = _evaluate(cfg, candidates, sets, earlier, world)
        except MoneySpent as error:  # what is written by then is replaced
            raise UserError(f"{error}, and evaluate again with --overwrite") from None
    if not world.is_main:
        return []
    outcomes = [SearchOutcome(name, found[0][name], folder / _file(name, "html")) for name in sets]
    return [_compared(folder, of, found[1][of.name]) if found[1:] else of for of in outcomes]


def _evaluate(
    cfg: SearchConfig,
    candidates: Sequence[SearchCandidate],
    sets: Sets,
    earlier: Path | None,
    world: World,
) -> list[dict[str, EvaluatedSearch]]:
    """Of each candidate, by set; and of the earlier evaluation in a folder, where there is one."""
    run = world.gather([f"{Path(cfg.misc.run_dir).name}-{uuid4().hex[:8]}"])[0]
    stores: list[TrajectoryStore] = []  # the last one is in use
    found: list[dict[str, EvaluatedSearch]] = []
    with services(
        cfg, run=run, load_image=lambda name: stores[-1].picture(name), is_main=world.is_main
    ) as around:
        sets = {name: _known(around, questions, cfg) for name, questions in sets.items()}
        for candidate in candidates:
            sets = _fitting(candidate, sets, world)
        made_by = _made_by(cfg, around)
        then: dict[str, EvaluatedSearch] = {}
        if earlier is not None:
            world.on_main(lambda: then.update(_earlier(earlier, sets, made_by)))

        def begin(candidate: SearchCandidate) -> Episodes:
            stores.append(_new_store(candidate.folder, f"{run}-{len(stores)}", world))
            return Episodes(cfg, around.retriever, around.stream, stores[-1], world)

        for candidate in candidates:
            reports = _reports(candidate, sets, begin, world)
            found.append({})
            for name, report in reports.items() if world.is_main else ():
                told = {"policy": candidate.name, "set": name, **made_by, **report.figures()}
                found[-1][name] = EvaluatedSearch(candidate.name, told, report.episodes)
            if world.is_main:
                _write(candidate, found[-1], stores[-1])
    return [*found, then] if then else found


def _reports(
    candidate: SearchCandidate,
    sets: Sets,
    begin: Callable[[SearchCandidate], Episodes],
    world: World,
) -> dict[str, SearchReport]:
    """An episode of each question; a set is a step. The policy is gone when it returns. begin: is
    called when the policy is there: what an earlier evaluation left goes then, and not before."""
    with opened(candidate, world) as policy:
        episodes = begin(candidate)
        return {
            name: evaluate_questions(episodes, policy, questions, world, step=step, name=name)
            for step, (name, questions) in enumerate(sets.items(), 1)
        }


def _known(around: Around, questions: Sequence[Question], cfg: SearchConfig) -> list[Question]:
    """Those whose pages the index has."""
    check_gold(questions, cfg.reward.weights["ndcg"])
    return hold_against_index(questions, lambda page: has_page(around.retriever, page), cfg.data)


def _fitting(candidate: SearchCandidate, sets: Sets, world: World) -> Sets:
    """Those that are not too long for it, as in training: an episode that cannot begin would be
    scored as if nothing had been found. A server refuses them itself."""
    reads, cfg = candidate.reads, candidate.cfg
    if reads is None:
        return sets
    ids, kept = reads.ids(cfg, reads.stops), {}
    for name, questions in sets.items():
        kept[name], told = fitting_questions(set_key(name), questions, ids, reads.context, cfg)
        if told and world.is_main:
            log.warning("%s", told)
    return kept


def _new_store(folder: Path, run: str, world: World) -> TrajectoryStore:
    """In place of what an earlier evaluation, whole or not, left there."""
    world.on_main(lambda: remove_folder(folder / EPISODES))
    return TrajectoryStore(folder / EPISODES / FOLDER, run)


def _made_by(cfg: SearchConfig, around: Around) -> dict[str, Any]:
    """What makes scores: those of two evaluations compare where it is the same."""
    reward, answering = cfg.reward, around.answering
    return {
        "index": around.index.revision,
        "generator": None if answering is None else cfg.answering.generator.model,
        "judge": None if answering is None else answering.judge_model,
        "weights": reward.model_dump(mode="json", exclude={"preset"}),
    }


def _file(name: str, ending: str, kind: str = "evaluation") -> str:
    return f"{kind}.{ending}" if name == THE_SET else f"{kind}-{name}.{ending}"


def _check_folder(cfg: SearchConfig, sets: Sets, compares: bool, overwrite: bool) -> None:
    """Raise UserError where run_dir cannot be written to, or an evaluation would be replaced."""
    folder = open_run_dir(cfg.misc)
    folders = [folder, folder / "against"] if compares else [folder]
    names = [_file(name, ending) for name in sets for ending in ("json", "jsonl", "html")]
    places = (place / name for place in folders for name in names)
    there = next((path for path in places if path.exists()), None)
    if there is not None and not overwrite:
        raise UserError(
            f"misc.run_dir: {there} is there from an earlier evaluation; choose another folder "
            "(--set misc.run_dir=...), or replace it with --overwrite"
        )


def _is_evaluation(folder: Path) -> bool:
    return any(folder.glob("evaluation*.jsonl"))


def _other(cfg: SearchConfig, folder: Path, against: str) -> SearchCandidate:
    """Raises UserError where it is neither a policy nor an earlier evaluation."""
    is_path = Path(against).exists() or against.startswith((".", "/", "~"))
    names = ("config.json", "adapter_config.json")
    if is_path and not any((Path(against) / name).is_file() for name in names):
        raise UserError(
            f"--against: {against} has neither evaluation.jsonl (of an earlier evaluation) nor "
            "config.json (of a policy) nor adapter_config.json (of adapters)"
        )
    return candidate_of(cfg, folder, against)


def _earlier(folder: Path, sets: Sets, made_by: Mapping[str, Any]) -> dict[str, EvaluatedSearch]:
    """The evaluations that stand in a folder, by set. Raises UserError where they are of other
    questions, or scored in another way."""
    found = {}
    for name, questions in sets.items():
        path = folder / _file(name, "jsonl")
        if not path.is_file():
            raise UserError(f"--against: {folder} has no {path.name}: evaluate that set there, too")
        episodes = read_episodes(path)
        if [asked(one) for one in episodes] != [(one.id, one.question) for one in questions]:
            raise UserError(
                f"--against: {folder} searched for {len(episodes)} questions that are not these "
                f"{len(questions)} in this order: evaluate it with the same data.eval, eval_sets "
                "and eval_limit"
            )
        figures = {}
        if (folder / _file(name, "json")).is_file():
            figures = json.loads((folder / _file(name, "json")).read_text(encoding="utf-8"))
        for key, now in made_by.items():
            if figures.get(key, now) != now:
                raise UserError(
                    f"--against: {_SCORED[key]} {figures[key]}, here {now}: such scores cannot be "
                    "compared; evaluate both policies with the same config"
                )
        found[name] = EvaluatedSearch(str(figures.get("policy", folder)), figures, episodes)
    return found


def _write(
    candidate: SearchCandidate, found: Mapping[str, EvaluatedSearch], store: TrajectoryStore
) -> None:
    """The files of each set; a comparison of what stood there before goes."""
    folder = candidate.folder
    for step, evaluated in enumerate(found.values(), 1):
        store.write_step(step, evaluated.episodes)
    write_view(folder / EPISODES)
    resolved = candidate.cfg.model_dump(mode="json")
    if candidate.reads is not None:
        resolved["policy"]["path"] = candidate.name
    text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
    for name, evaluated in found.items():
        for ending in ("json", "html"):
            (folder / _file(name, ending, "comparison")).unlink(missing_ok=True)
        lines = (one.model_dump(mode="json", exclude={"tokens"}) for one in evaluated.episodes)
        write_jsonl(folder / _file(name, "jsonl"), lines)
        page = folder / _file(name, "html")
        write_evaluation(page, candidate.name, evaluated.figures, evaluated.episodes, text)
        write_json(folder / _file(name, "json"), evaluated.figures)


def _compared(folder: Path, outcome: SearchOutcome, earlier: EvaluatedSearch) -> SearchOutcome:
    """The comparison of one set, and its files."""
    name, now = outcome.name, outcome.evaluation
    groups = compare_episodes(earlier.episodes, now.episodes)
    counted = {"set": name, "questions": len(now.episodes)}
    values = comparison_values((earlier.policy, now.policy), counted, groups)
    write_json(folder / _file(name, "json", "comparison"), values)
    page = folder / _file(name, "html", "comparison")
    write_comparison(page, (earlier.policy, now.policy), groups, earlier.episodes, now.episodes)
    return replace(outcome, earlier=earlier, groups=groups, comparison=page)
