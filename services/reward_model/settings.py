"""Settings of the reward model's service; prefix REWARD_MODEL_."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import AliasChoices, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from scorekit.server.settings import ModelSettings

#: Longest input in tokens, where the model could read more and the user names no limit: a warm-up
#: with 100,000 tokens takes minutes, and no reward model was trained with so many.
MAX_INPUT_LENGTH = 4096
#: Seconds before the second, third, ... attempt at the upstream server; the last one repeats.
BACKOFF_S = (0.5, 1.0, 2.0, 4.0)


class RewardModelSettings(ModelSettings):
    """Score conversations and texts with a reward model behind HTTP."""

    model_config = SettingsConfigDict(
        env_prefix="REWARD_MODEL_", cli_prog_name="services.reward_model"
    )

    port: int = Field(8006, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    model: str = Field(
        "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
        description="Local folder or hub id of a sequence classifier; with --upstream its name "
        "there.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the weights; scores are float32."
    )
    weights: str | None = Field(
        None,
        description="Weight of each label in the score, LABEL=NUMBER,...; a label that is not "
        "named has 0, but with --upstream all have to be, in the model's order. null: a model with "
        "one label, whose output is the score.",
    )
    max_input_length: int | None = Field(
        None,
        ge=8,
        description="Most tokens of a sample, up to the model's own; null: the model's, 4,096 at "
        "most.",
    )
    chat_template: Path | None = Field(
        None, description="File with a chat template (Jinja); null: the model's own."
    )
    prompt: str | None = Field(
        None,
        description="What `src` and `mt` of a sample are put into: messages (a user's turn and the "
        "assistant's), pair (two texts), text (`mt` alone), or a YAML file; null: messages for a "
        "model with a chat template, else pair, else text.",
    )
    max_batch_tokens: int | None = Field(
        None,
        ge=16,
        description="Most tokens in one batch of the model, padding included; null: 256 on a CPU, "
        "768 there for a network of less than 20 million weights, 16,384 on a GPU.",
    )
    upstream: str | None = Field(
        None,
        description="URL of a vLLM or TEI server that holds the model; its key: "
        "REWARD_MODEL_UPSTREAM_API_KEY. null: the model runs here.",
    )
    upstream_api: Literal["classify", "pooling", "score", "predict"] = Field(
        "classify",
        description="How it is asked: classify or pooling (vLLM: conversations and texts), score "
        "(vLLM: pairs), predict (TEI: texts and pairs).",
    )
    max_concurrency: int = Field(
        32, ge=1, description="Requests in flight at the upstream server, a sample each."
    )
    request_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds that the upstream server may take for an answer. Never more than half "
        "of a request's timeout_s, so that a call that hangs is sent again in time.",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Seconds to connect to it.")
    max_attempts: int = Field(
        3, ge=1, description="Attempts at the upstream server until a sample fails with `upstream`."
    )

    @model_validator(mode="after")
    def _follow(self) -> Self:
        if self.upstream is not None:
            self.max_batch_tokens = 1  # a batch is one sample, with `max_concurrency` at once
            if self.stall_after is None:
                waits = self.max_attempts * (self.request_timeout_s + BACKOFF_S[-1])
                self.stall_after = 2 * waits + 60.0
        return self


class RewardUpstreamSecrets(BaseSettings):
    """Secrets, read only from the environment, so that they are in no process list, log or
    config."""

    model_config = SettingsConfigDict(extra="ignore")

    key: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("REWARD_MODEL_UPSTREAM_API_KEY", "VLLM_API_KEY"),
        description="API key of the upstream server.",
    )
