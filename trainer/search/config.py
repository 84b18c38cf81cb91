"""The config of a search run, with a sentence for each key. Unknown keys are errors.

The sections come first, in the order of a run: questions, episode, reward, update, and the servers.
`SearchConfig` at the end has them all. That of generator and judge is in `answer/config.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from scorekit.config import Config
from scorekit.llm.dialects import DialectName
from scorekit.rows.samples import BadRows
from trainer.chat.config import ChatConfig
from trainer.config_base import may_change
from trainer.rl.config import PolicyConfig, RLConfig, SamplingConfig
from trainer.runs.config import (
    DEFAULT_EVAL_SET,
    EvalConfig,
    HeldOutData,
    HeldOutSet,
    MiscConfig,
    RunConfig,
    SetName,
    StopConfig,
)
from trainer.search.answer.config import AnsweringConfig
from trainer.search.records import BoxConvention

#: Field of a question -> the columns that may hold it; the first one with a value is used. `a.b` is
#: the field b within the column a, as in the Parquet files of veRL-like trainers.
COLUMNS: dict[str, tuple[str, ...]] = {
    "id": ("id", "uid", "extra_info.uid", "extra_info.index"),
    "question": ("question", "extra_info.question", "query"),
    "reference_answer": (
        "reference_answer",
        "ground_truth",
        "extra_info.reference_answer",
        "extra_info.ground_truth",
        "reward_model.ground_truth",
        "answer",
        "extra_info.answer",
    ),
    "reference_answers": ("reference_answers", "extra_info.reference_answers"),
    "file_name": ("file_name", "extra_info.file_name"),
    "reference_page": ("reference_page", "extra_info.reference_page"),
    "gold_pages": ("gold_pages", "extra_info.gold_pages"),
    "alternatives": ("alternatives", "extra_info.alternatives"),
    "question_type": ("question_type", "extra_info.question_type", "type"),
    "max_turns": ("max_turns", "extra_info.max_turns"),
    "temperature": ("temperature", "extra_info.temperature"),
    "n_agent": ("n_agent", "extra_info.n_agent"),
}


class SearchData(HeldOutData):
    """The files of questions and how to read them."""

    train: str | None = Field(
        None,
        description="Questions to learn from: a file (JSONL, JSON, CSV, TSV, each also as .gz; "
        "Parquet), a folder of them or of shards, or a hub id.",
    )
    train_split: str | None = Field(None, description="Split of `train`, for a folder or hub id.")
    train_limit: int | None = Field(None, ge=1, description="Read this many rows of it at most.")
    eval: str | None = Field(None, description="Held-out questions, in the same forms as `train`.")
    eval_split: str | None = Field(None, description="Split of `eval`, for a folder or hub id.")
    eval_sets: dict[SetName, HeldOutSet] = Field(
        default_factory=dict,
        description="Further held-out sets by name, each a path or keys of its own: all are "
        "evaluated, with figures of their own.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our field (question, reference_page, ...) -> the column that holds it; "
        "`meta.page`: the field `page` within the column `meta`.",
    )
    max_prompt_length: int | None = Field(
        None,
        ge=1,
        description="Questions whose message has more tokens are left out, and counted; the "
        "instructions, which all questions share, are not counted. null: none is left out.",
    )
    overlong_prompts: Literal["leave_out", "refuse"] = Field(
        "leave_out", description="Or such a question ends the run before it begins."
    )
    bad_rows: BadRows = Field(
        "refuse",
        description="Rows that cannot be used (no JSON, a field that is missing or of another "
        "type): end the run with a list of them, or skip them: a warning counts them and lists "
        "the first 20.",
    )
    missing_gold: Literal["refuse", "leave_out"] = Field(
        "refuse",
        description="What a question does whose gold page is not in the index: end the run before "
        "it begins, or be left out, and counted.",
    )

    @field_validator("columns")
    @classmethod
    def _has_known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(value) - set(COLUMNS))
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(COLUMNS)}")
        return value

    @property
    def held_out(self) -> dict[str, HeldOutSet]:
        """Return all evaluation sets by name, first that of `eval`."""
        first = {}
        if self.eval is not None:
            first[DEFAULT_EVAL_SET] = HeldOutSet(path=self.eval, split=self.eval_split)
        return first | self.eval_sets


#: Above this aspect, Qwen's processors return sizes beyond their own limits.
_LARGEST_ASPECT = 50.0


class SightConfig(Config):
    """The sizes of images and the limits of crops.

    They must be the same in training and evaluation, because boxes depend on them.
    """

    min_pixels: int = Field(
        200_704, ge=1, description="Least area of a picture as shown; smaller ones are enlarged."
    )
    max_pixels: int = Field(401_408, ge=1, description="Largest area of a picture as shown.")
    factor: int = Field(
        28,
        ge=1,
        description="Sides as shown are multiples of it: the patch of the model times its merge "
        "(Qwen2.5-VL 28, Qwen3-VL 32); 1 for a model that takes any size.",
    )
    box_convention: BoxConvention = Field(
        "pixel",
        description="How a box is written: in pixels of the picture last shown, or with its sides "
        "as 0-1000, or as 0-1.",
    )
    crop_padding: int = Field(
        28, ge=0, description="What is shown around a box on each side, in pixels as shown."
    )
    min_crop: int = Field(
        28, ge=1, description="Least side of a crop with its padding, in pixels of the page."
    )
    max_aspect: float = Field(
        _LARGEST_ASPECT,
        ge=1,
        le=_LARGEST_ASPECT,
        description="Of a crop, its longer side by the other.",
    )
    legible_px: float = Field(
        9.0,
        gt=0,
        description="With observation text: least font size, in pixels as shown, that is read.",
    )
    max_lines: int | None = Field(
        None,
        ge=1,
        description="With observation text: lines that are told of a picture; of those behind them "
        "only how many they are, and where a crop shows more. null: all.",
    )

    @model_validator(mode="after")
    def _sizes_are_possible(self) -> SightConfig:
        if self.max_pixels < 2 * self.min_pixels or self.min_pixels < self.factor**2:
            raise ValueError(
                "max_pixels must be at least twice min_pixels, and min_pixels at least factor "
                "squared. Otherwise some images have no size between them."
            )
        return self


LinePart = Literal["page", "rank", "frame", "turns_left"]


class EpisodeConfig(Config):
    """The limits of an episode and the form of its observations."""

    max_turns: int = Field(
        7,
        ge=1,
        description="Turns of the policy, where a row does not say; then the end is forced.",
    )
    max_response_length: int = Field(
        2048, ge=1, description="Tokens that the policy may write in all turns together."
    )
    context_length: int | None = Field(
        None,
        ge=1,
        description="Ids of an episode, pictures among them; null: as many as the model reads.",
    )
    top_k: int = Field(10, ge=1, description="Pages that a query is asked for.")
    pages_per_search: int = Field(
        1, ge=1, description="Of these, how many of those not shown yet are shown."
    )
    observation: Literal["image", "text"] = Field(
        "image",
        description="What is shown: the picture, or the lines of it that can be read at its size.",
    )
    observation_line: list[LinePart] = Field(
        default=["page", "rank", "frame", "turns_left"],
        description="What is said of each picture: its page, the page's rank, the size that boxes "
        "are in, the turns left.",
    )
    instructions: str | None = Field(
        None,
        description="The system message, in place of the built-in one, such as a policy was "
        "fine-tuned with elsewhere; {turns} in it becomes the turns of the episode.",
    )
    sight: SightConfig = Field(
        default_factory=SightConfig, description="Sizes of pictures, and crops."
    )


class TurnSamplingConfig(SamplingConfig):
    """The sampling settings of a turn. A server gets length, temperature, top_p and top_k."""

    max_new_tokens: int = Field(
        1024, ge=1, description="Longest turn in tokens: a think block and its action."
    )
    num_samples_per_prompt: Literal[1] = Field(
        1, description="Turns of an episode; the episodes of a question are rollout.n_agent."
    )


Preset = Literal["phase1", "phase2", "focused", "unified"]
Forced = Literal["score", "zero", "penalty"]
#: Pages that count as a hit: the gold page; any page of its document; the gold page or a page with
#: the same fact (`Question.alternatives`).
GoldUnit = Literal["page", "document", "alternatives"]
#: Preset -> weights of judge, NDCG and format; what a forced end earns. Where the form has a weight
#: it earns 0, because a right form ends with search_complete. Elsewhere the answer is still judged,
#: and the end costs something.
PRESETS: Final[dict[Preset, tuple[float, float, float, Forced]]] = {
    "phase1": (0.0, 0.9, 0.1, "zero"),
    "phase2": (0.8, 0.2, 0.0, "penalty"),
    "focused": (1.0, 0.0, 0.0, "penalty"),
    "unified": (0.4, 0.5, 0.1, "zero"),
}
#: Key of a weight -> the environment variable that may set it.
ENVIRONMENT: Final = {
    "w_judge": "RM_JUDGE_COEF",
    "w_ndcg": "RM_NDCG_COEF",
    "w_format": "RM_FORMAT_COEF",
}


class SearchRewardConfig(Config):
    """The reward of an episode: w_judge * score + w_ndcg * NDCG + w_format * well-formed.

    A weight comes from the config, else the environment, else the preset. forced_completion comes
    from the config, else the preset. A saved config has all.
    """

    preset: Preset = Field(
        "phase2",
        description="Weights of judge, NDCG and format where nothing else says them: phase1 "
        "0/0.9/0.1, phase2 0.8/0.2/0, focused 1/0/0, unified 0.4/0.5/0.1. Without a weight on the "
        "judge (phase1) neither generator nor judge is called.",
    )
    w_judge: float | None = Field(
        None, ge=0, description="Weight of the judge's score. Also RM_JUDGE_COEF."
    )
    w_ndcg: float | None = Field(None, ge=0, description="Weight of NDCG. Also RM_NDCG_COEF.")
    w_format: float | None = Field(
        None, ge=0, description="Weight of a well-formed episode. Also RM_FORMAT_COEF."
    )
    gate: bool | None = Field(
        None,
        description="An episode that is not well-formed earns 0, whatever else it did, and is not "
        "judged. Default: where format has a weight.",
    )
    ndcg_gold: GoldUnit = Field(
        "page",
        description="What counts as found: the gold page; any page of its document; or the gold "
        "page and those of `alternatives`. Each gold counts once.",
    )
    forced_completion: Forced | None = Field(
        None,
        description="An episode that did not end itself (its turns were used up, or its context): "
        "score: earns what it earns; zero: 0, and is not judged; penalty: forced_penalty is taken "
        "off. Default: the preset's, which is zero for phase1 and unified, penalty for phase2 and "
        "focused.",
    )
    forced_penalty: float = Field(
        0.1, ge=0, description="Taken off under forced_completion: penalty; may go below 0."
    )

    @model_validator(mode="after")
    def _resolve(self) -> SearchRewardConfig:
        *weights, forced_end = PRESETS[self.preset]
        for key, value in zip(ENVIRONMENT, weights, strict=True):
            if getattr(self, key) is None:
                from_environment = _from_environment(ENVIRONMENT[key])
                setattr(self, key, value if from_environment is None else from_environment)
        if self.forced_completion is None:
            self.forced_completion = forced_end
        if self.gate is None:
            self.gate = bool(self.w_format)
        if not (self.w_judge or self.w_ndcg or self.w_format):
            raise ValueError(
                "all weights are 0, so every reward would be 0. Set w_judge, w_ndcg or w_format."
            )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each reward component."""
        return {key.removeprefix("w_"): getattr(self, key) for key in ENVIRONMENT}


