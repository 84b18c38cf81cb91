"""Write the folder of a step atomically, with its page; equal inputs give equal bytes.

OUT/
    rows.jsonl, rows.parquet            kept rows, in the form of training data
    decisions.jsonl, decisions.parquet  every row, kept or dropped: the reason, its stats, and its
                                        episodes
    manifest.json                       the command, its settings, digests of its inputs, counts
    record.jsonl                        only of diagnose, hallucinations and verify: all decisions
                                        so far, with those of their inputs (--record)
    report.html                         a page for people
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.files import remove_temporaries, replacing_folder
from trainer.search.steps.episodes import CuratedPrompt
from trainer.search.steps.step import Decision, Outcome, Step, Work
from trainer.sft.curation_record import FILE

_AT_ONCE = 200  # max rows in a row group of Parquet


def check_out(out: Path, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Raise UserError if `out` must not be replaced.

    inputs: paths that the command reads.
    """
    if out.resolve() in [path.resolve() for path in inputs]:
        raise UserError(
            f"{out}: an input of the command, which would be replaced. Name another --out."
        )
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / "manifest.json").is_file()):
        raise UserError(f"{out}: not a folder of a curation command. Name a new one with --out.")
    if any(out.iterdir()) and not overwrite:
        raise UserError(f"{out}: already exists. Set --overwrite, or name another --out.")


def write_table(stem: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines and as Parquet, in batches.

    Parquet has mappings as JSON texts, because a column has one type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines, schema = stem.with_suffix(".jsonl"), pa.schema([])
    with lines.open("w", encoding="utf-8") as file:
        for group in _batches(rows, _AT_ONCE):
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in group)
            names = dict.fromkeys(name for row in group for name in row)
            group_schema = pa.table(_columns(group, names)).schema
            schema = pa.unify_schemas([schema, group_schema], promote_options="permissive")
    schema = schema if schema.names else pa.schema([("id", pa.string())])
    with (
        lines.open(encoding="utf-8") as file,
        pq.ParquetWriter(stem.with_suffix(".parquet"), schema, compression="zstd") as table,
    ):
        for group in _batches(map(json.loads, file), _AT_ONCE):
            table.write_table(pa.table(_columns(group, schema.names), schema=schema))


def _batches(rows: Iterable[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    """Yield lists of at most `size` rows."""
    remaining = iter(rows)
    while batch := list(islice(remaining, size)):
        yield batch


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    return {name: [_cell(row.get(name)) for row in rows] for name in names}


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value


def write_outcome(out: Path, step: Step[Any], work: Work[Any], outcome: Outcome) -> None:
    """Write the folder and replace an earlier one; remove leftovers of killed commands."""
    page, files = page_of(step, work, outcome), step.files(work, outcome)
    remove_temporaries(out.parent, escape(out.name))
    with replacing_folder(out) as folder:
        if not step.write_rows(work, outcome, folder):
            write_table(folder / "rows", outcome.rows)
        write_table(folder / "decisions", (decision.line() for decision in outcome.decisions))
        manifest = json.dumps(outcome.manifest(), ensure_ascii=False, indent=1)
        (folder / "manifest.json").write_text(manifest + "\n", encoding="utf-8")
        (folder / "report.html").write_text(page, encoding="utf-8")
        if outcome.record is not None:
            for decision in outcome.decisions:
                outcome.record.update(step.entries(decision.line()))
            outcome.record.write(folder / FILE)
        for name, content in files.items():
            (folder / name).write_bytes(content)


_EXAMPLES = 8  # of each reason


_EPISODES = 6  # max ids for a row


def page_of(step: Step[Any], work: Work[Any], outcome: Outcome) -> str:
    """Return report.html of a step: settings, counts, its sections, and examples of each reason.

    It is one file without scripts, and it loads nothing; all text in it is escaped.
    """
    from scorekit.report.page import render_html

    return render_html(
        "trainer/search/steps/page.html",
        title=step.title,
        manifest=outcome.manifest(),
        sections=step.sections(work, outcome),
        examples=_examples(outcome.decisions, work.by_id),
        cell=as_cell,
        is_number=_is_number,
    )


def means_chart(decisions: Iterable[Decision], key: str, label: str, *bounds: float) -> str | None:
    """Return a histogram of the means that decisions have under a key, with lines at the bounds."""
    from scorekit.report.page import chart_image

    means = [value for decision in decisions if (value := decision.stats[key]) is not None]

    def draw(axes: Any) -> int:
        axes.hist(means, bins=[step / 20 for step in range(21)], color="C0")
        for bound in bounds:
            axes.axvline(bound, color="C3", linewidth=1)
        axes.set_ylabel("prompts")
        return 1 if means else 0

    return chart_image(f"prompts by {label}", label, draw)


def as_cell(value: Any) -> str:
    """Return the text of a table cell; `–` for a missing value."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {as_cell(item)}" for name, item in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _examples(
    decisions: Iterable[Decision], prompts: Mapping[str, CuratedPrompt]
) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """Return (reason, count, first examples) of each reason, first of kept rows."""
    counts: Counter[tuple[bool, str]] = Counter()
    examples: dict[tuple[bool, str], list[dict[str, Any]]] = defaultdict(list)
    for decision in decisions:
        key = (not decision.is_kept, decision.reason)
        counts[key] += 1
        if counts[key] <= _EXAMPLES:
            examples[key].append(_example(decision, prompts))
    return [
        (f"{'dropped' if dropped else 'kept'}: {reason}", count, examples[dropped, reason])
        for (dropped, reason), count in sorted(counts.items())
    ]


def _example(decision: Decision, prompts: Mapping[str, CuratedPrompt]) -> dict[str, Any]:
    prompt = prompts.get(str(decision.stats.get("question_id", decision.row_id)))
    question = prompt.question if prompt else None
    more = len(decision.episodes) - _EPISODES
    return {
        "id": decision.row_id,
        "question": question.question if question else "",
        "reference": question.reference_text if question else "",
        "gold": ", ".join(question.gold) if question else "",
        "figures": [
            (name, as_cell(value)) for name, value in decision.stats.items() if value != ""
        ],
        "episodes": ", ".join(decision.episodes[:_EPISODES])
        + (f" and {more} more" if more > 0 else ""),
    }
