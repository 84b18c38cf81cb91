"""The step `distill`: turn rare right episodes into training rows.

Prompts with rare successes and their best episodes are chosen by stats only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from scorekit.config import Config
from scorekit.errors import UserError
from scorekit.numeric import above
from trainer.chat.config import ChatConfig
from trainer.search.config import SearchConfig
from trainer.search.records import Trajectory
from trainer.search.steps.episodes import (
    Combine,
    CuratedPrompt,
    CuratedRun,
    EpisodeSummary,
    has_all_evidence,
    refs,
    run_config,
)
from trainer.search.steps.shared_config import SharedConfig
from trainer.search.steps.step import Decision, Outcome, Section, Step, Work
from trainer.search.steps.targets import RejectionReason, repeated, target_error
from trainer.search.trajectories.store import FOLDER, TrajectoryStore
from trainer.sft.curation_record import CurationRecord

if TYPE_CHECKING:  # it imports torch
    from trainer.search.steps.sft_rows import SftRowFile

KEPT = "rare success"

#: Sort keys of a prompt's right episodes: the judge's score and NDCG in descending order; searches,
#: crops, turns and length (letters written) in ascending order.
Rank = Literal["judge", "ndcg", "searches", "crops", "turns", "length"]


class DistillConfig(Config):
    """The rules for rare successes: right episodes of prompts that mostly fail."""

    model: str | None = Field(
        None,
        description="The model that is to learn, a folder or hub id; null: the last run's policy.",
    )
    chat: ChatConfig | None = Field(
        None, description="How its messages become text; null: as in the last run."
    )
    success: float = Field(
        1.0, gt=0, le=1, description="An episode is right with this score of the judge."
    )
    combine: Combine = Field(
        "all", description="Which episodes of a prompt count, as for `buckets`."
    )
    rate_at_most: float = Field(
        0.5, gt=0, le=1, description="Prompts of which at most this share of episodes was right."
    )
    successes_at_most: int | None = Field(
        None, ge=1, description="Prompts of which at most so many were right; null: any number."
    )
    ndcg_above: float | None = Field(
        None, ge=0, lt=1, description="Only episodes with a higher NDCG than this; null: any."
    )
    evidence: Literal["shown", "any"] = Field(
        "shown",
        description="shown: only episodes whose answer rests on every gold page or an alternative "
        "to it, or on pages of which `hallucinations` says (--record) that they carry the same; "
        "any: also lucky answers.",
    )
    duplicates: Literal["drop", "keep"] = Field(
        "drop", description="An episode that writes the same to the same question as another row."
    )
    per_prompt: int = Field(4, ge=1, description="Episodes of a prompt, the best of them.")
    order: list[Rank] = Field(
        default=["judge", "ndcg", "searches", "turns"],
        description="Which are the best: by these, one behind the other.",
    )
    ended: Literal["complete", "any"] = Field(
        "complete",
        description="complete: only episodes whose policy ended the search; any: also those that "
        "were cut short, without the forced turn.",
    )
    invalid: Literal["mask", "drop"] = Field(
        "mask",
        description="An episode with an invalid turn: mask: the turn is read and not learned; "
        "drop: it is no row.",
    )
    repeats: Literal["drop", "mask"] = Field(
        "drop",
        description="The same of one in which a search asks what the search before it has asked.",
    )

    @field_validator("order")
    @classmethod
    def _each_once(cls, value: list[Rank]) -> list[Rank]:
        if not value or len(set(value)) < len(value):
            raise ValueError("name each once, and one at least")
        return value


@dataclass(frozen=True, slots=True)
class EpisodeText:
    """Data about the text of an episode.

    rejection: why it is not an example.
    repeats: whether a query repeats the one before.
    length: in letters.
    evidence: whether the answer rests on pages with the facts.
    digest: of the question and the turns, equal for duplicates.
    """

    rejection: RejectionReason | None
    repeats: bool
    length: int
    evidence: bool
    digest: str


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """The choice for a prompt.

    eligible: the episodes that may be rows, the best first.
    rate: share of right episodes among those with a score; None without one."""

    rate: float | None
    eligible: list[EpisodeSummary]
    decisions: list[Decision]


class Distill(Step[DistillConfig]):
    """Turn the rare right episodes of prompts that mostly fail into rows for `scorekit sft`."""

    name = "distill"
    title = "Distilled successes"
    config = DistillConfig
    options = (*("run", "out", "record", "verified", "exclude", "config", "set_", "overwrite"),)
    paths = ("distill.model",)
    drops = True

    def note(
        self, trajectory: Trajectory, sample: EpisodeSummary, settings: DistillConfig
    ) -> EpisodeText | None:
        """Return data about the text of an episode with a judge's score above 0."""
        return text_of(trajectory) if sample.judge else None

    def resources(self, work: Work[DistillConfig]) -> AbstractContextManager[Any]:
        """Open the file of the rows."""
        from trainer.search.steps.sft_rows import SftRowFile

        return nullcontext(SftRowFile())

    def decide(self, work: Work[DistillConfig], answers: Mapping[str, Any]) -> Outcome:
        """Put the rows of the chosen episodes into the file and return all decisions.

        A chosen prompt has a decision for each episode, another prompt has one for all. Only steps
        with an eligible episode are read again. Raises UserError if no model is named or a run has
        no config.
        """
        configs = learner_configs(work)
        outcome, spool = self.outcome(work), work.resources
        written, cfg = work.notes, work.settings
        rows: dict[str, str] = {}  # digest of what was written -> the row that has it

        def choices() -> Iterator[tuple[CuratedPrompt, PromptChoice]]:
            """Yield the choices; called twice: all of them would need much memory."""
            return (
                (prompt, choose(prompt, written, cfg, work.prior.record)) for prompt in work.prompts
            )

        masks_repeats = cfg.repeats == "mask"
        reasons = _fill(
            (choice for _, choice in choices()), work.runs, configs, spool, masks_repeats
        )
        for prompt, choice in choices():
            outcome.decisions += choice.decisions
            best: list[EpisodeSummary] = []
            for sample in choice.eligible:
                reason, extra = reasons.get(sample.ref), {}
                digest = written[sample.ref].digest
                if reason is None and digest in rows and cfg.duplicates == "drop":
                    reason, extra = "a duplicate", {"duplicate_of": rows[digest]}
                is_chosen = reason is None and len(best) < cfg.per_prompt
                reason = reason or (KEPT if is_chosen else f"behind the best {cfg.per_prompt}")
                if is_chosen:
                    best.append(sample)
                    rows[digest] = sample.ref
                outcome.decisions.append(
                    decision_about(sample, prompt, choice.rate, is_chosen, reason, **extra)
                )
        longest = spool.longest(outcome.kept_ids)
        outcome.extra = {
            "longest_row": longest,
            "learner": {name: _rendering(run_cfg) for name, run_cfg in configs.items()},
        }
        return outcome

    def write_rows(self, work: Work[DistillConfig], outcome: Outcome, folder: Path) -> bool:
        """Write the rows and their images."""
        from trainer.search.steps.sft_rows import write_sft_rows

        stores = {run.name: TrajectoryStore(run.folder / FOLDER) for run in work.runs}
        rows = map(work.resources.get, outcome.kept_ids)
        write_sft_rows(folder, ((row, stores[row["run"]].read_image) for row in rows))
        return True

    def sections(self, work: Work[DistillConfig], outcome: Outcome) -> list[Section]:
        """Return the chosen prompts and the outcomes of their episodes."""
        prompts = work.prompts
        by_prompt = Counter(
            str(decision.stats["question_id"]) for decision in outcome.decisions if decision.is_kept
        )
        chosen = {
            str(decision.stats["question_id"])
            for decision in outcome.decisions
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
            for decision in outcome.decisions
            if decision.stats["rate"] is not None
            and (decision.is_kept or "judge" not in decision.stats)
        )
        return [
            Section("From prompts to rows", [], ["", "count"], counts),
            Section(
                "Success rates",
                ["Of prompts that were not taken, and of rows."],
                ["rate", "count"],
                [[rate, count] for rate, count in sorted(rates.items())],
            ),
        ]

    def lines(self, work: Work[DistillConfig], outcome: Outcome) -> list[str]:
        """Return the length of the longest row."""
        from trainer.search.steps.sft_rows import longest_lines

        return longest_lines(outcome.extra["longest_row"])

    def in_loop(self, cfg: SharedConfig, policy: str) -> None:
        """Name the policy of the loop as the model that is to learn."""
        cfg.distill.model = cfg.distill.model or policy


