"""Settings of the MetricX service; prefix METRICX_."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from scorekit.server.settings import ModelSettings


class MetricXSettings(ModelSettings):
    """Score translations with MetricX-24 behind HTTP."""

    model_config = SettingsConfigDict(env_prefix="METRICX_", cli_prog_name="services.metricx")

    port: int = Field(8001, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    model: str = Field(
        "google/metricx-24-hybrid-large-v2p6", description="Local folder or hub id of the model."
    )
    tokenizer: str | None = Field(
        None,
        description="Local folder or hub id of the tokenizer; null: the model's folder where it "
        "holds one, else google/mt5-xl.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision; float16 is refused, since T5 overflows in it."
    )
