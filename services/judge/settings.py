"""Settings of the judge: flags, or environment variables that start with `JUDGE_`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AliasChoices, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, CliSuppress, SettingsConfigDict

from scorekit.llm.dialects import DialectName
from scorekit.schemas import MAX_VOTES
from scorekit.server.settings import ServiceSettings

#: Seconds before the second, third, ... attempt at the upstream server; the last one repeats.
BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
#: Tokens of texts in one batch of the rules.
RULES_BATCH = 4096


class JudgeSettings(ServiceSettings):
    """Judge translations and answers, by rules or by an LLM, behind HTTP."""

    model_config = SettingsConfigDict(env_prefix="JUDGE_", cli_prog_name="services.judge")

    port: int = Field(8003, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    backend: Literal["rules", "openai"] = Field(
        "rules",
        description="rules: deterministic, translation_filter and (by exact and numeric match) "
        "answer_correctness, answer_any_of; openai: any OpenAI-compatible server (vLLM).",
    )
    base_url: str | None = Field(
        None, description="The upstream server with its /v1; its key: JUDGE_UPSTREAM_API_KEY."
    )
    model: str | None = Field(None, description="Name of the model at the upstream server.")
    allow_models: str | None = Field(
        None,
        description="Models beside --model that a request may name (options.model), separated by "
        "commas; empty: none; null: any. The upstream server is paid for what a request names.",
    )
    api: DialectName = Field(
        "vllm",
        description="vllm: chat completions with every sampling field; openai: with OpenAI's "
        "own alone; gemini: as openai, without a seed; responses: OpenAI's Responses API.",
    )
    effort: str | None = Field(
        None,
        description="How much a model that thinks may do so (low, medium, ...); null: not said. "
        "Its thinking counts to a verdict's tokens (max_tokens of a request, or of the rubric).",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="With --api vllm (SGLang and llama.cpp take it, too): variables of the model's "
        'chat template, as JSON; {"enable_thinking": false} switches the thinking of Qwen3 off.',
    )
    rubrics: Path | None = Field(
        None, description="Folder with rubrics (*.yaml) besides the built-in ones."
    )
    mqm_examples: Path | None = Field(
        None, description="File with examples for the task mqm in place of the built-in ones."
    )
    mqm_votes: int = Field(
        1,
        ge=1,
        le=MAX_VOTES,
        description="Answers that the task mqm is asked for, where a request does not say: what "
        "more than half of them mark is told.",
    )
    max_concurrency: int = Field(
        32, ge=1, description="Samples judged at once: requests in flight at the upstream server."
    )
    max_input_length: int = Field(
        32768,
        ge=16,
        description="Longest texts of a sample in tokens, counted as four bytes each; longer ones "
        "fail with `overlong`, and no LLM is asked.",
    )
    request_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds that the upstream server may take for an answer; with --api vllm the "
        "least: an answer of many tokens gets longer. Never more than half of a request's "
        "timeout_s (10 s are given always), so that a call that hangs is sent again in time.",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Seconds to connect to it.")
    max_attempts: int = Field(
        3, ge=1, description="Attempts at the upstream server until a sample fails with `upstream`."
    )
    # A batch of an LLM is one sample, with `max_concurrency` batches at once. A batch of the rules
    # takes well under a second.
    max_batch_tokens: CliSuppress[int | None] = None

    @property
    def known_models(self) -> frozenset[str]:
        """Return the models that the operator has named: --model and --allow-models."""
        named = [self.model or "", *(self.allow_models or "").split(",")]
        return frozenset(name.strip() for name in named if name.strip())

    def may_name(self, model: str) -> bool:
        """Return True if a request may name this model of the upstream server."""
        return self.allow_models is None or model == self.model or model in self.known_models

    @model_validator(mode="after")
    def _follow(self) -> Self:
        if self.chat_template_kwargs and self.api != "vllm":
            raise ValueError(f"chat_template_kwargs: --api {self.api} has none. Use --api vllm")
        self.max_batch_tokens = 1 if self.backend == "openai" else RULES_BATCH
        if self.backend == "openai" and self.stall_after is None:
            # A sample takes at most two questions with all their attempts; with several votes each
            # can wait for a free slot. Anything longer is a stall.
            waits = self.max_attempts * (self.request_timeout_s + BACKOFF_S[-1])
            self.stall_after = 2 * waits * MAX_VOTES + 60.0
        return self


class UpstreamSecrets(BaseSettings):
    """Secrets, read only from the environment, so that they are in no process list, log or
    config."""

    model_config = SettingsConfigDict(extra="ignore")

    key: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("JUDGE_UPSTREAM_API_KEY", "VLLM_API_KEY"),
        description="API key of the upstream server.",
    )
