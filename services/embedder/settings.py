"""Settings of the embedder; prefix EMBEDDER_."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from scorekit.server.settings import ModelSettings

#: Largest number of texts in a request, as in OpenAI's API.
MAX_INPUTS = 2048


class EmbedderSettings(ModelSettings):
    """Embed texts behind HTTP, in OpenAI's shape."""

    model_config = SettingsConfigDict(env_prefix="EMBEDDER_", cli_prog_name="services.embedder")

    port: int = Field(8004, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    model: str = Field(
        "dragonkue/BGE-m3-ko",
        description="Local folder or hub id of a sentence-transformers model.",
    )
    pooling: Literal["cls", "mean", "max", "lasttoken", "weightedmean"] | None = Field(
        None,
        description="How tokens become one vector, for a folder that does not say so itself (one "
        "without modules.json); such a folder is refused without it.",
    )
    max_input_length: int | None = Field(
        None, ge=8, description="Most tokens of a text, up to the model's own; null: the model's."
    )
    max_samples: int = Field(
        MAX_INPUTS, ge=1, le=MAX_INPUTS, description="Most texts in one request."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the weights; vectors are float32."
    )
