"""Kiwi, the morphological analyzer: loaded once per process, on first use.

It has no threads of its own (`num_workers=0`), because a forked process would wait for them. A lock
is held while it loads and analyzes, so that any thread may use it.
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
    """A morpheme.

    tag: of Kiwi's set, without its marks of regular and irregular stems (VV-I).
    start: index of its first character in the text.
    """

    form: str
    tag: str
    start: int


def forms(text: str) -> frozenset[str]:
    """Return a set of forms, written as words."""
    return frozenset(text.split())


def sentences(text: str, names: Sequence[tuple[int, int]] = ()) -> list[list[Morpheme]]:
    """Return the sentences of a text.

    names: ranges of the text that are proper names in any case. They apply to this text only, so
    that no text changes the analysis of another one.
    """
    spans = [(start, end, "NNP") for start, end in names]
    with _lock:
        tokenized = _kiwi().tokenize(
            text, split_sents=True, pretokenized=(lambda _: spans) if spans else None
        )
    return [
        [Morpheme(token.form, token.tag.partition("-")[0], token.start) for token in sentence]
        for sentence in tokenized
    ]


@cache
def _kiwi() -> Any:
    from kiwipiepy import Kiwi

    with warnings.catch_warnings():
        # About an earlier meaning of num_workers=0.
        warnings.simplefilter("ignore", DeprecationWarning)
        return Kiwi(num_workers=0)


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # the thread that holds it is not in the child
