"""`python -m trainer evaluate`: write the evaluation of a policy, and compare it with another one.

misc.run_dir gets evaluation.json (stats), evaluation.jsonl (one episode per line) and
evaluation.html; against another policy, also comparison.json and comparison.html, and the other
evaluation in `against/`. A named set has files evaluation-NAME.json and so on. The folder
`evaluation/` has the episodes with their images, one step per set, and their page; it is separate
because misc.run_dir may have a training run. Files of an earlier call are replaced only with
--overwrite. Paid answers stay in answers.sqlite and are not paid for twice.

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
from trainer.rl.distributed import DistributedContext
from trainer.rl.policy.devices import prepare_torch
from trainer.runs.cli.paired import PairedStat, comparison_values
from trainer.runs.config import DEFAULT_EVAL_SET, set_key
from trainer.runs.run_log import open_run_dir, write_json, write_jsonl
from trainer.search.answer.spending import BudgetExceeded
from trainer.search.config import SearchConfig
from trainer.search.data import check_gold, hold_against_index
from trainer.search.episode_runner import EpisodeRunner
from trainer.search.evaluation.candidates import SearchCandidate, candidate_of, opened
from trainer.search.evaluation.compare import compare_episodes, question_key
from trainer.search.evaluation.evaluate import SearchReport, evaluate_questions
from trainer.search.evaluation.report import read_episodes, write_comparison, write_evaluation
from trainer.search.records import Question, Trajectory
from trainer.search.services import SearchServices, has_page, open_services
from trainer.search.training.loading import fitting_questions
from trainer.search.trajectories.store import FOLDER, TrajectoryStore
from trainer.search.trajectories.view import write_view

log = logging.getLogger(__name__)
Sets = Mapping[str, Sequence[Question]]
#: Folder of the episodes of an evaluation with their images.
EPISODES = "evaluation"
#: Key of what scores depend on -> its description in an error message.
_SCORED = {
    "index": "searched in the index",
    "generator": "answered by",
    "judge": "judged by",
    "weights": "summed with",
}


@dataclass(frozen=True, slots=True)
class EvaluatedSearch:
    """An evaluation. policy: path or URL. stats: of `SearchReport`, and the keys of `_SCORED`."""

    policy: str
    stats: Mapping[str, Any]
    episodes: Sequence[Trajectory]


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The outcome of one set. earlier: the other policy's evaluation; groups: the result of
    `compare_episodes`. page, comparison: files."""

    name: str
    evaluation: EvaluatedSearch
    page: Path
    earlier: EvaluatedSearch | None = None
    groups: Mapping[str, Sequence[PairedStat]] | None = None
    comparison: Path | None = None


def run_evaluation(
    cfg: SearchConfig, sets: Sets, against: str | None = None, *, overwrite: bool = False
) -> list[SearchOutcome]:
    """Evaluate the policy on sets of questions by name, and compare it with `against`: another
    policy's folder, hub id or URL (`URL#MODEL`), or the folder of an earlier evaluation, whose
    episodes are used.

    A policy may be a folder of adapters, such as a run's checkpoint. overwrite: replace files of an
    earlier call. Every process of the world must call it; the main one gets the outcomes. Raises
    UserError for what the user can fix, if possible before weights are loaded; ServiceUnreachable.
    """
    world = DistributedContext(
        prepare_torch(cfg.misc.device, cfg.misc.threads), patience_s=cfg.misc.patience_s
    )
    cfg = cfg.model_copy(update={"generation": cfg.eval_generation()})
    folder = Path(cfg.misc.run_dir)
    world.on_main(lambda: _check_folder(cfg, sets, against is not None, overwrite))
    earlier = Path(against) if against is not None and _is_evaluation(Path(against)) else None
    candidates = [candidate_of(cfg, folder)]
    if against is not None and earlier is None:
        candidates.append(_other(cfg, folder / "against", against))
    with world.monitored():
        try:
            evaluations = _evaluate(cfg, candidates, sets, earlier, world)
        except BudgetExceeded as error:  # partial files are replaced next time
            raise UserError(f"{error}, and evaluate again with --overwrite") from None
    if not world.is_main:
        return []
    outcomes = [
        SearchOutcome(name, evaluations[0][name], folder / _file(name, "html")) for name in sets
    ]
    return [
        _compared(folder, outcome, evaluations[1][outcome.name]) if evaluations[1:] else outcome
        for outcome in outcomes
    ]


