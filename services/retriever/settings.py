"""Settings of the retriever; prefix RETRIEVER_."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import CliSuppress, SettingsConfigDict

from scorekit.server.settings import ServiceSettings

#: Seconds that a query may wait for its vectors, retries included.
SERVER_DEADLINE_S = 30.0


class RetrieverSettings(ServiceSettings):
    """Find pages of documents behind HTTP. `ingest` makes the index: see `ingest --help`."""

    model_config = SettingsConfigDict(
        env_prefix="RETRIEVER_",
        cli_prog_name="services.retriever",
        env_ignore_empty=True,  # Compose sets a variable that is not given to nothing
    )

    port: int = Field(8005, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    index: Path = Field(description="Folder of an index that `ingest` has made.")
    backend: Literal["bm25", "dense", "late", "hybrid"] | None = Field(
        None,
        description="What searches; null: the only one of the index, hybrid where it has several.",
    )
    embeddings_url: str | None = Field(
        None, description="dense: a server of the embedding model; its key: SCOREKIT_API_KEY."
    )
    embeddings_model: str | None = Field(
        None, description="dense: its name there; null: the only one that the server has."
    )
    late_url: str | None = Field(
        None, description="late: vLLM with the model, for /pooling; its key: VLLM_API_KEY."
    )
    late_model: str | None = Field(
        None, description="late: its name there; null: as it was when the index was made."
    )
    max_samples: int = Field(1000, ge=1, description="Most queries in one request.")
    cache_memory_items: int = Field(
        20_000, ge=0, description="Most answers kept in this process, before the second tier."
    )
    max_field_chars: int = Field(
        4000, ge=1, description="Most characters of a query; a longer one fails alone."
    )
    # Batches are counted in queries.
    max_batch_tokens: CliSuppress[int | None] = 64

    @model_validator(mode="after")
    def _wait_for_servers(self) -> Self:
        if self.stall_after is None and (self.embeddings_url or self.late_url):
            # Both servers of hybrid can use their full deadlines. Anything longer is a stall.
            self.stall_after = 3 * SERVER_DEADLINE_S
        return self
