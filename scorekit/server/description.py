"""The description of a loaded backend."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ModelDescription:
    """The static part of `GET /v1/info`; an endpoint may add fields (`ScoreDescription`)."""

    model: str
    revision: str
    tokenizer: str
    dtype: str
    device: str
    max_input_length: int
    versions: dict[str, str | None] = field(default_factory=dict)
    #: Who multiplies float32 matrices on a CPU, torch or onednn; None: the service has no network.
    #: No part of the cache key: both give the same scores within float32's accuracy.
    matmul: str | None = None
    #: Other settings that change an outcome (attention backend, layer transformation, tokenizer
    #: digest). They are part of the cache key.
    engine: dict[str, str] = field(default_factory=dict)
