"""The distinct samples of one call: each is sent once, and every equal sample gets its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class UniqueSamples:
    """The samples of a call without duplicates.

    bodies: the JSON of each distinct sample, without an id.
    failed: (index, result) of the samples that could never be sent.
    """

    def __init__(
        self, samples: Sequence[Sample], max_bytes: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Encode samples. One over `max_bytes` fails. Raises UserError for an id that is not text.

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
    _check_fields(index, fields)
    id = fields.pop("id", None)
    if id is not None and not isinstance(id, str):
        raise UserError(f"samples.{index}.id: a string or None, not {type(id).__name__}")
    ref = sample.ref if isinstance(sample, SampleForScoring) else fields.get("ref")
    fields.pop("ref", None)  # absent, null and, by default, "" mean the same
    if ref not in (None, "") or (ref == "" and empty_is_text):
        fields["ref"] = ref
    try:
        body = to_json(dict(sorted(fields.items())))
    except (PydanticSerializationError, UnicodeEncodeError):
        return id, b"", "not Unicode text (a lone surrogate?)"
    if len(body) > max_bytes:
        return id, b"", f"{len(body)} bytes, a request may have {max_bytes}"
    return id, body, None


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
