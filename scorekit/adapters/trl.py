"""A reward function for TRL's trainers (`reward_funcs`).

trainer = GRPOTrainer(..., reward_funcs=reward_function("http://127.0.0.1:8001", src_key="src"))
trainer = GRPOTrainer(..., reward_funcs=reward_function(definition="reward.yaml", src_key="src"))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from scorekit.adapters.shared import (
    RewardSettings,
    Samples,
    SyncTrainerReward,
    TrainerRow,
    completion_text,
    component_columns,
    log_missing,
    message_text,
    raise_for_outage,
    reward_settings,
)
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.rewards import RewardDefinition, RewardResult
from scorekit.rewards.results import log_words, refusing_gate

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

    name: the name in TRL's log.
    settings: those of RewardSettings, or SCOREKIT_REWARD_<NAME>; `definition`, a composite reward,
    takes the place of `url`.
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
    checked = reward_settings(**arguments)
    if num_generations is not None:
        _check_group_size(checked, num_generations)
    source = SyncTrainerReward(checked, "TRL", sends=("groups", "finish_reason"))
    samples, definition = Samples(checked), checked.definition
    unrewarded = _UnrewardedCalls()

    def rewards(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        rows = [
            TrainerRow(fields, message_text(prompt), completion_text(completion))
            for fields, prompt, completion in zip(
                rows_of_columns(columns, len(prompts)), prompts, completions, strict=True
            )
        ]
        groups = None
        if definition is not None and definition.has_group_rules:
            groups = group_indices(prompts, [samples.sample(*row) for row in rows], num_generations)
        results = source.score(rows, groups)
        raise_for_outage(results)
        log_missing(name, results)
        if definition is not None:
            _log_components(name, results, columns)
        unrewarded.note([_failure(definition, result) for result in results])
        return [result.reward for result in results]

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
        """Count a call.

        failures: why each completion has no reward; None: it has one, or a gate has refused it.

        Raises ServiceUnreachable if the last `MAX_UNREWARDED_CALLS` calls have failed throughout.
        """
        if not failures:
            return
        self._count = 0 if None in failures else self._count + 1
        if self._count >= MAX_UNREWARDED_CALLS:
            raise ServiceUnreachable(
                "reward", f"no completion of {self._count} calls has one: {log_words(failures[0])}"
            )


def _failure(definition: RewardDefinition | None, result: RewardResult) -> str | None:
    """Return why a completion has no reward; None: it has one, or a closed gate has refused it."""
    refusal = None if definition is None else refusing_gate(definition, result.gates)
    is_refused = refusal is not None and result.gates[refusal[0]].status == "closed"
    return None if result.reward is not None or is_refused else result.reason


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