def _evaluate(
    cfg: SearchConfig,
    candidates: Sequence[SearchCandidate],
    sets: Sets,
    earlier: Path | None,
    world: DistributedContext,
) -> list[dict[str, EvaluatedSearch]]:
    """Return the evaluations of each candidate by set, then those of an earlier folder, if any."""
    run = world.gather([f"{Path(cfg.misc.run_dir).name}-{uuid4().hex[:8]}"])[0]
    stores: list[TrajectoryStore] = []  # the last one is in use
    evaluations: list[dict[str, EvaluatedSearch]] = []
    with open_services(
        cfg, run=run, load_image=lambda name: stores[-1].read_image(name), is_main=world.is_main
    ) as search_services:
        sets = {name: _indexed(search_services, questions, cfg) for name, questions in sets.items()}
        for candidate in candidates:
            sets = _fitting(candidate, sets, world)
        settings = _score_settings(cfg, search_services)
        earlier_evaluations: dict[str, EvaluatedSearch] = {}
        if earlier is not None:
            world.on_main(lambda: earlier_evaluations.update(_earlier(earlier, sets, settings)))

        def begin(candidate: SearchCandidate) -> EpisodeRunner:
            stores.append(_new_store(candidate.folder, f"{run}-{len(stores)}", world))
            return EpisodeRunner(
                cfg, search_services.retriever, search_services.stream, stores[-1], world
            )

        for candidate in candidates:
            reports = _reports(candidate, sets, begin, world)
            evaluations.append({})
            for name, report in reports.items() if world.is_main else ():
                stats = {"policy": candidate.name, "set": name, **settings, **report.stats()}
                evaluations[-1][name] = EvaluatedSearch(candidate.name, stats, report.episodes)
            if world.is_main:
                _write(candidate, evaluations[-1], stores[-1])
    return [*evaluations, earlier_evaluations] if earlier_evaluations else evaluations


def _reports(
    candidate: SearchCandidate,
    sets: Sets,
    begin: Callable[[SearchCandidate], EpisodeRunner],
    world: DistributedContext,
) -> dict[str, SearchReport]:
    """Return the report of each set; a set is a step. The policy is closed afterwards.

    begin: is called when the policy is open, and removes files of an earlier evaluation.
    """
    with opened(candidate, world) as policy:
        episodes = begin(candidate)
        return {
            name: evaluate_questions(episodes, policy, questions, world, step=step, name=name)
            for step, (name, questions) in enumerate(sets.items(), 1)
        }


def _indexed(
    search_services: SearchServices, questions: Sequence[Question], cfg: SearchConfig
) -> list[Question]:
    """Return the questions whose pages are in the index."""
    check_gold(questions, cfg.reward.weights["ndcg"])
    return hold_against_index(
        questions, lambda page: has_page(search_services.retriever, page), cfg.data
    )


def _fitting(candidate: SearchCandidate, sets: Sets, world: DistributedContext) -> Sets:
    """Return the questions that fit a candidate's context, as in training.

    An episode that cannot start would get the score of an empty search. A server refuses overlong
    questions itself.
    """
    policy_inputs, cfg = candidate.policy_inputs, candidate.cfg
    if policy_inputs is None:
        return sets
    ids, accepted = policy_inputs.ids(cfg, policy_inputs.stops), {}
    for name, questions in sets.items():
        accepted[name], message = fitting_questions(
            set_key(name), questions, ids, policy_inputs.context, cfg
        )
        if message and world.is_main:
            log.warning("%s", message)
    return accepted


def _new_store(folder: Path, run: str, world: DistributedContext) -> TrajectoryStore:
    """Return a new store and remove that of an earlier evaluation."""
    world.on_main(lambda: remove_folder(folder / EPISODES))
    return TrajectoryStore(folder / EPISODES / FOLDER, run)


def _score_settings(cfg: SearchConfig, search_services: SearchServices) -> dict[str, Any]:
    """Return what scores depend on: two evaluations are comparable if it is equal."""
    reward, answering = cfg.reward, search_services.answering
    return {
        "index": search_services.index.revision,
        "generator": None if answering is None else cfg.answering.generator.model,
        "judge": None if answering is None else answering.judge_model,
        "weights": reward.model_dump(mode="json", exclude={"preset"}),
    }


def _file(name: str, ending: str, kind: str = "evaluation") -> str:
    return f"{kind}.{ending}" if name == DEFAULT_EVAL_SET else f"{kind}-{name}.{ending}"