def _from_environment(name: str) -> float | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"environment variable {name}: expected a number >= 0")
    return value


#: The defaults of `rl` in this task.
_RL_DEFAULTS: dict[str, Any] = {
    "algorithm": "gspo",
    "batch_size": 16,
    "minibatch_size": 8,
    "ppo_epochs": 1,
    "kl_coef": 0.0,
    "advantage_norm": "grpo",
    "advantage_eps": 1e-6,
}


class OnlineBudgetConfig(Config):
    """The number of episodes of each question, chosen from the results so far."""

    n_max: int | None = Field(
        None,
        ge=2,
        description="Most episodes of a question in an update, whose total stays rl.batch_size x "
        "rollout.n_agent; null: off, each question has its own n_agent or rollout.n_agent.",
    )
    n_min: int = Field(2, ge=2, description="Fewest episodes of a question in an update.")
    success: float = Field(
        0.5, description="An episode succeeds that earns this: a group teaches if some do."
    )
    earlier: list[str] = Field(
        default=[],
        description="Folders of runs with the same reward whose results count from the start.",
    )


class SearchRLConfig(RLConfig):
    """The update of the policy: GSPO over groups, without a KL and without an entropy bonus."""

    epochs: int | None = may_change(
        None,
        ge=1,
        description="Passes over the questions, in place of num_updates; what does not fill an "
        "update waits for the next pass.",
    )
    warmup_ratio: float | None = may_change(
        None,
        ge=0,
        lt=1,
        description="Share of the updates that warm up, in place of warmup_updates.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_this_task(cls, data: Any) -> Any:
        return _RL_DEFAULTS | data if isinstance(data, dict) else data

    def over(self, questions: int) -> SearchRLConfig:
        """Return the config with num_updates and warmup_updates for a number of questions."""
        values = self.model_dump()
        if self.epochs is not None:
            values["num_updates"] = max(
                1, self.epochs * questions // (self.batch_size * self.grad_accum)
            )
        if self.warmup_ratio is not None:
            values["warmup_updates"] = int(self.warmup_ratio * values["num_updates"])
        return SearchRLConfig(**values)


class RetrieverConfig(Config):
    """The retriever service (services/retriever)."""

    url: str = may_change("http://localhost:8005", description="Its address; it may move in a run.")
    timeout_s: float = may_change(60.0, gt=0, description="Seconds for one request.")
    deadline_s: float = may_change(300.0, gt=0, description="The same with all attempts.")
    max_in_flight: int = may_change(
        32, ge=1, description="Requests at once, of each process of the run."
    )


class PolicyServerConfig(Config):
    """A policy behind an OpenAI-compatible server, used instead of `policy`."""

    url: str | None = may_change(None, description="Its address, with /v1; null: `policy.path`.")
    model: str = Field("", description="Its model's name there.")
    api_key_env: str = may_change(
        "POLICY_API_KEY", description="Environment variable with the key."
    )
    api: DialectName = Field(
        "vllm",
        description="vllm: chat completions with every sampling field; openai: with OpenAI's own; "
        "gemini: as openai, without a seed; responses: the Responses API.",
    )
    max_in_flight: int = may_change(32, ge=1, description="Requests at once.")
    request_timeout_s: float = may_change(
        120.0,
        gt=0,
        description="Seconds for one attempt at a turn; with api vllm the least.",
    )
    max_attempts: int = may_change(6, ge=1, description="Attempts at one turn.")


class RolloutConfig(Config):
    """The number of episodes for each question."""

    n_agent: int = Field(
        1, ge=1, description="Episodes of a question: its group, where a row does not say."
    )
    online_budget: OnlineBudgetConfig = Field(
        default_factory=OnlineBudgetConfig,
        description="Episodes by the results so far. Of training alone.",
    )
    dynamic_sampling: int = Field(
        0,
        ge=0,
        description="How often, at most, further questions are sampled for an update in place of "
        "those whose episodes all earned the same.",
    )
    deterministic: bool = may_change(
        False,
        description="Sample the turns of all episodes together, so that a run that was "
        "interrupted repeats them bit by bit; slower, since every turn waits for the slowest "
        "episode. Only if this process samples (generation.engine generate).",
    )
    deadline_s: float = may_change(
        600.0,
        gt=0,
        description="Seconds from a step's last turn on in which its rewards have to come; what "
        "comes later is dropped, and counted.",
    )

    @model_validator(mode="after")
    def _budget_has_room(self) -> RolloutConfig:
        online = self.online_budget
        if online.n_max is not None and not online.n_min <= self.n_agent <= online.n_max:
            raise ValueError(
                f"online_budget: n_agent {self.n_agent} is the mean of a question's episodes: it "
                f"has to be from n_min {online.n_min} to n_max {online.n_max}"
            )
        return self


class SearchConfig(RunConfig):
    """The config of a search run."""

    task: Literal["search"] = Field("search", description="What is learned.")
    data: SearchData = may_change(default_factory=SearchData, description="Questions.")
    retriever: RetrieverConfig = may_change(
        default_factory=RetrieverConfig, description="The pages."
    )
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="The model.")
    server: PolicyServerConfig = Field(
        default_factory=PolicyServerConfig, description="Or its server."
    )
    chat: ChatConfig = Field(default_factory=ChatConfig, description="Messages to text.")
    generation: TurnSamplingConfig = Field(
        default_factory=TurnSamplingConfig, description="How turns are sampled."
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Episodes.")
    episode: EpisodeConfig = Field(default_factory=EpisodeConfig, description="What one may do.")
    answering: AnsweringConfig = Field(
        default_factory=AnsweringConfig, description="From evidence to a judged answer."
    )
    reward: SearchRewardConfig = Field(
        default_factory=SearchRewardConfig, description="What an episode earns."
    )
    rl: SearchRLConfig = Field(default_factory=SearchRLConfig, description="Update.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation.")
    stop: StopConfig = may_change(default_factory=StopConfig, description="Early ends.")
    misc: MiscConfig = Field(
        default_factory=lambda: MiscConfig(run_dir="runs/search"), description="The rest."
    )

    @model_validator(mode="after")
    def _deterministic_sampling_is_here(self) -> SearchConfig:
        if self.rollout.deterministic and self.generation.engine != "generate":
            raise ValueError(
                "rollout.deterministic: a vLLM server forms its batches itself. Set it to false, "
                "or generation.engine to generate"
            )
        return self

    @classmethod
    def of_run(cls, recorded: Mapping[str, Any]) -> SearchConfig:
        """Return the recorded config; earlier versions always sent the images as shown."""
        answering = dict(recorded.get("answering") or {})
        answering["generator"] = {"images": "shown"} | (answering.get("generator") or {})
        return cls.model_validate({**recorded, "answering": answering})

    @property
    def original_pixels(self) -> int | None:
        """Return the max area of the originals that are stored; None if nobody needs them."""
        generator = self.answering.generator
        needs_originals = self.reward.weights["judge"] and generator.images == "original"
        return generator.max_pixels if needs_originals else None

    @property
    def sources(self) -> dict[str, str | None]:
        """Return the paths that a run reads by config key."""
        return super().sources | {"chat.template": self.chat.template}

    def eval_generation(self) -> TurnSamplingConfig:
        """Return the sampling settings for evaluation."""
        return self.eval.sampling(self.generation)
