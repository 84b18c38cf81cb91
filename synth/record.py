"""The results of a stage for a record.

Stages only add fields to a record. Rejected records are written, too, with `stage`, `reason_code`,
`reason` and their fields.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from scorekit.errors import ScorekitError
from scorekit.seeds import stream_seed
from scorekit.text.markup import normalized
from synth.reasons import Code
from synth.storage.store import Record


@dataclass(slots=True)
class KeptRecord:
    """An accepted record.

    note_code: the code of a note about it.
    """

    record: Record
    note_code: Code | None = None


@dataclass(slots=True)
class RejectedRecord:
    """A rejected record with its reason, as a code and as text."""

    record: Record
    reason_code: Code
    reason: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def as_record(self, stage: str) -> Record:
        """Return the record that is written to the file of rejected records."""
        reason_fields = {"stage": stage, "reason_code": self.reason_code, "reason": self.reason}
        return {**self.record, **self.more, **reason_fields}


@dataclass(slots=True)
class DeferredRecord:
    """A record without an answer because a service failed.

    It is neither accepted nor rejected, and is retried on `--resume`.
    status: HTTP status of the last response, if there was one."""

    record: Record
    reason_code: Code
    status: int | None = None


def source_id(text: str) -> str:
    """Return the id of a source: 128 bits in hex over its normalized text."""
    normal = " ".join(normalized("NFC", text).split())
    return hashlib.blake2b(normal.encode(), digest_size=16).hexdigest()


def teacher_seed(run_seed: int, source: str, purpose: str) -> int:
    """Return the first seed of a source's requests; candidate i has this plus i."""
    return stream_seed("teacher", run_seed, source, purpose)


class SourceFailed(ScorekitError):
    """Raised if the teacher can never translate this source."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class TemporaryFailure(ScorekitError):
    """Raised if a service failed for now, and the text is not the cause.

    status: HTTP status, if there was a response."""

    def __init__(self, code: Code, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
