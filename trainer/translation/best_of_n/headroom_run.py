"""`scorekit headroom`: measure, before training, what there is to gain by a reward.

misc.run_dir gets headroom.json and headroom.html (of a set with a name, headroom-NAME.json), and a
folder of that name with the samples, their scores and log-probabilities, by which a killed command
goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Column, Table

from scorekit.errors import UserError
from scorekit.files import remove_folder
from scorekit.locks import hold_locks
from scorekit.paired import RESAMPLES, PairedStat
from scorekit.report.page import write_html
from scorekit.report.progress import progress_bar
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.devices import autocast
from trainer.rl.policy import load_policy, pad_token_id
from trainer.rl.rollout import Rollout, rollout_logprobs
from trainer.rl.sampler import preserve_rng_state
from trainer.runs.checkpoints.resume import weight_origin
from trainer.runs.config import DEFAULT_EVAL_SET, set_key
from trainer.runs.run_log import open_run_dir, write_json
from trainer.translation.best_of_n.candidates import (
    Candidate,
    CandidateFolder,
    OpenCandidates,
    SampledSource,
    StoredLines,
    check_made_from,
    open_candidates,
)
from trainer.translation.best_of_n.headroom import (
    OWN,
    REVERSE,
    Headroom,
    MeasuredChoice,
    in_words,
    measure,
    score_source,
)
from trainer.translation.best_of_n.replies import ReplyEnd
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example
from trainer.translation.prompting import OverlongPrompt, check_prompts

_ADVICE = "Start again with --overwrite, or choose another folder (--set misc.run_dir=...)"


@dataclass(frozen=True, slots=True)
class HeadroomFiles:
    """The files of a headroom.

    table: for the terminal.
    """

    result: Headroom
    json: Path
    page: Path
    table: Table


def run_headroom(
    cfg: TranslationConfig,
    name: str,
    examples: Sequence[Example],
    *,
    reverse: str | None = None,
    overwrite: bool = False,
) -> HeadroomFiles:
    """Measure the headroom of the policy on a set of examples.

    name: of the set.
    reverse: folder or hub id of a policy that translates back.
    overwrite: forget an earlier measurement in the folder; else it goes on.
    Raises UserError for whatever the user can fix.
    """
    samples = cfg.generation.num_samples_per_prompt
    stem = "headroom" if name == DEFAULT_EVAL_SET else f"headroom-{name}"
    run_dir = Path(cfg.misc.run_dir)
    folder = run_dir / stem
    back = None if reverse is None else _Reverse.check(cfg, reverse)
    open_run_dir(cfg.misc)
    lock = run_dir / f"{stem}.lock"
    with (
        hold_locks([(lock, False)], "measure in the same folder"),
        open_candidates(cfg, set_key(name), name, examples) as opened,
    ):
        if overwrite:
            remove_folder(folder)
        sources = CandidateFolder(folder, opened, greedy=True, advice=_ADVICE).collect()
        values = {OWN: _logprobs(folder / "own.jsonl", sources, _means_of_policy(opened))}
        if back is not None:
            check_made_from(folder / "reverse", back.made_from, _ADVICE)
            path = folder / "reverse/logprobs.jsonl"
            values[REVERSE] = _logprobs(path, sources, back.open(opened))
        scored = []
        with progress_bar(len(sources)) as advance:  # MBR compares each two samples
            for index, source in enumerate(sources):
                of_source = {kind: rows[index] for kind, rows in values.items()}
                scored.append(score_source(source, of_source))
                advance(1)
        result = measure(sources, scored, samples)
    facts: dict[str, Any] = {"policy": cfg.policy.path, "set": name, "reverse": reverse}
    facts["temperature"] = cfg.generation.temperature
    json_path, page = run_dir / f"{stem}.json", run_dir / f"{stem}.html"
    write_json(json_path, facts | result.as_json())
    _write_page(page, facts, result)
    return HeadroomFiles(result, json_path, page, result_table(result))


#: Returns the mean log-probability of each candidate of a source; None: it has none.
MeansOf = Callable[[SampledSource], list[float | None]]


def _logprobs(
    path: Path, sources: Sequence[SampledSource], means_of: MeansOf
) -> list[list[float | None]]:
    """Return the log-probabilities of all candidates, from the file where they are there."""
    stored = StoredLines(path)
    with progress_bar(len(sources), len(stored.lines)) as advance:
        for index, source in enumerate(sources):
            if index not in stored.lines:
                stored.add({"source": index, "means": means_of(source)})
                advance(1)
    return [stored.lines[index]["means"] for index in range(len(sources))]


def _means_of_policy(opened: OpenCandidates) -> MeansOf:
    """Return the policy's own means, at temperature 1."""
    learner = opened.learner
    device, cfg = opened.world.device, opened.cfg

    def means_of(source: SampledSource) -> list[float | None]:
        prompt = source.prompt.ids.tolist()
        pairs = [(prompt, candidate.ids) for candidate in source.candidates]
        with preserve_rng_state(learner.model, 0), autocast(device, cfg.misc.dtype):
            return list(_means(pairs, learner.model, learner.pad_id, cfg))

    return means_of


