"""Checks of what a caller gives, before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from operator import index
from typing import Any, Literal, get_args

from scorekit.numeric import above

OverlapPolicy = Literal["any_overlap", "majority_overlap"]
Combine = Literal["sum", "min", "max", "spread"]

#: Trainers hold rewards as float32.
MAX_FLOAT32 = 3.4e38
#: A mean of float32 probabilities may be above 1 by its rounding.
_FLOAT32_ERROR = 1e-6


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise ValueError if a value is none of a Literal's."""
    names = get_args(choices)
    if value not in names:
        raise ValueError(f"{name}: {value!r} does not exist. Set one of {', '.join(names)}")


def as_plain(values: Any) -> Any:
    """Return a tensor or an array as lists of numbers; anything else as it is.

    Elements of a tensor are equal to none: as groups or keys each would be its own."""
    return values.tolist() if hasattr(values, "tolist") else values


def check_text(name: str, value: Any) -> None:
    """Raise ValueError if this is no text: positions in bytes are others."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: a {type(value).__name__}. Give a text (str)")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError if this is no bool: the text "false" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r} is no bool. Set True or False")


def check_covered(mt_covered: Any) -> int:
    """Return a number of characters. Raises ValueError if it is none."""
    try:
        num_chars = _as_index(mt_covered)
    except TypeError:
        raise ValueError(f"mt_covered: {mt_covered!r} is no whole number. Correct it") from None
    if num_chars < 0:
        raise ValueError(f"mt_covered: {num_chars} characters. Give the number that was read")
    return num_chars


def check_weights(severity_weights: Any) -> None:
    """Raise ValueError if the weights are no mapping of severities to finite numbers of at most 0,
    or None."""
    if not isinstance(severity_weights, Mapping):
        kind = type(severity_weights).__name__
        raise ValueError(f"severity_weights: a {kind}. Set a mapping such as {{MAJOR: -5.0}}")
    seen: set[str] = set()
    for severity, weight in severity_weights.items():
        if not isinstance(severity, str):
            raise ValueError(f"severity_weights: the key {severity!r} is no text. Quote it")
        if severity.upper() in seen:
            raise ValueError(f"severity_weights.{severity}: set twice. Case does not matter")
        seen.add(severity.upper())
        if weight is not None and not is_finite(weight):
            raise ValueError(
                f"severity_weights.{severity}: {weight!r} is no finite number. Correct it"
            )
        if weight is not None and weight > 0:
            raise ValueError(
                f"severity_weights.{severity}: {weight!r} would reward errors. Set {-weight!r}"
            )


def check_trained_weights(severity_weights: Any, weight: float = 1.0) -> None:
    """Raise ValueError if no severity has a weight, or if one times `weight` is too large."""
    check_weights(severity_weights)
    if all(penalty is None for penalty in severity_weights.values()):
        raise ValueError("severity_weights: no severity has a weight. Set one")
    for severity, penalty in severity_weights.items():
        if abs(weight * (penalty or 0.0)) > MAX_FLOAT32:
            raise ValueError(f"severity_weights.{severity}: {penalty!r} is too large. Correct it")


def check_span_options(
    severity_weights: Any, overlap_policy: Any, overlap_threshold: Any, combine: Any
) -> None:
    """Raise ValueError if an argument of `spans_to_token_rewards` has no meaning."""
    check_weights(severity_weights)
    check_choice("overlap_policy", overlap_policy, OverlapPolicy)
    check_choice("combine", combine, Combine)
    if not is_finite(overlap_threshold) or not 0 < overlap_threshold <= 1:
        raise ValueError(
            f"overlap_threshold: {overlap_threshold!r} is no share. Set a number above 0, at most 1"
        )


def check_confidence(confidence: float) -> None:
    """Raise ValueError if a confidence is no probability."""
    if not is_finite(confidence) or confidence < 0 or above(confidence, 1 + _FLOAT32_ERROR):
        raise ValueError(f"a span's confidence is {confidence!r}, which is not between 0 and 1")


def check_offsets(offsets: Iterable[Any], length: int) -> list[tuple[int, int]]:
    """Return the range of each token in a text. Tokens with text are in its order.

    length: of the text. Raises ValueError for what is no range of the text, and out of order.
    """
    ranges: list[tuple[int, int]] = []
    last_start = last_end = 0
    for token, pair in enumerate(offsets):
        try:
            start, end = map(_as_index, pair)
        except (TypeError, ValueError):
            raise ValueError(
                f"token_char_offsets[{token}]: {pair!r} is no (start, end). Give whole numbers"
            ) from None
        if not 0 <= start <= end <= length:
            raise ValueError(
                f"token_char_offsets[{token}]: {start}-{end} in a text of {length} characters"
            )
        if start < end:
            if start < last_start or end < last_end:
                raise ValueError(
                    f"token_char_offsets[{token}]: {start}-{end} comes after "
                    f"{last_start}-{last_end}. Give the tokens in the text's order"
                )
            last_start, last_end = start, end
        ranges.append((start, end))
    return ranges


def check_token_ids(ids: Sequence[Any]) -> None:
    """Raise ValueError for what can be no token id: not an integer, negative, or above 32 bits.

    A mask in place of the ids would be read as the ids 0 and 1.
    """
    for token_id in ids:
        try:
            is_wrong = not 0 <= _as_index(token_id) < 2**32
        except TypeError:
            is_wrong = True
        if is_wrong:
            raise ValueError(f"completion_token_ids: {token_id!r} is no token id")


def check_stop_ids(stop_ids: Any) -> None:
    """Raise ValueError if these are no token ids."""
    if not isinstance(stop_ids, Collection) or not all(
        isinstance(stop_id, Integral) and int(stop_id) >= 0 for stop_id in stop_ids
    ):
        raise ValueError(f"stop_ids: {stop_ids!r} are no token ids. Set a list such as [1]")


def _as_index(value: Any) -> int:
    """Return a whole number. Raises TypeError for anything else, and for a bool."""
    if isinstance(value, bool):
        raise TypeError("a bool is no index")
    return index(value)


def is_finite(value: Any) -> bool:
    """Return whether a value is a number, neither NaN nor infinite, and no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False