def learner_configs(work: Work[DistillConfig]) -> dict[str, SearchConfig]:
    """Return the config of each run with the model to train.

    Episodes are rendered with the run's settings and that model's template. Raises UserError.
    """
    read, section = work.runs, work.settings
    if len({run.name for run in read}) < len(read):
        raise UserError(
            "--run: two folders are of the same run, so ids of episodes would not be unique."
        )
    missing = ", but has the settings of the run's prompts"
    configs = {run.name: run_config(run.folder, missing) for run in read}
    last = configs[read[-1].name]
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
    spool: SftRowFile,
    masks_repeats: bool,
) -> dict[str, str]:
    """Put the rows of eligible episodes into the spool; return why others have none, by ref.

    masks_repeats: repeated queries get no loss, in addition to the invalid turns.
    """
    from trainer.search.steps.sft_rows import EpisodeRows

    rates: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    steps: dict[str, set[int]] = {run.name: set() for run in read}
    for choice in choices:
        for sample in choice.eligible:
            rates[sample.ref] = choice.rate
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
                    reasons[ref] = row
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


def text_of(trajectory: Trajectory) -> EpisodeText:
    """Return data about the text of an episode."""
    texts = [turn.text for turn in trajectory.turns if not turn.forced]
    return EpisodeText(
        rejection=target_error(trajectory),
        repeats=bool(repeated(trajectory)),
        length=sum(map(len, texts)),
        evidence=has_all_evidence(trajectory),
        digest=_digest([trajectory.question.question, *texts]),
    )


