"""Kiwi, the morphological analyser: loaded once a process, on use.

It is made without threads of its own (`num_workers=0`): a forked process would wait for them.
One lock is held while it loads and while it reads, so that any thread may ask.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

_lock = threading.Lock()


class Morpheme(NamedTuple):
    """A morpheme. tag: of Kiwi's set, without its marks of regular and irregular stems (VV-I);
    start, end: its characters in the text."""

    form: str
    tag: str
    start: int
    end: int


def forms(text: str) -> frozenset[str]:
    """A set of forms, written as words."""
    return frozenset(text.split())


def sentences(text: str, names: Sequence[tuple[int, int]] = ()) -> list[list[Morpheme]]:
    """The sentences of a text. names: stretches of the text that are proper names, whatever else
    they may mean: said for this text alone, so that no text changes how another one is read."""
    spans = [(start, end, "NNP") for start, end in names]
    with _lock:
        found = _kiwi().tokenize(
            text, split_sents=True, pretokenized=(lambda _: spans) if spans else None
        )
    return [
        [Morpheme(one.form, one.tag.partition("-")[0], one.start, one.end) for one in sentence]
        for sentence in found
    ]


@cache
def _kiwi() -> Any:
    from kiwipiepy import Kiwi

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it says what num_workers=0 was once
        return Kiwi(num_workers=0)


def _free_the_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_free_the_lock)  # a thread that held it is not in the child
