"""Settings of the xCOMET service: flags, or environment variables that start with `XCOMET_`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from scorekit.server.settings import ModelSettings


class XCometSettings(ModelSettings):
    """Score translations and find their errors with xCOMET behind HTTP."""

    model_config = SettingsConfigDict(env_prefix="XCOMET_", cli_prog_name="services.xcomet")

    port: int = Field(8002, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    model: str = Field(
        "Unbabel/XCOMET-XL",
        description="Hub id, a folder with hparams.yaml and checkpoints/model.ckpt, or that .ckpt.",
    )
    encoder: str | None = Field(
        None,
        description="Folder (relative to the checkpoint's, or any) or hub id of the encoder's "
        "config and tokenizer; null: what the checkpoint stores.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Number format of the encoder; the heads stay in float32."
    )
    implementation: Literal["own", "unbabel-comet"] = Field(
        "own",
        description="Whose networks compute: this package's, or unbabel-comet's, which needs an "
        "environment of its own (make env-oracle).",
    )
