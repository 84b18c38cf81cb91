"""`scorekit evaluate`: write the evaluation of a policy, and compare it with another one.

misc.run_dir gets the files of trainer/runs/evaluation/files.py, with one episode per line. The
folder `evaluation/` has the episodes with their images, one step per set, and their page; it is
separate because misc.run_dir may have a training run. Files of an earlier call are replaced only
with --overwrite. Paid answers stay in answers.sqlite and are not paid for twice.

Under torchrun or accelerate the processes share the questions; the main one writes and prints.

Below the command stand what a training evaluates with, too (`evaluate_questions`), and the policies
of an evaluation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.files import remove_folder
from scorekit.net.addresses import address_of
from scorekit.paid.account import BudgetExceeded
from trainer.rl.devices import autocast, prepare_torch
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy import stop_token_ids, unwrap_peft
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.config import set_key
from trainer.runs.evaluation.files import (
    AGAINST,
    EvaluatedPolicy,
    EvaluationFiles,
    EvaluationOutcome,
    EvaluationReport,
    check_folder,
    check_same_scoring,
    config_text,
    has_evaluation,
    reports_by_set,
)
from trainer.runs.run_log import read_jsonl
from trainer.search.answer.config import GeneratorConfig
from trainer.search.config import SearchConfig
from trainer.search.data import check_gold, hold_against_index
from trainer.search.evaluation.report import write_comparison, write_evaluation
from trainer.search.evaluation.stats import (
    compare_episodes,
    compute_stats,
    episodes_of,
    line_key,
    stats_by,
)
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.episode import Policy
from trainer.search.rollout.episode_runner import EpisodeRunner
from trainer.search.rollout.sampled import PolicyInputs, SampledPolicy, inspect_policy
from trainer.search.services import SearchServices, has_page, open_policy, open_services, run_name
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
_SEED = 0  # of sampled turns, so the same policy gives the same episodes
#: Stats that come last in a report.
_LAST_STATS = ("samples", "reward_mean", "reward_coverage")


def run_evaluation(
    cfg: SearchConfig, sets: Sets, against: str | None = None, *, overwrite: bool = False
) -> list[EvaluationOutcome]:
    """Evaluate the policy on sets of questions by name, and compare it with `against`: another
    policy's folder, hub id or URL (`URL#MODEL`), or the folder of an earlier evaluation, whose
    episodes are used.

    A policy may be a folder of adapters, such as a run's checkpoint.
    overwrite: replace files of an earlier call. Every process of the world must call it; the main
    one gets the outcomes.
    Raises UserError for what the user can fix, if possible before weights are loaded;
    ServiceUnreachable.
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
        sets = {
            name: _indexed_questions(search_services, questions, cfg)
            for name, questions in sets.items()
        }
        for candidate in candidates:
            sets = _fitting(candidate, sets, world)
        settings = _score_settings(cfg, search_services)
        earlier_evaluations: dict[str, EvaluatedPolicy] = {}
        if earlier is not None:
            world.on_main(lambda: earlier_evaluations.update(_earlier(earlier, sets, settings)))
        retriever, stream = search_services.retriever, search_services.stream
        for candidate in candidates:
            with open_candidate(candidate, world) as policy:
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


