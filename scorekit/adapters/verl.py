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

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scorekit.adapters.shared import (
    RewardSettings,
    Samples,
    check_single_samples,
    definition_of,
    message_text,
    once_per_loop,
    options_for,
    reward_of,
    reward_settings,
)
from scorekit.client import ScoringClient
from scorekit.errors import (
    TEXT_ERROR_TYPES,
    ModelChanged,
    RequestError,
    SampleError,
    UserError,
)
from scorekit.rewards import CompositeReward, RewardDefinition, RewardResult, raise_for_missing
from scorekit.schemas import JudgeScored, Scored
from scorekit.scorers import raise_for_failures

#: Reward managers of verl 0.9.1 that let an exception of an async function pass.
RAISING_MANAGERS = ("naive", "dapo", "gdpo")


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


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Holds the reward of one completion, its components, and the services' results.

    numbers: of the components, by names that are the same for every sample; None: no value.
    answers: the result of each service that has scored the text, by its component's name.
    is_refused_text: the reward is the one that a definition gives to texts which a service refuses.
    """

    reward: float
    numbers: dict[str, float | None]
    answers: dict[str, Scored | JudgeScored]
    is_refused_text: bool = False


class ServiceRewards:
    """Gets rewards from one scoring service within one event loop."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.samples = Samples(settings)
        self._client = ScoringClient(settings.url, **settings.client_options)

    async def score(self, fields: Mapping[str, Any], prompt: str | None, mt: str) -> ScoredText:
        """Return the reward of one completion.

        Raises SampleError, RequestError, ServiceUnreachable or UserError; never returns a number
        for a failure."""
        sample = self.samples.sample(fields, prompt, mt)
        info = await self._client.limits()
        results = await self._client.score([sample], options_for(info, self.settings))
        (result,) = raise_for_failures(results)
        reward = reward_of(result, info, self.settings)
        if not (math.isfinite(reward) and math.isfinite(result.score)):
            message = f"the score is {result.score}, the reward {reward}"
            raise SampleError("non_finite", message, id=result.id, index=0)
        return ScoredText(reward, {info.service: result.score}, {info.service: result})


class DefinitionRewards:
    """Gets composite rewards within one event loop. Concurrent calls share requests.

    definition: one that the caller has checked; None: that of the settings, checked for verl.
    """

    def __init__(
        self, settings: RewardSettings, definition: RewardDefinition | None = None
    ) -> None:
        self.samples = Samples(settings)
        self._reward = CompositeReward(definition or sample_definition(settings))

    async def score(self, fields: Mapping[str, Any], prompt: str | None, mt: str) -> ScoredText:
        """Return the reward of one completion.

        Raises SampleError if it has none, and the errors of `CompositeReward.score`."""
        results = await self._reward.score([self.samples.sample(fields, prompt, mt)])
        (reward,) = raise_for_missing(results)
        components = results[0].components
        answers = {
            name: component.answer
            for name, component in components.items()
            if isinstance(component.answer, Scored | JudgeScored)
        }
        is_refused = any(c.weight and c.status in TEXT_ERROR_TYPES for c in components.values())
        return ScoredText(reward, component_numbers(results[0]), answers, is_refused)


def sample_definition(settings: RewardSettings) -> RewardDefinition:
    """Return the settings' definition. Raises UserError if it needs more than verl passes."""
    definition = definition_of(settings)
    check_single_samples(definition, "verl")
    return definition


def component_numbers(result: RewardResult) -> dict[str, float | None]:
    """Return `component/NAME` (raw), `scaled/NAME` and `gate_closed/NAME` (1 or 0).

    Every sample has all names: verl takes those of the first one of a batch, and fails where
    another lacks one. None: no value. verl's means leave None out, while NaN would make them NaN.
    """
    numbers: dict[str, float | None] = {}
    for name, component in result.components.items():
        numbers[f"component/{name}"] = component.raw
        numbers[f"scaled/{name}"] = component.scaled
    for name, gate in result.gates.items():
        numbers[f"gate_closed/{name}"] = (
            None if gate.status == "unknown" else float(gate.status == "closed")
        )
    return numbers


def certain_numbers(definition: RewardDefinition) -> set[str]:
    """Return the names of `component_numbers` that every sample with a reward has a number for."""
    components = definition.components
    names = {f"gate_closed/{name}" for name in definition.gates}
    for name, config in components.items():
        if config.weight and not definition.refused_text_reward:
            names |= {f"component/{name}", f"scaled/{name}"}
    return names


def async_rewards(values: Mapping[str, Any]) -> ServiceRewards | DefinitionRewards:
    """Return the client of these settings for the running event loop.

    It is made once: verl calls for every completion. Raises UserError for a wrong setting."""
    plain = plain_settings(values)
    return once_per_loop("verl", plain, lambda: make_rewards(reward_settings(**plain)))


def make_rewards(settings: RewardSettings) -> ServiceRewards | DefinitionRewards:
    """Return a client of these settings; nothing is requested yet.

    Raises UserError for a wrong setting, or if a rule or a model of a definition cannot be loaded.
    """
    kind = ServiceRewards if settings.definition is None else DefinitionRewards
    return kind(settings)


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

    Of one service: its score under its name. Of a definition: see `component_numbers`.

    reward_manager: the reward manager's name in verl's config. Without it nothing says what the
    manager makes of a failure.
    reward_router_address, reward_model_tokenizer: verl passes them if it runs a reward model.

    Raises UnsafeRewardManager if the manager is not known to let exceptions pass, RunEnds for a
    mistake (see `mistakes_end_the_run`), and else the errors of `score` of ServiceRewards or
    DefinitionRewards.
    """
    if reward_manager not in RAISING_MANAGERS:
        raise UnsafeRewardManager(
            f"reward_kwargs.reward_manager: {reward_manager!r} may turn a failed score into reward "
            f"0. Choose one of {', '.join(RAISING_MANAGERS)} and pass its name"
        )
    with mistakes_end_the_run():
        rewards = async_rewards(settings)
        fields = {**(extra_info or {}), "ground_truth": ground_truth}
        prompt = fields.get("prompt")
        text = None if prompt is None else message_text(prompt)
        scored = await rewards.score(fields, text, solution_str)
    return {"score": scored.reward, **scored.numbers}
