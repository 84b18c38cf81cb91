"""Examples whose source no translation helps: found before training where they can be."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from scorekit.errors import UserError
from scorekit.schemas import Failed
from scorekit.scorers import SampleForScoring
from trainer.rl.world import World
from trainer.runs.config import set_key
from trainer.translation.config_data import DataConfig
from trainer.translation.data import Example
from trainer.translation.rewards.score_batch import BAD_SOURCE, ServiceName
from trainer.translation.rewards.services import Rewarder
from trainer.translation.rewards.sources import only_source

log = logging.getLogger(__name__)
#: Bytes that every service reads where overlong texts are cut: none sets its limit on characters
#: lower.
_SURE_BYTES = 10_000
#: Sources that are asked for at once.
_PIECE = 16
#: Rows that a message names.
_NAMED = 3


def bad_sources(
    sources: Sequence[str],
    rewarder: Rewarder,
    languages: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, str]:
    """Source -> why no translation of it can be scored by a service that has a weight.

    languages: of a source and its translations, for the judge.

    Services refuse a text for a NUL or for its length, so those with one are asked for, and of the
    others the longest, until none of a piece is refused.
    """
    found: dict[str, str] = {}
    distinct = list(dict.fromkeys(sources))
    languages = languages or {}

    def refused(name: ServiceName, piece: Sequence[str]) -> dict[str, str]:
        return _told(name, rewarder.sources.refusals(name, [_asked(s, languages) for s in piece]))

    odd = [src for src in distinct if "\0" in src]
    by_length = sorted((src for src in distinct if "\0" not in src), key=_size, reverse=True)
    for name in rewarder.needed:
        sure = _SURE_BYTES
        if rewarder.scoring.overlong == "error":  # a token has a byte at least, or nearly so
            sure = min(sure, (rewarder.max_input_length(name) or 0) // 2)
        for piece in _pieces(odd):
            found |= refused(name, piece)
        for piece in _pieces([src for src in by_length if _size(src) > sure]):
            of_piece = refused(name, piece)
            if not of_piece:
                break
            found |= of_piece
    return found


def check_sources(
    examples: Sequence[Example], rewarder: Rewarder, key: str, *, refuse: bool
) -> dict[str, str]:
    """`bad_sources` of these examples. Raises UserError, with their rows, where they are to be
    refused or there are no others; else a warning says which they are.

    key: where the examples come from (`data.train`).
    """
    languages = {row.src_text: (row.src_lang_code, row.tgt_lang_code) for row in examples}
    found = bad_sources([example.src_text for example in examples], rewarder, languages)
    rows = [example for example in examples if example.src_text in found]
    if not rows:
        return found
    named = [f"{row.where or row.id} ({found[row.src_text]})" for row in rows[:_NAMED]]
    if len(rows) > _NAMED:
        named.append(f"and {len(rows) - _NAMED} more")
    told = (
        f"{key}: {len(rows)} of {len(examples)} sources cannot be scored, whatever the "
        f"translation: {', '.join(named)}"
    )
    if refuse or len(rows) == len(examples):
        raise UserError(f"{told}; mend those rows, or remove them (see data.bad_sources)")
    log.warning("%s; %s", told, "left out" if key == "data.train" else "they have no score")
    return found


def screen(
    cfg: DataConfig,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    rewarder: Rewarder,
    world: World,
) -> list[Example]:
    """The examples to learn from: those whose source can be scored. Held-out ones all stay, so that
    evaluations compare; what cannot be scored of them is told. Raises UserError as `check_sources`.
    """
    found: list[dict[str, str]] = []
    refuse = cfg.bad_sources == "refuse"

    def check() -> None:
        found.append(check_sources(train, rewarder, "data.train", refuse=refuse))
        for name, held_out in sets.items():
            check_sources(held_out, rewarder, set_key(name), refuse=refuse)

    world.on_main(check)  # every process has to leave out the same
    (bad,) = world.gather(found)
    return [example for example in train if example.src_text not in bad]


def _asked(source: str, languages: Mapping[str, tuple[str, str]]) -> SampleForScoring:
    src_lang, tgt_lang = languages.get(source, (None, None))
    return only_source(SampleForScoring(source, "", src_lang=src_lang, tgt_lang=tgt_lang))


def _told(name: ServiceName, refused: dict[SampleForScoring, Failed]) -> dict[str, str]:
    return {
        src.src: f"{name}: {failed.error.message}"
        for src, failed in refused.items()
        if failed.error.type == BAD_SOURCE
    }


def _pieces(sources: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(sources), _PIECE):
        yield sources[at : at + _PIECE]


def _size(text: str) -> int:
    return len(text.encode())
