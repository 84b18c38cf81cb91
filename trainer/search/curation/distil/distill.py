"""`search distill`: the rare right episodes of prompts that mostly fail, as rows to learn from."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scorekit.config import load_config
from scorekit.errors import UserError
from trainer.search.config import SearchConfig
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.dataset import Curated
from trainer.search.curation.distil.choose import PromptChoice, Written, choose, decided
from trainer.search.curation.distil.spool import RowSpool
from trainer.search.curation.distil.targets import repeated
from trainer.search.curation.known import Known
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, Sample
from trainer.search.curation.spool import Spool
from trainer.search.records import Trajectory
from trainer.search.training.sft_rows import EpisodeRows
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

KEPT = "rare success"
NOTHING_KNOWN = Known()


def make_distilled(
    prompts: Sequence[CuratedPrompt],
    wrote: Spool[Written],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    spool: RowSpool,
    known: Known = NOTHING_KNOWN,
) -> Curated:
    """The chosen episodes as rows in the spool, a decision for every episode of the prompts that
    are taken, and one for each prompt that is not. known: what other commands have decided.

    The stores are read once more, and of them only the steps that have an eligible episode. Raises
    UserError where no model is named, or a run has no config.
    """
    configs = learner_configs(read, cfg)
    made = Curated("distill", cfg.distill, read, known.inputs)
    rows: dict[str, str] = {}  # digest of what was written -> the row that has it

    def choices() -> Iterator[tuple[CuratedPrompt, PromptChoice]]:
        """Twice, since all of them would fill the memory."""
        return ((prompt, choose(prompt, wrote, cfg.distill, known.record)) for prompt in prompts)

    mask = repeated if cfg.distill.repeats == "mask" else _nothing
    faults = _fill((choice for _, choice in choices()), read, configs, spool, mask)
    for prompt, choice in choices():
        for decision in choice.decisions:
            made.decisions.append(decision)
        best: list[Sample] = []
        for sample in choice.eligible:
            why, more = faults.get(sample.ref), {}
            digest = wrote[sample.ref].digest
            if why is None and digest in rows and cfg.distill.duplicates == "drop":
                why, more = "a duplicate", {"duplicate_of": rows[digest]}
            taken = why is None and len(best) < cfg.distill.per_prompt
            why = why or (KEPT if taken else f"behind the best {cfg.distill.per_prompt}")
            if taken:
                best.append(sample)
                rows[digest] = sample.ref
            made.decisions.append(decided(sample, prompt, choice.rate, taken, why, **more))
    longest = spool.longest(one.row_id for one in made.decisions if one.kept)
    made.told = {
        "longest_row": longest,
        "learner": {name: _rendering(of) for name, of in configs.items()},
    }
    return made


def learner_configs(read: Sequence[CuratedRun], cfg: CurationConfig) -> dict[str, SearchConfig]:
    """Run -> its config with the model that learns: its episodes are rendered as they were played,
    under that model's template. Raises UserError."""
    if len({run.name for run in read}) < len(read):
        raise UserError("--run: two folders are of one run: its episodes would have one name")
    configs = {run.name: _config(run.folder) for run in read}
    last, own = configs[read[-1].name], cfg.distill
    policy = last.policy
    if own.model is not None:
        other = {"path": own.model, "tokenizer": None, "revision": None}
        policy = policy.model_copy(update=other)
    if policy.path is None:
        raise UserError(
            "distill.model is not set, and the last run's policy was a server: name the model that "
            "is to learn (--set distill.model=FOLDER)"
        )
    chat = last.chat if own.chat is None else own.chat
    update = {"policy": policy, "chat": chat}
    return {name: of.model_copy(update=update) for name, of in configs.items()}


def _config(folder: Path) -> SearchConfig:
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{path}: not there: it says how the run's prompts were rendered")
    return load_config(SearchConfig, path)


def _rendering(cfg: SearchConfig) -> dict[str, Any]:
    """What the ids of a row hang on."""
    told = cfg.model_dump(mode="json", include={"policy", "chat", "episode"})
    policy = {name: told["policy"][name] for name in ("path", "tokenizer", "revision")}
    return told | {"policy": policy}


def _fill(
    choices: Iterable[PromptChoice],
    read: Sequence[CuratedRun],
    configs: Mapping[str, SearchConfig],
    spool: RowSpool,
    mask: Callable[[Trajectory], list[int]],
) -> Spool[str]:
    """Put the eligible episodes' rows into the spool; under the ref of one that has none: why.
    mask: turns of one that are read and not learned, beside the invalid ones."""
    rates: Spool[float | None] = Spool(float)
    faults = Spool(str)
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
                row = rows.row(trajectory, store.picture, mask(trajectory))
                if isinstance(row, str):
                    faults.append(row, ref)
                else:
                    spool.put(_told(row, ref, run.name, trajectory, rate))
    return faults


def _nothing(trajectory: Trajectory) -> list[int]:
    return []


def _told(
    row: Mapping[str, Any], ref: str, run: str, trajectory: Trajectory, rate: float | None
) -> dict[str, Any]:
    """A row with where it comes from."""
    head = {"id": ref, "question_id": trajectory.question.id, "run": run}
    judge = trajectory.judged.score if trajectory.judged else None
    figures = {"judge": judge, "ndcg": trajectory.ndcg, "rate": rate}
    return {**head, "reward": row["reward"], **figures, **row, "id": ref}


def distilled_rows(
    made: Curated, spool: RowSpool, read: Sequence[CuratedRun]
) -> Iterator[tuple[dict[str, Any], Callable[[str], bytes]]]:
    """The rows that are kept, in their order, each with its run's pictures."""
    stores = {run.name: TrajectoryStore(run.folder / FOLDER) for run in read}
    for one in made.decisions:
        if one.kept:
            row = spool.get(one.row_id)
            yield row, stores[row["run"]].picture


def distill_page(made: Curated, prompts: Mapping[str, CuratedPrompt]) -> str:
    """report.html: which prompts were taken, and what became of their episodes."""
    by_prompt = Counter(str(one.figures["question_id"]) for one in made.decisions if one.kept)
    taken = {str(one.figures["question_id"]) for one in made.decisions if "judge" in one.figures}
    counts = [
        ["prompts of the data", len(prompts)],
        ["prompts that succeed rarely", len(taken)],
        ["of them, prompts with a row", len(by_prompt)],
        ["rows", by_prompt.total()],
    ]
    rates = Counter(
        f"{one.figures['rate']:.2f}"
        for one in made.decisions
        if one.figures["rate"] is not None and (one.kept or "judge" not in one.figures)
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
    return curation_page(made, "Distilled successes", sections, prompts)


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
