"""The distinct samples of one call: each is sent once, and each caller's sample gets its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic_core import PydanticSerializationError, to_json

from scorekit.errors import SampleError, UserError
from scorekit.schemas import Failed, Info, Result, score_result
from scorekit.scorers import SampleForScoring

#: Bytes of a request beside its samples, at most.
_ENVELOPE = 1024

#: A sample's place among the distinct ones of its call, and its JSON.
Placed = tuple[int, bytes]
Sample = SampleForScoring | Mapping[str, Any]


class Distinct:
    """Samples without their repetitions.

    bodies: the JSON of each distinct sample, without an id.
    failed: (index, result) of the samples that could never be sent.
    """

    def __init__(
        self, samples: Sequence[Sample], max_bytes: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Encode samples; one of over `max_bytes` fails. Raises UserError for an id that is no
        text. options: of the call; `empty_ref` tells whether "" is a reference."""
        empty_is_text = (options or {}).get("empty_ref") == "text"
        self.bodies: list[bytes] = []
        self.failed: list[tuple[int, Failed]] = []
        self._ids: list[str | None] = []
        self._owners: list[list[int]] = []
        places: dict[bytes, int] = {}
        for index, sample in enumerate(samples):
            id, body, fault = _encode(index, sample, max_bytes, empty_is_text)
            self._ids.append(id)
            if fault is not None:
                self.failed.append((index, failure("invalid_input", fault, id)))
            elif body in places:
                self._owners[places[body]].append(index)
            else:
                places[body] = len(self.bodies)
                self.bodies.append(body)
                self._owners.append([index])

    def index(self, place: int) -> int:
        """The first of the caller's samples that `bodies[place]` stands for."""
        return self._owners[place][0]

    def spread(self, place: int, result: Result) -> Iterator[tuple[int, Result]]:
        """(index, result with its own id) of every sample that `bodies[place]` stands for."""
        for index in self._owners[place]:
            yield index, result.model_copy(update={"id": self._ids[index]})


def _encode(
    index: int, sample: Sample, max_bytes: int, empty_is_text: bool
) -> tuple[str | None, bytes, str | None]:
    """(id, JSON without the id, what is wrong with it)."""
    fields = sample.wire() if isinstance(sample, SampleForScoring) else dict(sample)
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
        return id, b"", f"{len(body)} bytes, a request of the service holds {max_bytes}"
    return id, body, None


def failure(type: str, message: str, id: str | None = None) -> Failed:
    """The result of a sample that failed on this side of the wire."""
    error = SampleError(type, message).wire()
    return cast(Failed, score_result.validate_python({"id": id, "ok": False, "error": error}))


def room(limits: Info) -> int:
    """Bytes of samples that a request may hold."""
    return limits.max_body_bytes - _ENVELOPE


def cut(samples: list[Placed], limits: Info, batch_size: int) -> list[list[Placed]]:
    """Requests within the service's own limits on samples and bytes."""
    most = min(batch_size, limits.max_samples)
    parts: list[list[Placed]] = []
    size = 0
    for place, body in samples:
        size += len(body) + 1
        if not parts or len(parts[-1]) >= most or size > room(limits):
            parts.append([])
            size = len(body) + 1
        parts[-1].append((place, body))
    return parts