def _digest(texts: Sequence[str]) -> str:
    """Return the SHA-256 of texts without their blanks."""
    return hashlib.sha256(
        json.dumps(["".join(text.split()) for text in texts]).encode()
    ).hexdigest()


def choose(
    prompt: CuratedPrompt,
    written_by_ref: Mapping[str, EpisodeText],
    cfg: DistillConfig,
    record: CurationRecord,
) -> PromptChoice:
    """Return the choice for a prompt.

    A rejected prompt has one decision for all episodes, a chosen one has a decision for each
    episode that is not eligible.
    record: earlier decisions about prompts and episodes.
    """
    counted, rate, right = _rate(prompt, cfg)
    stats = {"question_id": prompt.question.id, "rate": rate, "right": right}
    reason = record.no_example(prompt.question.id, None) if right else None
    if reason := reason or _not_taken(prompt, rate, right, cfg):
        decision = Decision(prompt.question.id, False, reason, stats, refs(prompt))
        return PromptChoice(rate, [], [decision])
    counts = {sample.ref for sample in counted}
    eligible, decisions = [], []
    for sample in prompt.samples:
        written = written_by_ref.get(sample.ref)
        reason = _no_row(sample, sample.ref in counts, written, cfg)
        reason = reason or _no_evidence(prompt, sample, written, cfg, record)
        if reason:
            decisions.append(decision_about(sample, prompt, rate, False, reason))
        else:
            eligible.append(sample)
    eligible.sort(key=lambda sample: _key(sample, written_by_ref[sample.ref], cfg.order))
    return PromptChoice(rate, eligible, decisions)


