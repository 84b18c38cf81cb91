"""A reward function for TRL's trainers (`reward_funcs`).

trainer = GRPOTrainer(..., reward_funcs=reward_function("http://127.0.0.1:8001", src_key="src"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scorekit.adapters.rewards import message_text, reward_settings, rewards_for
from scorekit.schemas import Failed


def reward_function(
    url: str | Sequence[str] | None = None, *, name: str = "translation_reward", **settings: Any
) -> Callable[..., list[float | None]]:
    """Return a function that TRL calls with prompts, completions and the dataset's columns.

    name: the name in TRL's log. settings: those of RewardSettings, or SCOREKIT_REWARD_<NAME>.
    Prompts and completions may be texts or lists of chat messages. A completion that could not be
    scored gets None; if the service answers for none of them, the function raises.

    Raises UserError if a setting is wrong.
    """
    arguments = settings if url is None else {"url": url, **settings}
    resolved_settings = reward_settings(**arguments)
    rewards_for(resolved_settings)  # raises now if a pattern is wrong

    def rewards(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        source = rewards_for(resolved_settings)
        rows = rows_of_columns(columns, len(prompts))
        samples = [
            source.samples.sample(row, message_text(prompt), message_text(completion))
            for row, prompt, completion in zip(rows, prompts, completions, strict=True)
        ]
        results = source.score_each(samples)
        return [None if r is None or isinstance(r, Failed) else source.reward(r) for r in results]

    rewards.__name__ = rewards.__qualname__ = name
    return rewards


def rows_of_columns(columns: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Return the dataset's rows from what TRL passes by keyword.

    It passes its state and two functions for logging, too; these are no columns.
    """
    names = [name for name, values in columns.items() if _is_column(values, num_rows)]
    return [{name: columns[name][index] for name in names} for index in range(num_rows)]


def _is_column(values: Any, num_rows: int) -> bool:
    return isinstance(values, list) and len(values) == num_rows