def _indexed_questions(
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


class SearchReport(EvaluationReport):
    """The stats of an evaluation (`stats.py`); its examples are episodes as JSON.

    by_document, by_type: some stats of each document and of each type of question; [] for a single
    one. They are lists of rows, because a tracker would log each number of a mapping, and there may
    be a thousand documents.
    """

    unrewardable = "goldless"

    @property
    def episodes(self) -> list[Trajectory]:
        """Return the examples as trajectories."""
        return episodes_of(self.examples)


def evaluate_questions(
    episodes: EpisodeRunner,
    policy: Policy,
    questions: Sequence[Question],
    *,
    step: int,
    name: str,
) -> SearchReport:
    """Run one episode of each question and get its answer, verdict and reward.

    The processes share the episodes, and each gets the full report.

    name: of the set.
    step: of the run; both are in the ids of the episodes.
    Raises BudgetExceeded, ServiceUnreachable.
    """
    started = time.monotonic()
    finished = episodes.run(policy, list(enumerate(questions)), step=step, kind=f"{name}-")
    rewarded = list(episodes.collect_rewards(step, finished).values())
    return report_on(rewarded, time.monotonic() - started)


def report_on(episodes: Sequence[Trajectory], seconds: float) -> SearchReport:
    """Return the report of rewarded episodes; its examples are without their ids."""
    values: dict[str, Any] = compute_stats(episodes)
    values |= {key: values.pop(key) for key in _LAST_STATS}
    for kind in ("document", "type"):
        groups = stats_by(kind, episodes)
        values[f"by_{kind}"] = [{kind: name} | stats for name, stats in groups.items()]
    values["seconds"] = seconds
    lines = [episode.model_dump(mode="json", exclude={"tokens"}) for episode in episodes]
    return SearchReport(values, lines)


def read_reports(folder: Path) -> dict[str, list[tuple[int, SearchReport]]]:
    """Return (update, report) of the evaluations in a run's eval.jsonl, by set name."""
    return reports_by_set(folder, read_jsonl(folder / "eval.jsonl"), SearchReport)


@dataclass(frozen=True, slots=True)
class SearchCandidate:
    """A policy to evaluate.

    name: as the user named it.
    cfg: with the model to load and the sampling settings.
    folder: output folder of its evaluation.
    adapters: folder of its adapters.
    policy_inputs: None behind a URL.
    served: its name at the vLLM server that samples.
    """

    name: str
    cfg: SearchConfig
    folder: Path
    adapters: Path | None = None
    policy_inputs: PolicyInputs | None = None
    served: str | None = None


def candidate_of(cfg: SearchConfig, folder: Path, named: str | None = None) -> SearchCandidate:
    """Return the config's policy, or another one by folder, hub id or URL.

    named: a URL may have the form `URL#MODEL`; the default is the model of the config. Raises
    UserError if the policy does not exist or does not match the config.
    """
    if named is not None:
        cfg = _with_policy(cfg, named)
    if cfg.server.url is not None:
        model = f" ({cfg.server.model})" if cfg.server.model else ""
        return SearchCandidate(f"{address_of(cfg.server.url)}{model}", cfg, folder)
    if cfg.policy.path is None:
        raise UserError("policy.path: not set. Name a model's folder or hub id, or set server.url.")
    name = str(cfg.policy.path)
    base, adapters = resolve_base_model(cfg.policy)
    cfg = cfg.model_copy(update={"policy": base})
    policy_inputs = inspect_policy(cfg)
    served = probe_engine(
        cfg.generation, adapters=base.lora.r > 0, images=policy_inputs.reader is not None
    )
    return SearchCandidate(name, cfg, folder, adapters, policy_inputs, served)


def _with_policy(cfg: SearchConfig, named: str) -> SearchConfig:
    """Return the config with another policy."""
    if named.startswith(("http://", "https://")):
        url, _, model = named.partition("#")
        server = {"url": url, "model": model or cfg.server.model}
        sampling = cfg.generation.model_copy(update={"engine": "generate"})
        update = {"server": cfg.server.model_copy(update=server), "generation": sampling}
        return cfg.model_copy(update=update)
    policy = {"path": named, "tokenizer": None, "revision": None}
    return cfg.model_copy(
        update={
            "policy": cfg.policy.model_copy(update=policy),
            "server": cfg.server.model_copy(update={"url": None}),
        }
    )


@contextmanager
def open_candidate(candidate: SearchCandidate, world: DistributedContext) -> Iterator[Policy]:
    """Open the policy of a candidate. Raises UserError."""
    cfg, policy_inputs = candidate.cfg, candidate.policy_inputs
    if policy_inputs is None:
        with open_policy(cfg) as policy:
            yield policy
        return
    model, _ = load_on_base(cfg.policy, candidate.adapters, world.device)
    if world.is_sharded:
        world.shard(unwrap_peft(model))  # these weights generate
    sampler = open_sampler(
        cfg.generation,
        candidate.served,
        model,
        policy_inputs.tokenizer,
        world,
        adapters=cfg.policy.lora.r > 0,
        run_dir=cfg.misc.run_dir,
        role="evaluate",
        banned_token_ids=policy_inputs.banned_token_ids,
    )
    with closing(sampler), autocast(world.device, cfg.misc.dtype):
        sampler.sync_weights(model, 0)
        yield SampledPolicy(
            sampler,
            policy_inputs.ids(cfg, stop_token_ids(unwrap_peft(model), policy_inputs.tokenizer)),
            cfg.generation,
            name=candidate.name,
            context=policy_inputs.context,
            world=world,
            with_logprobs=False,
            seed=_SEED,
            deterministic=cfg.rollout.deterministic,
        )
