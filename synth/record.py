"""What becomes of a record at a stage. It only gains fields on its way, and each stage says which;
one that is dropped is written too, with `stage`, `reason_code`, `reason` and what it had.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from scorekit.errors import ScorekitError
from scorekit.seeds import stream_seed
from scorekit.text.markup import normalised
from synth.folder.store import Record


@dataclass(slots=True)
class Kept:
    """A record that goes on. told: a code of what is to be known of it all the same, or empty."""

    record: Record
    told: str = ""


@dataclass(slots=True)
class Rejected:
    """A record that does not: why, as a code and in words."""

    record: Record
    reason_code: str
    reason: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def as_record(self, stage: str) -> Record:
        """What is written about it."""
        told = {"stage": stage, "reason_code": self.reason_code, "reason": self.reason}
        return {**self.record, **self.more, **told}


@dataclass(slots=True)
class Open:
    """A record of which a service gave no answer, through no fault of the record: it is neither
    kept nor rejected, and asked about again when the run is resumed. status: of HTTP, where there
    was an answer of its own to the last request."""

    record: Record
    reason_code: str
    status: int | None = None


def source_id(text: str) -> str:
    """The name of a source: 128 bits over its normalised text, so that equal texts are one."""
    normal = " ".join(normalised("NFC", text).split())
    return hashlib.blake2b(normal.encode(), digest_size=16).hexdigest()


def teacher_seed(run_seed: int, source: str, purpose: str) -> int:
    """The first seed of a source's requests: candidate i of n has this plus i."""
    return stream_seed("teacher", run_seed, source, purpose)


class SourceFailed(ScorekitError):
    """The teacher can give no answer to this source, whenever it is asked."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotYet(ScorekitError):
    """A service gave no answer, and it is not the text's fault: it may give one later. status: of
    HTTP, where there was an answer."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
