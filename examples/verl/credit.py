"""Credit assignment for the agent loop of scorekit.adapters.verl_tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scorekit.schemas import ErrorSpan
from trainer.translation.offsets import align_completion
from trainer.translation.rewards.credit import spans_to_token_rewards


def assign_credit(tokenizer: Any, ids: Sequence[int]) -> tuple[str, Any]:
    """Return the text of a completion, and a function that maps its error spans to token rewards.

    ids: the sampled token ids. They are decoded once, and never tokenized again.
    """
    alignment = align_completion(tokenizer, ids)

    def token_rewards(
        spans: Sequence[ErrorSpan], severity_weights: Mapping[str, float | None]
    ) -> list[float]:
        return spans_to_token_rewards(alignment.text, alignment.offsets, spans, severity_weights)

    return alignment.text, token_rewards
