"""What a command is told of rows besides their episodes: by other commands, and by hand."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scorekit.errors import UserError
from trainer.search.curation.dataset import decisions_digest, read_decisions
from trainer.search.curation.samples import CuratedPrompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """buckets: id -> bucket, of `search buckets`; None: they are made of the episodes given.
    classes: id -> class, of `search verify`; bad: those that it dropped. excluded: id -> why, by
    hand. inputs: what all this was read from, and its digest."""

    buckets: Mapping[str, str] | None = None
    classes: Mapping[str, str] = field(default_factory=dict)
    bad: frozenset[str] = frozenset()
    excluded: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)


def read_known(
    prompts: Sequence[CuratedPrompt],
    buckets: Path | None = None,
    verified: Sequence[Path] = (),
    excluded: Sequence[Path] = (),
) -> Known:
    """buckets, verified: folders of these commands; of several that verified, the last that has a
    row counts. excluded: files, see `_excluded`. Raises UserError where one is not what it is
    taken for, or is of other data."""
    ids = {prompt.question.id for prompt in prompts}
    inputs: dict[str, str] = {}
    sorted_into: dict[str, str] | None = None
    if buckets is not None:
        _, lines = read_decisions(buckets, "buckets")
        sorted_into = {row["id"]: str(row.get("bucket")) for row in lines}
        if lacks := sorted(ids - sorted_into.keys()):
            raise UserError(
                f"{buckets}: has no bucket of {len(lacks)} rows ({lacks[0]} first): it was made of "
                "other data"
            )
        inputs[str(buckets)] = decisions_digest(buckets)
    classes: dict[str, str] = {}
    bad: set[str] = set()
    for folder in verified:
        _, lines = read_decisions(folder, "verify")
        of = {row["id"]: (str(row.get("class")), row["kept"]) for row in lines}
        _check_known(folder, of, ids)
        classes |= {id: name for id, (name, _) in of.items()}
        bad = (bad - of.keys()) | {id for id, (_, kept) in of.items() if not kept}
        inputs[str(folder)] = decisions_digest(folder)
    by_hand: dict[str, str] = {}
    for path in excluded:
        named, digest = _excluded(path)
        _check_known(path, named, ids)
        by_hand |= named
        inputs[str(path)] = digest
    return Known(sorted_into, classes, frozenset(bad), by_hand, inputs)


def only_kept(
    prompts: Sequence[CuratedPrompt], folder: Path | None
) -> tuple[list[CuratedPrompt], dict[str, str]]:
    """(the prompts whose rows a command has kept, what was read). None: all."""
    if folder is None:
        return list(prompts), {}
    _, lines = read_decisions(folder, None)
    ids = {row["id"] for row in lines if row["kept"]}
    chosen = [prompt for prompt in prompts if prompt.question.id in ids]
    if len(chosen) < len(ids):
        lacks = sorted(ids - {prompt.question.id for prompt in chosen})
        raise UserError(
            f"{folder}: {len(lacks)} of its rows are not in the data ({lacks[0]} first)"
        )
    return chosen, {str(folder): decisions_digest(folder)}


def _excluded(path: Path) -> tuple[dict[str, str], str]:
    """(id -> why, digest) of a file with an id a line and, behind a tab, why; a line that begins
    with # is a comment."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    parts = (line.partition("\t") for line in lines if line.strip() and line[0] != "#")
    named = {id.strip(): why.strip() for id, _, why in parts}
    return named, hashlib.sha256(content).hexdigest()


def _check_known(path: Path, named: Iterable[str], ids: set[str]) -> None:
    """Rows that are not in the data are of an earlier round; a file of no others is another's."""
    names = set(named)
    foreign = sorted(names - ids)
    if foreign and len(foreign) == len(names):
        raise UserError(f"{path}: the data has none of its {len(names)} ids ({foreign[0]!r} first)")
    if foreign:
        log.warning("%s: %d of %d ids are not in the data", path, len(foreign), len(names))
