"""The `reward` section of a translation run's config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from scorekit.config import Config, split_commas
from scorekit.rewards import RewardDefinition, load_definition
from scorekit.rewards.definition import SeverityWeights
from trainer.config_base import may_change

Urls = Annotated[list[str], BeforeValidator(split_commas)]


def _load_definition(value: Any) -> Any:
    return value if value is None else load_definition(value)


Definition = Annotated[RewardDefinition | None, BeforeValidator(_load_definition)]


class GuardConfig(Config):
    """Penalties for reward hacking, each off by default.

    A guard gives a completion a value between 0 (no problem) and 1; its weight times the value is
    subtracted from the sequence reward.
    """

    w_language: float = Field(
        0.0, ge=0, description="Weight of 1 - probability (language id) of the target language."
    )
    w_script: float = Field(
        0.0, ge=0, description="Weight of the share of letters outside the target's scripts."
    )
    w_copy: float = Field(
        0.0, ge=0, description="Weight of the share of the completion that is copied source."
    )
    w_length: float = Field(
        0.0,
        ge=0,
        description="Weight of how far the length ratio (UTF-8 bytes) leaves the band "
        "that is usual between the two languages.",
    )
    w_repetition: float = Field(
        0.0, ge=0, description="Weight of the share of the completion that is in loops."
    )
    shown: bool = may_change(
        False, description="Compute and log the values of all guards, also without a weight."
    )


class RewardConfig(Config):
    """The reward of a completion, and the services that score it. Only `w_chrf` uses references."""

    metricx_urls: Urls = may_change(
        default_factory=list,
        description="MetricX services, a list or comma-separated; empty: METRICX_URL of the "
        "environment. A `module:Class` instead of a URL scores in this process.",
    )
    metricx_scorer_args: dict[str, Any] = may_change(
        default_factory=dict,
        description="Arguments of a `module:Class` in metricx_urls (dtype, max_batch_tokens, ...). "
        "Keys of the same name in this config are used if it accepts them: "
        "metricx_model_name, metricx_tokenizer_name, and device and threads of misc.",
    )
    metricx_model_name: str | None = may_change(
        None, description="The model that the service must run; null: any."
    )
    metricx_tokenizer_name: str | None = may_change(
        None, description="The tokenizer that the service must use; null: any."
    )
    metricx_offset: float = Field(
        5.0, description="The MetricX reward is this number minus the score (0 best, 25 worst)."
    )
    w_metricx: float = Field(
        1.0, ge=0, description="Weight of the MetricX reward; 0: scored in evaluations only."
    )
    xcomet_urls: Urls = may_change(
        default_factory=list,
        description="xCOMET services, as metricx_urls; empty: XCOMET_URL of the environment.",
    )
    xcomet_scorer_args: dict[str, Any] = may_change(
        default_factory=dict,
        description="Arguments of a `module:Class` in xcomet_urls, as metricx_scorer_args.",
    )
    xcomet_model_name: str | None = may_change(
        None, description="The model that the service must run; null: any."
    )
    w_xcomet_seq: float = Field(0.0, ge=0, description="Weight of the xCOMET sentence score.")
    xcomet_seq_scale: float = Field(1.0, ge=0, description="Factor on the xCOMET sentence score.")
    w_xcomet_span: float = Field(
        1.0, ge=0, description="Weight of the penalties on tokens inside xCOMET's error spans."
    )
    w_mqm_span: float = Field(
        0.0,
        ge=0,
        description="Weight of the penalties on tokens inside error spans of the judge's `mqm`.",
    )
    span_sources_combine: Literal["sum", "max"] = Field(
        "sum",
        description="A token inside spans of both xCOMET and `mqm`: the sum of the two penalties, "
        "each times its weight, or the larger one (max).",
    )
    w_omission: float = Field(
        0.0,
        ge=0,
        description="Weight of omissions that `mqm` reports: the severities' weights, summed, on "
        "the token that ended the sentence (the last one of a truncated completion).",
    )
    w_judge: float = Field(
        0.0, ge=0, description="Weight of the score (0 to 1) that a judge's rubric gives."
    )
    judge_rubric: str = Field(
        "translation_filter", min_length=1, description="The rubric: a task of the judge."
    )
    judge_variables: dict[str, Literal["src", "mt", "src_lang", "tgt_lang"]] = Field(
        {
            "source_text": "src",
            "candidate": "mt",
            "source_lang": "src_lang",
            "target_lang": "tgt_lang",
        },
        description="Each variable of that rubric, and the field of a sample: src, mt, "
        "src_lang or tgt_lang.",
    )
    definition: Definition = Field(
        None,
        description="A composite reward with components and gates, as other trainers use it: a "
        "YAML file, or its content (docs/how-to/composite-rewards.md). null: none.",
    )
    w_definition: float = Field(
        1.0, ge=0, description="Weight of that composite reward; 0: not computed."
    )
    w_chrf: float = Field(
        0.0,
        ge=0,
        description="Weight of the segment's chrF (0 to 100) against its reference, which every "
        "row then needs; 0: rewards use no reference. Services never get one.",
    )
    judge_model_name: str | None = may_change(
        None, description="The model that the judge must ask, for mqm and rubric; null: any."
    )
    severity_weights: SeverityWeights = Field(
        default_factory=SeverityWeights,
        description="Reward of a token inside an error span; of an omission.",
    )
    overlap_policy: Literal["any_overlap", "majority_overlap"] = Field(
        "any_overlap",
        description="A span hits a token if they share one character, or if the span covers at "
        "least `overlap_threshold` of it.",
    )
    overlap_threshold: float = Field(
        0.5, gt=0.0, le=1.0, description="Share of a token's characters, for majority_overlap."
    )
    span_combine: Literal["sum", "min", "max", "spread"] = Field(
        "sum",
        description="Several spans on a token: the sum of their penalties, the weakest (min) or "
        "the strongest (max). spread: each span's penalty is shared among its tokens, then summed.",
    )
    uncovered: Literal["exclude", "sequence_only"] = Field(
        "exclude",
        description="Tokens after the part that the span model could read: no policy gradient, or "
        "the sequence reward only. The KL includes them in both; "
        "see docs/explanation/credit.md.",
    )
    use_confidence: bool = Field(
        False,
        description="Multiply a penalty by its span's confidence; without (`mqm`): unchanged.",
    )
    overlong: Literal["truncate", "windows", "skip", "penalty"] = Field(
        "truncate",
        description="Source and completion over the reward model's limit: score the part that it "
        "can read, score all of it in windows of sentences, leave the sample out of the batch, or "
        "give it text_error_reward. Each case is counted.",
    )
    max_input_length: int | None = Field(
        None, ge=16, description="The reward model's limit in tokens; null: the model's own."
    )
    on_failure: Literal["drop_sample", "fail"] = Field(
        "drop_sample",
        description="If a service fails to give a score: leave the sample out of the batch and "
        "of its mean and deviation, or end the run.",
    )
    text_error_reward: float = Field(
        -20.0,
        description="Sequence reward of a completion whose text cannot be scored "
        "(overlong, invalid_input); never dropped, or the policy would learn to write such texts.",
    )
    guards: GuardConfig = Field(
        default_factory=GuardConfig, description="Penalties for reward hacking."
    )
    no_eos_penalty: float = Field(
        0.0, ge=0.0, description="Penalty of a completion truncated by max_new_tokens."
    )
    terms: dict[str, float] = Field(
        default_factory=dict,
        description="Weights of further components, by name "
        "(trainer/translation/rewards/components).",
    )
    urls: dict[str, Urls] = may_change(
        default_factory=dict,
        description="Services of further components, by name, as metricx_urls.",
    )
    batch_size: int = may_change(64, ge=1, description="Samples in one request to a service.")
    timeout_s: float = may_change(
        60.0,
        gt=0,
        description="Seconds that one request may take; of a service without weight, retries "
        "included.",
    )
    deadline_s: float = may_change(
        300.0, gt=0, description="Seconds after which a failing service is skipped for a batch."
    )

    def weight_of_spans(self, weight: float) -> float:
        """Return the weight of a component of severities; 0 if no severity has a weight."""
        return weight if any(self.severity_weights.model_dump().values()) else 0.0

    def urls_of(self, service: str) -> list[str]:
        """Return the URLs of a service; [] without any."""
        urls = getattr(self, f"{service}_urls", None)
        return self.urls.get(service, []) if urls is None else urls

    def urls_key(self, service: str) -> str:
        """Return the config key of these URLs."""
        if service == "definition":
            return "reward.definition"
        has_own_key = f"{service}_urls" in type(self).model_fields
        return f"reward.{service}_urls" if has_own_key else f"reward.urls.{service}"