def _means(
    pairs: Sequence[tuple[list[int], list[int]]], model: Any, pad_id: int, cfg: TranslationConfig
) -> list[float]:
    """Return the mean log-probability of each completion after its prompt."""
    rollouts = [
        Rollout(
            group=0,
            trajectory_id=str(number),
            prompt_input_ids=prompt,
            completion_token_ids=completion,
            finish_reason="eos",
        )
        for number, (prompt, completion) in enumerate(pairs)
    ]
    rows = rollout_logprobs(rollouts, model, 1.0, pad_id, cfg.rl.micro_batch_tokens)
    return [math.fsum(row) / len(row) for row in rows]


@dataclass(frozen=True, slots=True)
class _Reverse:
    """A policy that translates back: how likely the source is after a translation."""

    cfg: PolicyConfig

    @classmethod
    def check(cls, cfg: TranslationConfig, path: str) -> _Reverse:
        """Return it, without its weights. Raises UserError if there is no such policy."""
        changes = {"path": path, "tokenizer": None, "revision": None, "reference_path": None}
        reverse = cls(cfg.policy.model_copy(update=changes | {"lora": LoraConfig()}))
        try:
            weight_origin(reverse.cfg)
        except UserError as error:
            raise UserError(f"--reverse: {error}") from None
        return reverse

    @property
    def made_from(self) -> Mapping[str, Any]:
        """Return what its log-probabilities depend on, beside the samples."""
        return {"reverse policy": weight_origin(self.cfg)["policy.path"]["digest"]}

    def open(self, opened: OpenCandidates) -> MeansOf:
        """Load the policy, and return its means, at temperature 1."""
        cfg, device = opened.cfg, opened.world.device
        model, tokenizer = load_policy(self.cfg, device)
        model.eval()
        pad_id, end = pad_token_id(model, tokenizer), ReplyEnd(model, tokenizer)

        def prompt_of(example: Example, candidate: Candidate, length: int) -> list[int] | None:
            # The source takes the place of a completion.
            generation = cfg.generation.model_copy(update={"max_new_tokens": length})
            if not candidate.text.strip():
                return None
            turned = Example(
                example.id,
                candidate.text,
                example.tgt_lang,
                example.src_lang,
                example.tgt_lang_code,
                example.src_lang_code,
            )
            try:
                (prompt,) = check_prompts([turned], model, tokenizer, generation)
            except OverlongPrompt:
                return None
            return prompt.ids.tolist()

        def means_of(source: SampledSource) -> list[float | None]:
            reply = end.reply_ids(source.example.src_text)
            prompts = [prompt_of(source.example, c, len(reply)) for c in source.candidates]
            pairs = [(prompt, reply) for prompt in prompts if prompt is not None]
            with torch.no_grad(), autocast(device, cfg.misc.dtype):
                means = iter(_means(pairs, model, pad_id, cfg))
            return [None if prompt is None else next(means) for prompt in prompts]

        return means_of


def result_table(result: Headroom) -> Table:
    """Return the table for the terminal, as wide as it needs to be."""
    titles, rows = table_rows(result)
    table = Table(
        titles[0],
        *(Column(title, justify="right", no_wrap=True) for title in titles[1:]),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for row in rows:
        table.add_row(*row)
    return table


def table_rows(result: Headroom) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of the table: without references those of the reward alone."""
    titles = ["", "reward", "change"]
    if result.has_references:
        titles += ["chrF", "change", "BLEU", "change", "rho"]
    titles.append("length")
    return titles, [_row(choice, result.has_references) for choice in result.choices]


def _row(choice: MeasuredChoice, has_references: bool) -> list[str]:
    cells = [choice.name, *_cells(choice.reward, 3)]
    if has_references:
        cells += [*_cells(choice.chrf, 2), *_cells(choice.bleu, 2)]
        rho = choice.rank_correlation
        cells.append("" if rho is None else f"{rho[0]:.2f}")
    return [*cells, f"{choice.length:.2f}"]


def _cells(stat: PairedStat | None, digits: int) -> tuple[str, str]:
    """Return a choice's value, and its change from greedy with the interval.

    stat: pairs the values of greedy (first) with those of the choice (second).
    """
    if stat is None or stat.second is None:
        return "–", ""
    value = f"{stat.second:.{digits}f}"
    if not stat.difference:
        return value, ""
    change = f"{stat.difference:+.{digits}f}"
    if stat.low is not None:
        change += f" [{stat.low:+.{digits}f}, {stat.high:+.{digits}f}]"
    return value, change


def notes(result: Headroom) -> list[str]:
    """Return what to know about the table: one sentence each."""
    lines = [
        f"{result.sources} sources, {result.samples} samples of each, {result.different:.1f} of "
        f"them different. Change: from greedy, 95 % interval ({RESAMPLES} resamples of sources)."
    ]
    if result.has_references:
        lines.append(
            "chrF: mean over sentences. BLEU: of the corpus. rho: rank correlation with chrF "
            "within a source. length: characters, relative to the references."
        )
    else:
        lines.append("length: characters, relative to greedy translations.")
    if result.left_out or result.unscored:
        lines.append(
            f"Left out: {result.left_out} sources and {result.unscored} samples without a reward."
        )
    return lines


def _write_page(path: Path, facts: Mapping[str, Any], result: Headroom) -> None:
    titles, rows = table_rows(result)
    write_html(
        path,
        "trainer/translation/best_of_n/headroom.html",
        title="Headroom of a reward",
        facts=facts,
        titles=titles,
        rows=rows,
        notes=notes(result),
        words=in_words(result),
    )