def _check_folder(cfg: SearchConfig, sets: Sets, compares: bool, overwrite: bool) -> None:
    """Raise UserError if run_dir is not writable, or an evaluation would be replaced."""
    folder = open_run_dir(cfg.misc)
    folders = [folder, folder / "against"] if compares else [folder]
    names = [_file(name, ending) for name in sets for ending in ("json", "jsonl", "html")]
    paths = (parent / name for parent in folders for name in names)
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None and not overwrite:
        raise UserError(
            f"misc.run_dir: {existing} exists from an earlier evaluation. Choose another folder "
            "(--set misc.run_dir=...), or replace it with --overwrite."
        )


def _is_evaluation(folder: Path) -> bool:
    return any(folder.glob("evaluation*.jsonl"))


def _other(cfg: SearchConfig, folder: Path, against: str) -> SearchCandidate:
    """Return the other candidate. Raises UserError if `against` is not a policy."""
    is_path = Path(against).exists() or against.startswith((".", "/", "~"))
    names = ("config.json", "adapter_config.json")
    if is_path and not any((Path(against) / name).is_file() for name in names):
        raise UserError(
            f"--against: {against} has neither evaluation.jsonl (of an earlier evaluation) nor "
            "config.json (of a policy) nor adapter_config.json (of adapters)"
        )
    return candidate_of(cfg, folder, against)


def _earlier(folder: Path, sets: Sets, settings: Mapping[str, Any]) -> dict[str, EvaluatedSearch]:
    """Return the evaluations in a folder by set.

    Raises UserError if they have other questions or other score settings.
    """
    evaluations = {}
    for name, questions in sets.items():
        path = folder / _file(name, "jsonl")
        if not path.is_file():
            raise UserError(
                f"--against: {folder} has no {path.name}. Evaluate that set there, too."
            )
        episodes = read_episodes(path)
        if [question_key(item) for item in episodes] != [
            (item.id, item.question) for item in questions
        ]:
            raise UserError(
                f"--against: {folder} searched for {len(episodes)} questions, which differ from "
                f"these {len(questions)} or their order. Evaluate it with the same data.eval, "
                "eval_sets and eval_limit."
            )
        stats = {}
        if (folder / _file(name, "json")).is_file():
            stats = json.loads((folder / _file(name, "json")).read_text(encoding="utf-8"))
        for key, current in settings.items():
            if stats.get(key, current) != current:
                raise UserError(
                    f"--against: {_SCORED[key]} {stats[key]}, here {current}. Such scores are not "
                    "comparable. Evaluate both policies with the same config."
                )
        evaluations[name] = EvaluatedSearch(str(stats.get("policy", folder)), stats, episodes)
    return evaluations


def _write(
    candidate: SearchCandidate, evaluations: Mapping[str, EvaluatedSearch], store: TrajectoryStore
) -> None:
    """Write the files of each set, and remove an old comparison."""
    folder = candidate.folder
    for step, evaluated in enumerate(evaluations.values(), 1):
        store.write_step(step, evaluated.episodes)
    write_view(folder / EPISODES)
    resolved = candidate.cfg.model_dump(mode="json")
    if candidate.policy_inputs is not None:
        resolved["policy"]["path"] = candidate.name
    text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
    for name, evaluated in evaluations.items():
        for ending in ("json", "html"):
            (folder / _file(name, ending, "comparison")).unlink(missing_ok=True)
        lines = (
            episode.model_dump(mode="json", exclude={"tokens"}) for episode in evaluated.episodes
        )
        write_jsonl(folder / _file(name, "jsonl"), lines)
        page = folder / _file(name, "html")
        write_evaluation(page, candidate.name, evaluated.stats, evaluated.episodes, text)
        write_json(folder / _file(name, "json"), evaluated.stats)


def _compared(folder: Path, outcome: SearchOutcome, earlier: EvaluatedSearch) -> SearchOutcome:
    """Compare one set and write the files of the comparison."""
    name, current = outcome.name, outcome.evaluation
    groups = compare_episodes(earlier.episodes, current.episodes)
    counted = {"set": name, "questions": len(current.episodes)}
    values = comparison_values((earlier.policy, current.policy), counted, groups)
    write_json(folder / _file(name, "json", "comparison"), values)
    page = folder / _file(name, "html", "comparison")
    write_comparison(
        page, (earlier.policy, current.policy), groups, earlier.episodes, current.episodes
    )
    return replace(outcome, earlier=earlier, groups=groups, comparison=page)
