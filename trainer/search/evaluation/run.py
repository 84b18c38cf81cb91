"""`scorekit evaluate`: write the evaluation of a policy, and compare it with another one.

misc.run_dir gets the files of trainer/runs/evaluation/files.py, with one episode per line. The
folder `evaluation/` has the episodes with their images, one step per set, and their page; it is
separate because misc.run_dir may have a training run. Files of an earlier call are replaced only
with --overwrite. Paid answers stay in answers.sqlite and are not paid for twice.

Under torchrun or accelerate the processes share the questions; the main one writes and prints.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.files import remove_folder
from scorekit.paid.account import BudgetExceeded
from trainer.rl.distributed import DistributedContext
from trainer.rl.policy.devices import prepare_torch
from trainer.runs.config import set_key
from trainer.runs.evaluation.files import (
    AGAINST,
    EvaluatedPolicy,
    EvaluationFiles,
    EvaluationOutcome,
    check_folder,
    check_same_scoring,
    config_text,
    has_evaluation,
)
from trainer.search.answer.config import GeneratorConfig
from trainer.search.config import SearchConfig
from trainer.search.data import check_gold, hold_against_index
from trainer.search.evaluation.candidates import SearchCandidate, candidate_of, opened
from trainer.search.evaluation.compare import compare_episodes, episodes_of, line_key
from trainer.search.evaluation.evaluate import evaluate_questions
from trainer.search.evaluation.report import write_comparison, write_evaluation
from trainer.search.records import Question
from trainer.search.rollout.episode_runner import EpisodeRunner
from trainer.search.services import SearchServices, has_page, open_services, run_name
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
    "images": "answered from images that are",
    "judge": "judged by",
    "weights": "summed with",
}
_SHOWN = "as shown to the policy"


def run_evaluation(
    cfg: SearchConfig, sets: Sets, against: str | None = None, *, overwrite: bool = False
) -> list[EvaluationOutcome]:
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
    world.on_main(lambda: check_folder(cfg.misc, sets, against is not None, overwrite))
    candidates, earlier = [candidate_of(cfg, folder)], None
    if against is not None and has_evaluation(against):
        earlier = Path(against)
    elif against is not None:
        candidates.append(candidate_of(cfg, folder / AGAINST, against))
    with world.monitored():
        try:
            evaluations = _evaluate(cfg, candidates, sets, earlier, world)
        except BudgetExceeded as error:  # partial files are replaced next time
            raise UserError(f"{error}, and evaluate again with --overwrite") from None
    if not world.is_main:
        return []
    other_evaluations = evaluations[1] if len(evaluations) > 1 else {}
    return [
        EvaluationFiles(folder, name).outcome(
            evaluated,
            other_evaluations.get(name),
            compare_episodes,
            {"set": name, "questions": len(evaluated.examples)},
            write_comparison,
        )
        for name, evaluated in evaluations[0].items()
    ]


def _evaluate(
    cfg: SearchConfig,
    candidates: Sequence[SearchCandidate],
    sets: Sets,
    earlier: Path | None,
    world: DistributedContext,
) -> list[dict[str, EvaluatedPolicy]]:
    """Return the evaluations of each candidate by set, then those of an earlier folder, if any."""
    run = world.gather([run_name(Path(cfg.misc.run_dir))])[0]
    stores: list[TrajectoryStore] = []  # the last one is in use
    evaluations: list[dict[str, EvaluatedPolicy]] = []
    with open_services(
        cfg, run=run, load_image=lambda name: stores[-1].read_image(name), world=world
    ) as search_services:
        sets = {name: _indexed(search_services, questions, cfg) for name, questions in sets.items()}
        for candidate in candidates:
            sets = _fitting(candidate, sets, world)
        settings = _score_settings(cfg, search_services)
        earlier_evaluations: dict[str, EvaluatedPolicy] = {}
        if earlier is not None:
            world.on_main(lambda: earlier_evaluations.update(_earlier(earlier, sets, settings)))
        retriever, stream = search_services.retriever, search_services.stream
        for candidate in candidates:
            with opened(candidate, world) as policy:
                # Only now: an earlier evaluation stays if the policy cannot be loaded.
                folder = candidate.folder / EPISODES
                world.on_main(partial(remove_folder, folder))
                stores.append(TrajectoryStore(folder / FOLDER, f"{run}-{len(stores)}"))
                episodes = EpisodeRunner(cfg, retriever, stream, stores[-1], world)
                reports = {
                    name: evaluate_questions(episodes, policy, questions, step=step, name=name)
                    for step, (name, questions) in enumerate(sets.items(), 1)
                }
            evaluations.append({})
            for name, report in reports.items() if world.is_main else ():
                stats = {"policy": candidate.name, "set": name, **settings, **report.stats()}
                evaluations[-1][name] = EvaluatedPolicy(candidate.name, stats, report.episodes)
            if world.is_main:
                _write(candidate, evaluations[-1], stores[-1])
    return [*evaluations, earlier_evaluations] if earlier_evaluations else evaluations


def _indexed(
    search_services: SearchServices, questions: Sequence[Question], cfg: SearchConfig
) -> list[Question]:
    """Return the questions whose pages are in the index."""
    check_gold(questions, cfg.reward.weights["ndcg"])
    return hold_against_index(questions, partial(has_page, search_services.retriever), cfg.data)


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


def _score_settings(cfg: SearchConfig, search_services: SearchServices) -> dict[str, Any]:
    """Return what scores depend on: two evaluations are comparable if it is equal."""
    reward, answering = cfg.reward, search_services.answering
    return {
        "index": search_services.index.revision,
        "generator": None if answering is None else cfg.answering.generator.model,
        "images": None if answering is None else _images_text(cfg.answering.generator),
        "judge": None if answering is None else answering.judge_model,
        "weights": reward.model_dump(mode="json", exclude={"preset"}),
    }


def _images_text(cfg: GeneratorConfig) -> str:
    return _SHOWN if cfg.images == "shown" else f"originals of up to {cfg.max_pixels:,} pixels"


def _earlier(folder: Path, sets: Sets, settings: Mapping[str, Any]) -> dict[str, EvaluatedPolicy]:
    """Return the evaluations in a folder by set.

    Raises UserError if they have other questions or other score settings.
    """
    evaluations = {}
    for name, questions in sets.items():
        evaluated = EvaluationFiles(folder, name).read(
            "searched for {} questions",
            line_key,
            [(question.id, question.question) for question in questions],
        )
        # Earlier versions, which wrote no `images`, always sent the images as shown.
        images = _SHOWN if evaluated.stats.get("generator") else None
        scored_by = {"images": images} | dict(evaluated.stats)
        check_same_scoring(scored_by, settings, _SCORED, "the same config")
        evaluations[name] = replace(evaluated, examples=episodes_of(evaluated.examples))
    return evaluations


def _write(
    candidate: SearchCandidate, evaluations: Mapping[str, EvaluatedPolicy], store: TrajectoryStore
) -> None:
    """Write the files of each set, and remove an old comparison."""
    folder = candidate.folder
    for step, evaluated in enumerate(evaluations.values(), 1):
        store.write_step(step, evaluated.examples)
    write_view(folder / EPISODES)
    text = config_text(candidate.cfg, candidate.name if candidate.policy_inputs else None)
    for name, evaluated in evaluations.items():
        lines = (
            episode.model_dump(mode="json", exclude={"tokens"}) for episode in evaluated.examples
        )
        EvaluationFiles(folder, name).write(evaluated, lines, text, write_evaluation)
