"""The section `episode` of a config: limits of an episode and the form of its observations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from scorekit.config import Config
from trainer.rl.config import SamplingConfig
from trainer.search.images.config import SightConfig

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
