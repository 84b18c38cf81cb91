"""The distinct samples of one call: each is sent once, and every equal sample gets its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, cast

from pydantic_core import PydanticSerializationError, to_json

from scorekit.errors import SampleError, UserError
from scorekit.schemas import Failed, Info, Result, score_result
from scorekit.scorers import SampleForScoring

#: Largest number of bytes of a request without its samples.
_ENVELOPE = 1024

#: The index of a sample among the distinct ones of its call, and its JSON.
Placed = tuple[int, bytes]
Sample = SampleForScoring | Mapping[str, Any]
#: Fields of a translation that are texts, and those that may also be None.
_TEXTS, _OPTIONAL = ("src", "mt", "ref", "src_lang", "tgt_lang"), ("ref", "src_lang", "tgt_lang")
#: Fields of a judge's sample that are no texts of its rubric.
_NO_TEXTS = ("id", "task", "images")


class UniqueSamples:
    """The samples of a call without duplicates.

    bodies: the JSON of each distinct sample, without an id.
    failed: (index, result) of the samples that could never be sent.
    """

    def __init__(
        self, samples: Sequence[Sample], max_bytes: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Encode samples. One over `max_bytes` fails, and so does one with a text that is none.

        Raises UserError for an id that is not text.

        options: of the call; `empty_ref` says whether "" is a reference."""
        empty_is_text = (options or {}).get("empty_ref") == "text"
        self.bodies: list[bytes] = []
        self.failed: list[tuple[int, Failed]] = []
        self._ids: list[str | None] = []
        self._owners: list[list[int]] = []
        distinct_indices: dict[bytes, int] = {}
        for index, sample in enumerate(samples):
            id, body, error = _encode(index, sample, max_bytes, empty_is_text)
            self._ids.append(id)
            if error is not None:
                self.failed.append((index, failure("invalid_input", error, id)))
            elif body in distinct_indices:
                self._owners[distinct_indices[body]].append(index)
            else:
                distinct_indices[body] = len(self.bodies)
                self.bodies.append(body)
                self._owners.append([index])

    def index(self, distinct_index: int) -> int:
        """Return the index of the first sample of the caller that is `bodies[distinct_index]`."""
        return self._owners[distinct_index][0]

    def expand_results(self, distinct_index: int, result: Result) -> Iterator[tuple[int, Result]]:
        """Yield (index, result with its id) of every sample that is `bodies[distinct_index]`."""
        for index in self._owners[distinct_index]:
            yield index, result.model_copy(update={"id": self._ids[index]})


def _encode(
    index: int, sample: Sample, max_bytes: int, empty_is_text: bool
) -> tuple[str | None, bytes, str | None]:
    """Return (id, JSON without the id, error or None) of a sample."""
    if isinstance(sample, SampleForScoring):
        fields = sample.wire()
    elif isinstance(sample, Mapping):
        fields = dict(sample)
    else:
        kind = type(sample).__name__
        raise UserError(f"samples.{index}: a {kind}. Give a dict with src and mt")
    id = fields.pop("id", None)
    if id is not None and not isinstance(id, str):
        raise UserError(f"samples.{index}.id: a string or None, not {type(id).__name__}")
    ref = sample.ref if isinstance(sample, SampleForScoring) else fields.get("ref")
    fields.pop("ref", None)  # absent, null, NaN and, by default, "" mean the same
    if not is_missing(ref) and (ref != "" or empty_is_text):
        fields["ref"] = ref
    if (error := _text_error(fields)) is not None:
        return id, b"", error
    _check_fields(index, fields)
    try:
        body = to_json(dict(sorted(fields.items())))
    except (PydanticSerializationError, UnicodeEncodeError):
        return id, b"", "not Unicode text (a lone surrogate?)"
    if len(body) > max_bytes:
        return id, b"", f"{len(body)} bytes, a request may have {max_bytes}"
    return id, body, None


def _text_error(fields: Mapping[Any, Any]) -> str | None:
    """Return the error of the first text that is none. An unknown field is the service's to refuse.

    All fields of a judge's sample may be texts of its rubric."""
    is_judge = fields.get("task") is not None
    for name, value in fields.items():
        if isinstance(value, str) or (value is None and name in _OPTIONAL):
            continue
        if name in _TEXTS or (is_judge and isinstance(name, str) and name not in _NO_TEXTS):
            return f"{name}: {shown_value(value)} is not text"
    return None


def is_missing(value: Any) -> bool:
    """Return True for None and what tables have in an empty cell: NaN, NA and NaT of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, Real) and value != value


def shown_value(value: Any) -> str:
    """Return a value that is no text, and its type, for a message."""
    return "None" if value is None else f"{value!r:.40} ({type(value).__name__})"


def _check_fields(index: int, fields: Mapping[Any, Any]) -> None:
    """Raise UserError for a value that JSON would have as another text: a date, bytes, a path."""
    for name, value in fields.items():
        if not isinstance(name, str):
            raise UserError(f"samples.{index}: the field name {name!r} is no text")
        if value is not None and not isinstance(
            value, str | bool | int | float | list | tuple | dict
        ):
            kind = type(value).__name__
            raise UserError(f"samples.{index}.{name}: a {kind}. Give a text")


def failure(type: str, message: str, id: str | None = None) -> Failed:
    """Return the result of a sample that failed in the client."""
    error = SampleError(type, message).wire()
    return cast(Failed, score_result.validate_python({"id": id, "ok": False, "error": error}))


def max_samples_bytes(limits: Info) -> int:
    """Return the largest number of bytes that the samples of a request may have."""
    return limits.max_body_bytes - _ENVELOPE


def split_batches(samples: list[Placed], limits: Info, batch_size: int) -> list[list[Placed]]:
    """Split samples into requests within the service's limits on samples and bytes."""
    max_samples = min(batch_size, limits.max_samples)
    batches: list[list[Placed]] = []
    size = 0
    for distinct_index, body in samples:
        size += len(body) + 1
        if not batches or len(batches[-1]) >= max_samples or size > max_samples_bytes(limits):
            batches.append([])
            size = len(body) + 1
        batches[-1].append((distinct_index, body))
    return batches
