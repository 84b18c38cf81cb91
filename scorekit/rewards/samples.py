"""The samples of a call: their fields and their groups, checked."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from scorekit.client import Sample
from scorekit.errors import UserError
from scorekit.scorers import SampleForScoring, check_is_list

Fields = dict[str, Any]
#: Fields that every sample has, and those that may be missing; all are texts.
_TEXTS, _LANGUAGES = ("src", "mt"), ("src_lang", "tgt_lang")


def fields_of(samples: Iterable[Sample]) -> list[Fields]:
    """Return the fields of each sample. Raises UserError if one is no sample or lacks a text."""
    check_is_list("samples", samples)
    return [_fields(index, sample) for index, sample in enumerate(samples)]


def _fields(index: int, sample: Sample) -> Fields:
    if isinstance(sample, SampleForScoring):
        return sample.wire()
    if not isinstance(sample, Mapping):
        raise UserError(f"samples.{index}: a {type(sample).__name__}. Give a mapping with src, mt")
    fields = dict(sample)
    for name in _TEXTS:
        if not isinstance(fields.get(name), str):
            raise UserError(f"samples.{index}.{name}: expected text. Give each sample src and mt")
    for name in _LANGUAGES:
        if not isinstance(fields.get(name), str | None):
            kind = type(fields[name]).__name__
            raise UserError(f"samples.{index}.{name}: expected the text of a language, not {kind}")
    return fields


def group_indices(
    groups: Iterable[Hashable] | None, count: int, is_required: bool
) -> list[list[int]]:
    """Return the indices of the samples of each group; [] without groups.

    Raises UserError if groups are missing, or do not fit the samples.
    """
    if groups is None:
        if is_required:
            raise UserError("groups: required. The definition has a rule of groups")
        return []
    # The elements of a tensor equal none: each would be a group of its own.
    groups = groups.tolist() if hasattr(groups, "tolist") else groups
    names = [group.tolist() if hasattr(group, "tolist") else group for group in groups]
    if len(names) != count:
        raise UserError(f"groups: {len(names)} groups for {count} samples. Give one for each")
    indices: dict[Hashable, list[int]] = {}
    for index, group in enumerate(names):
        if group != group:
            raise UserError(f"groups.{index}: {group!r}. Give a number or a text")
        try:
            indices.setdefault(group, []).append(index)
        except TypeError:
            kind = type(group).__name__
            raise UserError(f"groups.{index}: a {kind}. Give a number or a text") from None
    return list(indices.values())


def seconds_of_call(deadline_s: float | None, default_s: float) -> float:
    """Return the seconds of a call. Raises UserError unless they are above 0 and finite."""
    if deadline_s is None:
        return default_s
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not (is_number and math.isfinite(deadline_s) and deadline_s > 0):
        raise UserError(f"deadline_s: {deadline_s} s. Give a number above 0")
    return deadline_s
