"""The command `search distill`: turn rare right episodes into training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scorekit.errors import UserError
from trainer.search.config import SearchConfig
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.dataset import CurationResult
from trainer.search.curation.disk_spool import DiskSpool
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.prior_decisions import PriorDecisions
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, EpisodeSummary, run_config
from trainer.search.distillation.choose import EpisodeText, PromptChoice, choose, decided
from trainer.search.distillation.spool import RowSpool
from trainer.search.distillation.targets import repeated
from trainer.search.records import Trajectory
from trainer.search.training.sft_rows import EpisodeRows
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

KEPT = "rare success"


def make_distilled(
    prompts: Sequence[CuratedPrompt],
    written: DiskSpool[EpisodeText],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    spool: RowSpool,
    earlier: PriorDecisions,
) -> CurationResult:
    """Put the rows of the chosen episodes into the spool and return all decisions.

    A chosen prompt has a decision for each episode, another prompt has one for all. earlier:
    decisions of other commands. Only steps with an eligible episode are read again. Raises
    UserError if no model is named or a run has no config.
    """
    configs = learner_configs(read, cfg)
    curated = CurationResult("distill", cfg.distill, read, earlier.inputs)
    rows: dict[str, str] = {}  # digest of what was written -> the row that has it

    def choices() -> Iterator[tuple[CuratedPrompt, PromptChoice]]:
        """Yield the choices; called twice, because all of them would fill the memory."""
        return (
            (prompt, choose(prompt, written, cfg.distill, earlier.record)) for prompt in prompts
        )

    masks_repeats = cfg.distill.repeats == "mask"
    reasons = _fill((choice for _, choice in choices()), read, configs, spool, masks_repeats)
    for prompt, choice in choices():
        for decision in choice.decisions:
            curated.decisions.append(decision)
        best: list[EpisodeSummary] = []
        for sample in choice.eligible:
            reason, extra = reasons.get(sample.ref), {}
            digest = written[sample.ref].digest
            if reason is None and digest in rows and cfg.distill.duplicates == "drop":
                reason, extra = "a duplicate", {"duplicate_of": rows[digest]}
            is_chosen = reason is None and len(best) < cfg.distill.per_prompt
            reason = reason or (KEPT if is_chosen else f"behind the best {cfg.distill.per_prompt}")
            if is_chosen:
                best.append(sample)
                rows[digest] = sample.ref
            curated.decisions.append(
                decided(sample, prompt, choice.rate, is_chosen, reason, **extra)
            )
    longest = spool.longest(decision.row_id for decision in curated.decisions if decision.is_kept)
    curated.manifest_extra = {
        "longest_row": longest,
        "learner": {name: _rendering(run_cfg) for name, run_cfg in configs.items()},
    }
    return curated


def learner_configs(read: Sequence[CuratedRun], cfg: CurationConfig) -> dict[str, SearchConfig]:
    """Return the config of each run with the model to train.

    Episodes are rendered with the run's settings and that model's template. Raises UserError.
    """
    if len({run.name for run in read}) < len(read):
        raise UserError(
            "--run: two folders are of the same run, so ids of episodes would not be unique."
        )
    missing = ", but has the settings of the run's prompts"
    configs = {run.name: run_config(run.folder, missing) for run in read}
    last, section = configs[read[-1].name], cfg.distill
    policy = last.policy
    if section.model is not None:
        model_update = {"path": section.model, "tokenizer": None, "revision": None}
        policy = policy.model_copy(update=model_update)
    if policy.path is None:
        raise UserError(
            "distill.model: not set, and the last run's policy was a server. Name the model to "
            "train (--set distill.model=FOLDER)."
        )
    chat = last.chat if section.chat is None else section.chat
    update = {"policy": policy, "chat": chat}
    return {name: run_cfg.model_copy(update=update) for name, run_cfg in configs.items()}


def _rendering(cfg: SearchConfig) -> dict[str, Any]:
    """Return the settings on which the ids of a row depend."""
    settings = cfg.model_dump(mode="json", include={"policy", "chat", "episode"})
    policy = {name: settings["policy"][name] for name in ("path", "tokenizer", "revision")}
    return settings | {"policy": policy}


def _fill(
    choices: Iterable[PromptChoice],
    read: Sequence[CuratedRun],
    configs: Mapping[str, SearchConfig],
    spool: RowSpool,
    masks_repeats: bool,
) -> DiskSpool[str]:
    """Put the rows of eligible episodes into the spool; return why others have none, by ref.

    masks_repeats: repeated queries get no loss, in addition to the invalid turns.
    """
    rates: DiskSpool[float | None] = DiskSpool(float)
    reasons = DiskSpool(str)
    steps: dict[str, set[int]] = {run.name: set() for run in read}
    for choice in choices:
        for sample in choice.eligible:
            rates.append(choice.rate, sample.ref)
            steps[sample.name].add(sample.step)
    for run in read:
        if not steps[run.name]:
            continue
        store, rows = TrajectoryStore(run.folder / FOLDER), EpisodeRows(configs[run.name])
        for trajectory in store.read(sorted(steps[run.name])):
            ref = f"{run.name}/{trajectory.trajectory_id}"
            if (rate := rates.get(ref)) is not None:
                masked = repeated(trajectory) if masks_repeats else []
                row = rows.row(trajectory, store.read_image, masked)
                if isinstance(row, str):
                    reasons.append(row, ref)
                else:
                    spool.put(_with_origin(row, ref, run.name, trajectory, rate))
    return reasons


def _with_origin(
    row: Mapping[str, Any], ref: str, run: str, trajectory: Trajectory, rate: float | None
) -> dict[str, Any]:
    """Return a row with the ids and values of its episode."""
    head = {"id": ref, "question_id": trajectory.question.id, "run": run}
    judge = trajectory.judged.score if trajectory.judged else None
    values = {"judge": judge, "ndcg": trajectory.ndcg, "rate": rate}
    return {**head, "reward": row["reward"], **values, **row, "id": ref}


def distill_page(curated: CurationResult, prompts: Mapping[str, CuratedPrompt]) -> str:
    """Return report.html: the chosen prompts and the outcomes of their episodes."""
    by_prompt = Counter(
        str(decision.stats["question_id"]) for decision in curated.decisions if decision.is_kept
    )
    chosen = {
        str(decision.stats["question_id"])
        for decision in curated.decisions
        if "judge" in decision.stats
    }
    counts = [
        ["prompts of the data", len(prompts)],
        ["prompts that succeed rarely", len(chosen)],
        ["of them, prompts with a row", len(by_prompt)],
        ["rows", by_prompt.total()],
    ]
    rates = Counter(
        f"{decision.stats['rate']:.2f}"
        for decision in curated.decisions
        if decision.stats["rate"] is not None
        and (decision.is_kept or "judge" not in decision.stats)
    )
    sections = [
        Section("From prompts to rows", [], ["", "count"], counts),
        Section(
            "Success rates",
            ["Of prompts that were not taken, and of rows."],
            ["rate", "count"],
            [[rate, count] for rate, count in sorted(rates.items())],
        ),
    ]
    return curation_page(curated, "Distilled successes", sections, prompts)
