"""The action, observation and state of a search environment on OpenEnv's wire.

Servers and clients import this module, so it needs no more than the package openenv.
"""

from __future__ import annotations

from typing import Any, Literal

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class SearchAction(Action):  # type: ignore[misc]
    """One turn of the policy."""

    text: str = Field(description="The whole turn, of any content.")
    tokens: int | None = Field(
        None,
        ge=0,
        description="Its number of tokens, which counts towards episode.max_response_length; null: "
        "it does not count.",
    )


class SearchObservation(Observation):  # type: ignore[misc]
    """The result of a turn. `reward` is null unless `status` is ok; a failure is never 0."""

    messages: list[dict[str, Any]] = Field(
        default_factory=list,
        description="New messages for the policy in the form of OpenAI's chat completions, with "
        "images as data URLs of PNGs. None after the end.",
    )
    end: str | None = Field(
        None, description="How it ended: complete, forced, declined, context or failed."
    )
    status: Literal["ok", "failed", "late"] | None = Field(
        None, description="Of the reward, when the episode has ended: ok, or why it has none."
    )
    components: dict[str, float] = Field(
        default_factory=dict,
        description="Parts of the reward before their weights; a missing one has no key.",
    )
    error: str | None = Field(
        None, description="The reason of a missing reward. Not for the policy to see."
    )
    pages: list[str] = Field(
        default_factory=list, description="Ids of the pages shown, at the end."
    )
    longest_turn_s: float | None = Field(
        None,
        description="After a reset: seconds that a turn may take by the deadlines of the server's "
        "config. A client has to wait longer.",
    )


class SearchState(State):  # type: ignore[misc]
    """The state of a session. `episode_id` is the one of the reset, or that of the record."""

    trajectory_id: str | None = Field(None, description="Id of the record that the server writes.")
    question_id: str | None = Field(None, description="Id of the question.")
    done: bool = Field(True, description="No episode runs.")
    episodes: dict[str, int] = Field(
        default_factory=dict,
        description="Ended episodes of all sessions of the server by status: ok, failed, late.",
    )