def decision_about(
    sample: EpisodeSummary,
    prompt: CuratedPrompt,
    rate: float | None,
    is_kept: bool,
    reason: str,
    **more: str,
) -> Decision:
    """Return the decision about an episode.

    more: further values.
    """
    stats = {
        "question_id": prompt.question.id,
        "rate": rate,
        "judge": sample.judge,
        "ndcg": sample.ndcg,
        "searches": sample.searches,
        "turns": sample.turns,
        "end": sample.end,
        **more,
    }
    return Decision(sample.ref, is_kept, reason, stats, [sample.ref])


def succeeds_rarely(prompt: CuratedPrompt, cfg: DistillConfig) -> bool:
    """Return whether a prompt has right episodes, but few enough of them."""
    _, rate, right = _rate(prompt, cfg)
    return _not_taken(prompt, rate, right, cfg) is None


def _rate(
    prompt: CuratedPrompt, cfg: DistillConfig
) -> tuple[list[EpisodeSummary], float | None, int]:
    """Return (episodes that count, share of right ones, number of right ones)."""
    counted = prompt.counted_episodes(cfg.combine, "judge")
    right = sum(sample.is_right(cfg.success) for sample in counted)
    return counted, right / len(counted) if counted else None, right


def _not_taken(
    prompt: CuratedPrompt, rate: float | None, right: int, cfg: DistillConfig
) -> str | None:
    """Return why a prompt is rejected, or None."""
    if rate is None and not prompt.samples:
        return "no episode"
    if rate is None:
        return "none is judged"
    if not right:
        return "none is right"
    if above(rate, cfg.rate_at_most):
        return f"more than {cfg.rate_at_most:g} of them are right"
    if cfg.successes_at_most is not None and right > cfg.successes_at_most:
        return f"more than {cfg.successes_at_most} of them are right"
    return None


def _no_row(
    sample: EpisodeSummary, counts: bool, written: EpisodeText | None, cfg: DistillConfig
) -> str | None:
    """Return why an episode is not eligible by its own values, or None."""
    if sample.judge is None:
        return "not judged"
    if not counts:
        return "of another step or run than those that count"
    if written is None or not sample.is_right(cfg.success):
        return "not right"
    if sample.end == "failed" or (cfg.ended == "complete" and sample.end != "complete"):
        return f"ended as {sample.end}"
    if cfg.ndcg_above is not None and (
        sample.ndcg is None or not above(sample.ndcg, cfg.ndcg_above)
    ):
        return "no NDCG" if sample.ndcg is None else f"an NDCG of {cfg.ndcg_above:g} at most"
    if cfg.invalid == "drop" and sample.invalid:
        return "an invalid turn"
    if cfg.repeats == "drop" and written.repeats:
        return "a query repeated"
    return written.rejection


def _no_evidence(
    prompt: CuratedPrompt,
    sample: EpisodeSummary,
    written: EpisodeText | None,
    cfg: DistillConfig,
    record: CurationRecord,
) -> str | None:
    """Return why a right answer has no evidence, or None if it has."""
    if dropped_by := record.no_example(prompt.question.id, sample.ref):
        return dropped_by
    has_evidence_pages = written is not None and written.evidence
    if cfg.evidence == "any" or has_evidence_pages or record.episode(sample.ref) is not None:
        return None
    return "no evidence shown"


def _key(sample: EpisodeSummary, written: EpisodeText, order: list[Rank]) -> tuple[float, ...]:
    """Return the sort key: the best first, missing values last."""
    values: dict[Rank, float] = {
        "judge": math.inf if sample.judge is None else -sample.judge,
        "ndcg": math.inf if sample.ndcg is None else -sample.ndcg,
        "searches": sample.searches,
        "crops": sample.crops,
        "turns": sample.turns,
        "length": written.length,
    }
    return tuple(values[name] for name in order)
