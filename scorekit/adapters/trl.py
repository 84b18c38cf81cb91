"""A reward function for TRL's trainers (`reward_funcs`).

trainer = GRPOTrainer(..., reward_funcs=reward_function("http://127.0.0.1:8001", src_key="src"))
trainer = GRPOTrainer(..., reward_funcs=reward_function(definition="reward.yaml", src_key="src"))
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from scorekit.adapters.shared import (
    RewardSettings,
    component_columns,
    composite_rewards_for,
    definition_of,
    message_text,
    reward_settings,
    rewards_for,
    truncation_rules,
)
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.rewards import RewardDefinition, RewardResult
from scorekit.rewards.results import log_words, refusing_gate
from scorekit.schemas import Failed

log = logging.getLogger(__name__)

RewardFunction = Callable[..., list[float | None]]
#: Calls in a row in which no completion has a reward, because components failed or gates could not
#: decide. TRL would go on, with loss 0.
MAX_UNREWARDED_CALLS = 8
#: Fields of a sample that the completions of one group share, beside the prompt.
_GROUP_FIELDS = ("src", "ref", "src_lang", "tgt_lang")


def reward_function(
    url: str | Sequence[str] | None = None,
    *,
    name: str = "translation_reward",
    num_generations: int | None = None,
    **settings: Any,
) -> RewardFunction:
    """Return a function that TRL calls with prompts, completions and the dataset's columns.

    name: the name in TRL's log. settings: those of RewardSettings, or SCOREKIT_REWARD_<NAME>;
    `definition`, a composite reward, takes the place of `url`.
    Prompts and completions may be texts or lists of chat messages. A completion that could not be
    scored gets None; if the services answer for none of them, the function raises, and so it does
    if components have failed, or gates could not decide, for all completions of
    `MAX_UNREWARDED_CALLS` calls in a row.

    With a definition, TRL logs for each component the mean of the values that there are, and the
    share of completions that have one (`coverage`); a table of completions gets each value, and
    the reason where the reward is missing or lowered.

    Rules of groups see the consecutive completions with equal prompt, source, reference and
    languages: two neighbouring equal rows of a dataset are one group, unless `num_generations`
    (the trainer's) says how large a group is. TRL 1.16 gives each process
    `per_device_train_batch_size * steps_per_generation` completions. If that is no multiple of
    `num_generations`, a process has a part of a group: the function then raises in all processes.

    Raises UserError if a setting is wrong.
    """
    arguments = settings if url is None else {"url": url, **settings}
    resolved_settings = reward_settings(**arguments)
    is_composite = resolved_settings.definition is not None
    if num_generations is not None:
        _check_group_size(resolved_settings, num_generations)
    if is_composite:
        rewards = _composite_function(resolved_settings, name, num_generations)
    else:
        rewards = _service_function(resolved_settings)
    rewards.__name__ = rewards.__qualname__ = name
    return rewards


def _check_group_size(settings: RewardSettings, num_generations: int) -> None:
    """Raise UserError if the size of a group is wrong or has no effect."""
    if num_generations < 1:
        raise UserError(f"num_generations: {num_generations}. Give the trainer's num_generations")
    if settings.definition is None or not settings.definition.has_group_rules:
        raise UserError("num_generations: has no effect without a rule of groups. Remove it")


class _UnrewardedCalls:
    """Ends a run that gets no reward at all."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, failures: Sequence[str | None]) -> None:
        """Count a call. failures: why each completion has no reward; None: it has one, or a gate
        has refused it.

        Raises ServiceUnreachable if the last `MAX_UNREWARDED_CALLS` calls have failed throughout.
        """
        if not failures:
            return
        self._count = 0 if None in failures else self._count + 1
        if self._count >= MAX_UNREWARDED_CALLS:
            raise ServiceUnreachable(
                "reward", f"no completion of {self._count} calls has one: {log_words(failures[0])}"
            )


def _service_function(settings: RewardSettings) -> RewardFunction:
    rewards_for(settings)  # raises now if a pattern is wrong
    unrewarded = _UnrewardedCalls()

    def rewards(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        source = rewards_for(settings)
        rows = rows_of_columns(columns, len(prompts))
        samples = [
            source.samples.sample(row, message_text(prompt), completion_text(completion))
            for row, prompt, completion in zip(rows, prompts, completions, strict=True)
        ]
        results = source.score_each(samples)
        unrewarded.note(
            [
                "no answer"
                if r is None
                else f"{r.error.type}: {r.error.message}"
                if isinstance(r, Failed)
                else None
                for r in results
            ]
        )
        return [None if r is None or isinstance(r, Failed) else source.reward(r) for r in results]

    return rewards


def _composite_function(
    settings: RewardSettings, name: str, num_generations: int | None
) -> RewardFunction:
    definition = definition_of(settings)
    composite_rewards_for(settings)  # raises now if a pattern or a rule is wrong
    truncations = truncation_rules(definition)
    unrewarded = _UnrewardedCalls()

    def rewards(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        source = composite_rewards_for(settings)
        rows = rows_of_columns(columns, len(prompts))
        if truncations and rows and "finish_reason" not in rows[0]:
            raise UserError(
                f"components.{truncations[0]}: TRL passes no finish_reason. Remove the rule, or "
                "return finish_reason from a rollout_func"
            )
        samples = [
            source.samples.sample(row, message_text(prompt), completion_text(completion))
            for row, prompt, completion in zip(rows, prompts, completions, strict=True)
        ]
        groups = None
        if definition.has_group_rules:
            groups = group_indices(prompts, samples, num_generations)
        results = source.score(samples, groups)
        _log_components(name, results, columns)
        unrewarded.note([_failure(definition, result) for result in results])
        return [result.reward for result in results]

    return rewards


def _failure(definition: RewardDefinition, result: RewardResult) -> str | None:
    """Return why a completion has no reward; None: it has one, or a closed gate has refused it."""
    refusal = refusing_gate(definition, result.gates)
    is_refused = refusal is not None and result.gates[refusal[0]].status == "closed"
    return None if result.reward is not None or is_refused else result.reason


def completion_text(completion: Any) -> str:
    """Return the text of a completion: of chat messages the policy's last text, no tool's."""
    if isinstance(completion, str):
        return completion
    return message_text([m for m in completion if m.get("role", "assistant") == "assistant"])


def group_indices(
    prompts: Sequence[Any], samples: Sequence[Mapping[str, Any]], num_generations: int | None = None
) -> list[int]:
    """Return the group of each completion: a new one begins where prompt or source change.

    num_generations: the size of every group; None: as large as the run of equal rows.
    Raises UserError if this process has a part of a group.
    """
    keys = [
        (prompt, *(sample.get(name) for name in _GROUP_FIELDS))
        for prompt, sample in zip(prompts, samples, strict=True)
    ]
    if num_generations is not None:
        return _groups_of_size(keys, num_generations)
    _check_complete([repr((message_text(prompt), *fields)) for prompt, *fields in keys])
    return [group for group, (_, run) in enumerate(groupby(keys)) for _ in run]


def _groups_of_size(keys: Sequence[tuple[Any, ...]], size: int) -> list[int]:
    groups = [index // size for index in range(len(keys))]
    is_mixed = any(key != keys[group * size] for key, group in zip(keys, groups, strict=True))
    if is_mixed or len(keys) % size:
        raise UserError(
            f"num_generations: {len(keys)} completions of this process are not groups of {size} "
            "equal rows. Give the trainer's num_generations, and let "
            "per_device_train_batch_size * steps_per_generation be a multiple of it"
        )
    return groups


def _check_complete(keys: list[str]) -> None:
    """Raise UserError, in all processes, if one of them has a part of a group.

    keys: of this process's completions. The completions of all processes follow each other, so
    the shortest run of equal keys over all is the size of a group.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    gathered: list[list[str]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(gathered, keys)
    size = min(len(list(run)) for _, run in groupby(chain.from_iterable(gathered)))
    for process_keys in gathered:
        if len(process_keys) % size:
            raise UserError(
                f"per_device_train_batch_size: a process has {len(process_keys)} completions, and "
                f"a group {size}. A rule of groups needs all of a group in one process. Set a "
                "multiple of num_generations. If equal rows are neighbours, give reward_function "
                "the trainer's num_generations, too"
            )


def _log_components(
    name: str, results: Sequence[RewardResult], functions: Mapping[str, Any]
) -> None:
    """Give the components of a call to the functions `log_metric` and `log_extra` of TRL.

    TRL takes the mean of all values of a metric, in all processes. A value that is missing is
    not logged there; in the table of completions it is None.
    """
    missing = [result.cause for result in results if result.reward is None]
    if missing:
        log.warning(
            "%s: %d of %d completions have no reward: %s",
            name,
            len(missing),
            len(results),
            missing[0],
        )
    log_metric, log_extra = functions.get("log_metric"), functions.get("log_extra")
    columns = component_columns(results)
    if log_metric is not None:
        for result in results:
            log_metric(f"{name}/coverage", float(result.reward is not None))
        for column, values in columns.items():
            for value in values:
                log_metric(f"{name}/coverage/{column}", float(value is not None))
                if value is not None:
                    log_metric(f"{name}/{column}", value)
    if log_extra is not None:
        for column, values in columns.items():
            log_extra(f"{name}/{column}", values)
        log_extra(f"{name}/reason", [result.reason for result in results])


def rows_of_columns(columns: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Return the dataset's rows from what TRL passes by keyword.

    It passes its state and two functions for logging, too; these are no columns.
    """
    names = [name for name, values in columns.items() if _is_column(values, num_rows)]
    return [{name: columns[name][index] for name in names} for index in range(num_rows)]


def _is_column(values: Any, num_rows: int) -> bool:
    return isinstance(values, list) and len(values) == num_rows
