"""A reward function for verl 0.9.1.

    reward.custom_reward_function.path=pkg://scorekit.adapters.verl
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.url=http://127.0.0.1:8001
    +reward.custom_reward_function.reward_kwargs.reward_manager='${reward.reward_manager.name}'

Start the trainer with `python -m scorekit.adapters.verl_run`, which checks these keys before Ray
starts. Settings are those of RewardSettings, as `reward_kwargs` or from SCOREKIT_REWARD_<NAME>;
`definition` in place of `url` gives a composite reward. A sample's fields are those of
`extra_info`, and `ground_truth`. A failure raises, so verl drops the completion from its group. A
mistake of the user's raises no Exception but `RunEnds`, which no reward manager takes for a failed
completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from scorekit.adapters.shared import (
    Sent,
    SpanWeights,
    TrainerReward,
    TrainerRow,
    message_text,
    once_per_loop,
    reward_settings,
)
from scorekit.errors import ModelChanged, RequestError, UserError
from scorekit.rewards import RewardDefinition

#: Reward managers of verl 0.9.1 that let an exception of an async function pass.
RAISING_MANAGERS = ("naive", "dapo", "gdpo")
#: What our agent loop gives beside single rows.
LOOP_SENDS: tuple[Sent, ...] = ("tokens",)

#: Statuses of a request that every later one gets, too: a wrong URL or key.
_CONFIG_STATUS = frozenset({401, 403, 404, 405, 415})


class RunEnds(BaseException):
    """A mistake for which no completion can have a reward.

    It is no Exception on purpose: the manager `rate_limited` answers every Exception with reward 0,
    and others take it for the failure of one completion.
    """


class UnsafeRewardManager(RunEnds):
    """A reward manager that may turn a failure into reward 0."""


@contextmanager
def mistakes_end_the_run() -> Iterator[None]:
    """Raise RunEnds for a wrong setting, definition, row or key, and where the model changed."""
    try:
        yield
    except (UserError, ModelChanged) as error:
        raise RunEnds(str(error)) from error
    except RequestError as error:
        if error.status in _CONFIG_STATUS:
            raise RunEnds(str(error)) from error
        raise


def certain_numbers(definition: RewardDefinition) -> set[str]:
    """Return the names of `component_numbers` that every sample with a reward has a number for."""
    names = {f"gate_closed/{name}" for name in definition.gates}
    if not definition.refused_text_reward:
        for name in definition.required:
            names |= {f"component/{name}", f"scaled/{name}"}
    return names


def reward_of_loop(values: Mapping[str, Any], spans: SpanWeights | None = None) -> TrainerReward:
    """Return the reward of these settings for the running event loop.

    It is made once: verl calls for every completion.
    spans: of a loop that rewards tokens.
    Raises UserError for a wrong setting.
    """
    plain = plain_settings(values)
    sends = () if spans is None else LOOP_SENDS
    return once_per_loop(
        f"verl {spans}",
        plain,
        lambda: TrainerReward(reward_settings(**plain), "verl", sends=sends, spans=spans),
    )


def plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dicts and lists in place of other mappings and sequences (OmegaConf)."""
    return {str(name): _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value


async def compute_score(
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward_manager: str | None = None,
    reward_router_address: Any = None,
    reward_model_tokenizer: Any = None,
    **settings: Any,
) -> dict[str, float | None]:
    """Return `score`, the reward of one completion, and the numbers of its components.

    Of one service: its score under its name. Of a definition: see
    `scorekit.adapters.shared.component_numbers`.

    reward_manager: the reward manager's name in verl's config. Without it nothing says what the
    manager makes of a failure.
    reward_router_address, reward_model_tokenizer: verl passes them if it runs a reward model.

    Raises UnsafeRewardManager if the manager is not known to let exceptions pass, RunEnds for a
    mistake (see `mistakes_end_the_run`), and else the errors of `TrainerReward.score_one`.
    """
    if reward_manager not in RAISING_MANAGERS:
        raise UnsafeRewardManager(
            f"reward_kwargs.reward_manager: {reward_manager!r} may turn a failed score into reward "
            f"0. Choose one of {', '.join(RAISING_MANAGERS)} and pass its name"
        )
    with mistakes_end_the_run():
        fields = {**(extra_info or {}), "ground_truth": ground_truth}
        prompt = fields.get("prompt")
        text = None if prompt is None else message_text(prompt)
        reward = reward_of_loop(settings)
        result = await reward.score_one(TrainerRow(fields, text, solution_str))
    return {"score": result.reward, **reward.numbers(result)}
