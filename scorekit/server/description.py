"""What a loaded backend says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ModelDescription:
    """The static part of `GET /v1/info`; a verb may want more (`ScoreDescription`)."""

    model: str
    revision: str
    tokenizer: str
    dtype: str
    device: str
    max_input_length: int
    versions: dict[str, str | None] = field(default_factory=dict)
    #: Whatever else changes an outcome (attention back end, layer transformation, tokenizer
    #: digest): part of the cache key.
    engine: dict[str, str] = field(default_factory=dict)
