"""Start verl's trainer after its config has been checked.

python -m scorekit.adapters.verl_run OVERRIDES...

OVERRIDES are those of `python -m verl.trainer.main_ppo`. A config in which a failed score would
become reward 0, or in which verl would not call our code, ends the command with exit code 2 and one
line, before Ray starts. So does a dataset whose first rows lack what the reward reads.
"""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import os
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from scorekit.adapters import verl as adapter
from scorekit.adapters.shared import (
    RewardSettings,
    Samples,
    SpanWeights,
    TrainerReward,
    check_definition,
    message_text,
    reward_settings,
    severities_of,
)
from scorekit.adapters.verl import (
    LOOP_SENDS,
    RAISING_MANAGERS,
    certain_numbers,
    plain_settings,
)
from scorekit.command import run_command
from scorekit.config import Config
from scorekit.config import check_config as check_section
from scorekit.credit import SEVERITY_WEIGHTS
from scorekit.credit.checks import check_stop_ids, check_trained_weights
from scorekit.documents import read_yaml
from scorekit.errors import UserError
from scorekit.rewards.engine import FirstSamples, check_languages
from scorekit.rewards.rules import load_gate

#: Advantage estimators of verl 0.9.1 that keep the position of a token's reward, and ours.
POSITION_ESTIMATORS = ("scorekit_tokens", "gae", "reinforce_plus_plus")
TOKENS_AGENT = "scorekit_tokens"
TOKENS_MODULE = "scorekit.adapters.verl_tokens"
TOKENS_CLASS = f"{TOKENS_MODULE}.TokenRewardLoop"
_PACKAGE, _FILE = "pkg://", "file://"  # verl's prefixes of a module's path
_FUNCTION = "reward.custom_reward_function"
#: Rows of each file that are checked.
NUM_ROWS = 256
_DATA_KEYS = ("train_files", "val_files")
_LOOP_FILE = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


class LoopEntry(Config):
    """The entry of our agent loop in verl's YAML file."""

    name: str
    target: str = Field(alias="_target_")
    settings: dict[str, Any]
    severity_weights: dict[str, Any] = Field(default_factory=lambda: dict(SEVERITY_WEIGHTS))
    span_component: str | None = None
    stop_ids: list[Annotated[int, Field(strict=True, ge=0)]] | None = None


#: Its keys.
TOKEN_KEYS = tuple(field.alias or name for name, field in LoopEntry.model_fields.items())


def check_config(config: Mapping[str, Any]) -> None:
    """Raise UserError if a failed score could become a number, or our code would not be called, or
    if the first rows of the dataset lack what the reward reads.

    config: verl's whole config, as a dictionary without interpolations.
    """
    if (config.get("custom_reward_function") or {}).get("path"):
        raise UserError(
            f"custom_reward_function.path: verl 0.9 does not read it. Set {_FUNCTION}.path"
        )
    agent = config["actor_rollout_ref"]["rollout"]["agent"]["default_agent_loop"]
    if agent == TOKENS_AGENT:
        settings, spans = _check_token_rewards(config)
        TrainerReward(settings, "verl", sends=LOOP_SENDS, spans=spans)
    else:
        settings = _check_function(config["reward"])
        TrainerReward(settings, "verl")
    _check_components(config, settings)
    check_rows(config.get("data") or {}, settings, gets_prompt=agent == TOKENS_AGENT)


def _check_function(reward: Mapping[str, Any]) -> RewardSettings:
    function = reward.get("custom_reward_function") or {}
    if not function.get("path"):
        raise UserError(f"{_FUNCTION}.path: not set, so verl would use its own scorer. Set it")
    _check_is_ours(function)
    manager = reward["reward_manager"]
    name = manager["name"]
    if manager["source"] != "register" or name not in RAISING_MANAGERS:
        raise UserError(
            f"reward.reward_manager: {name!r} ({manager['source']}) may turn a failed score into "
            f"reward 0, or cannot call an async function. Use one of {', '.join(RAISING_MANAGERS)}"
        )
    values = function.get("reward_kwargs") or {}
    if not isinstance(values, Mapping):
        raise UserError(f"{_FUNCTION}.reward_kwargs: {values!r} are no settings. Set a mapping")
    values = dict(values)
    if values.pop("reward_manager", None) != name:
        raise UserError(
            f"{_FUNCTION}.reward_kwargs.reward_manager: expected {name!r}. Set it to "
            "'${reward.reward_manager.name}'"
        )
    return reward_settings(**plain_settings(values))


def _check_is_ours(function: Mapping[str, Any]) -> None:
    """Raise UserError if verl would call another function than `compute_score`."""
    path, name = str(function["path"]), function.get("name")
    expected = adapter.compute_score
    if path.startswith(_PACKAGE):
        is_ours = path.removeprefix(_PACKAGE).replace("/", ".") == expected.__module__
    else:
        is_ours = Path(path.removeprefix(_FILE)).resolve() == Path(adapter.__file__).resolve()
    for key, value, is_right, correct in (
        ("path", path, is_ours, f"{_PACKAGE}{expected.__module__}"),
        ("name", name, name == expected.__name__, expected.__name__),
    ):
        if not is_right:
            raise UserError(
                f"{_FUNCTION}.{key}: {value!r}: verl would not call our code. Set {correct}; if a "
                "function of your own calls ours, start verl.trainer.main_ppo itself"
            )


def _check_components(config: Mapping[str, Any], settings: RewardSettings) -> None:
    """Raise UserError if verl would compute with a component that a sample may lack."""
    algorithm, used = config["algorithm"], {}
    if algorithm["adv_estimator"] == "gdpo":
        if config["trainer"]["use_v1"]:
            raise UserError(
                "algorithm.adv_estimator: gdpo finds no components where trainer.use_v1 is true. "
                "Set use_v1 to false, or another estimator"
            )
        used["algorithm.gdpo_reward_keys"] = list(algorithm.get("gdpo_reward_keys") or ())
    groups = algorithm.get("filter_groups") or {}
    if groups.get("enable") and groups.get("metric"):
        used["algorithm.filter_groups.metric"] = [groups["metric"]]
    if settings.definition is None:
        return
    certain = certain_numbers(settings.definition)
    for key, names in used.items():
        for name in names:
            if name not in {*certain, "score", "reward"}:
                raise UserError(
                    f"{key}: {name!r} has no number for some samples. Name one of "
                    f"{', '.join(['score', *sorted(certain)])}"
                )


def _check_token_rewards(config: Mapping[str, Any]) -> tuple[RewardSettings, SpanWeights]:
    if not config["trainer"]["use_v1"]:
        raise UserError(
            "trainer.use_v1: false would put the whole reward on the last token. Set it to true"
        )
    estimator = config["algorithm"]["adv_estimator"]
    if estimator not in POSITION_ESTIMATORS:
        raise UserError(
            f"algorithm.adv_estimator: {estimator!r} sums the rewards of a completion's tokens. "
            f"Use one of {', '.join(POSITION_ESTIMATORS)}"
        )
    rollout = config["actor_rollout_ref"]["rollout"]
    if estimator == "scorekit_tokens" and rollout["n"] < 2:
        raise UserError(
            "actor_rollout_ref.rollout.n: scorekit_tokens compares the completions of a prompt. "
            "Set it to 2 or more"
        )
    path = rollout["agent"]["agent_loop_config_path"]
    if not path:
        raise UserError(
            f"{_LOOP_FILE}: required for the agent loop {TOKENS_AGENT}. Name a YAML file with its "
            "settings"
        )
    entry = _loop_entry(path)
    settings = reward_settings(**entry.settings)
    has_weights = "severity_weights" in entry.model_fields_set
    severity_weights = entry.severity_weights if has_weights else None
    return settings, span_weights(settings, entry.span_component, severity_weights)


def _loop_entry(path: str) -> LoopEntry:
    """Return the entry of our agent loop in verl's file."""
    try:
        content = read_yaml(Path(path))
    except UserError as error:
        raise UserError(f"{_LOOP_FILE}: {error}") from None
    entries = [
        entry
        for entry in (content if isinstance(content, list) else ())
        if isinstance(entry, dict) and entry.get("name") == TOKENS_AGENT
    ]
    if not entries:
        raise UserError(f"{path}: no agent loop with name {TOKENS_AGENT}. Add it to the list")
    if len(entries) > 1:
        raise UserError(f"{path}: {len(entries)} agent loops with name {TOKENS_AGENT}. Keep one")
    for key in entries[0]:
        if key not in TOKEN_KEYS:
            raise UserError(f"{path}: {key}: no such key. There are {', '.join(TOKEN_KEYS)}")
    entry = check_section(LoopEntry, entries[0], path)
    if entry.target != TOKENS_CLASS:
        raise UserError(
            f"{path}: _target_: {entry.target!r}: verl would not call our code. Set "
            f"{TOKENS_CLASS}; for a class of your own start verl.trainer.main_ppo itself"
        )
    return entry


def span_weights(
    settings: RewardSettings,
    span_component: str | None,
    severity_weights: Mapping[str, Any] | None = None,
    stop_ids: Any = None,
) -> SpanWeights:
    """Return which error spans become rewards of tokens, and what they weigh.

    Without effect where the definition has `token_rewards`.
    stop_ids: None: the tokenizer's EOS.
    Raises UserError if it is not said which service's spans these are, if it is said twice, or if a
    severity weighs no number that a trainer can hold.
    """
    weights = SEVERITY_WEIGHTS if severity_weights is None else severity_weights
    try:
        check_trained_weights(weights)
        if stop_ids is not None:
            check_stop_ids(stop_ids)
    except ValueError as error:
        raise UserError(str(error)) from None
    options = {"severity_weights": severities_of(weights)}
    definition = settings.definition
    if definition is None:
        if span_component is not None:
            raise UserError("span_component: has no effect without definition. Remove it")
        return SpanWeights(options=options)
    check_definition(definition, "verl", LOOP_SENDS)
    if definition.token_rewards is not None:
        for key, value in (
            ("span_component", span_component),
            ("severity_weights", severity_weights),
        ):
            if value is not None:
                raise UserError(
                    f"{key}: has no effect beside token_rewards of the definition. Set it in there"
                )
        return SpanWeights()
    services = [name for name, c in definition.components.items() if c.rule is None]
    if span_component not in services:
        raise UserError(
            f"span_component: {span_component!r} is no component with a service. Name one of "
            f"{', '.join(services) or '(none)'} whose service marks error spans"
        )
    return SpanWeights(span_component, options=options)


def check_rows(
    data: Mapping[str, Any], settings: RewardSettings, *, gets_prompt: bool = False
) -> None:
    """Raise UserError if the reward cannot be computed for the first rows of a Parquet file.

    verl takes an error of a reward for the failure of one completion, and its asynchronous trainers
    sample other prompts without a limit. So a field that no row has must be found here.

    data: the section `data` of verl's config. Files of another kind, and those that do not exist
    here, are left to verl.
    gets_prompt: whether the reward gets the row's prompt, as our agent loop does; verl passes none
    to a function.
    """
    samples = Samples(settings)
    for key in _DATA_KEYS:
        paths = data.get(key) or ()
        for path in [paths] if isinstance(paths, str) else paths:
            if str(path).endswith(".parquet") and Path(path).is_file():
                try:
                    _check_file(Path(path), samples, settings, gets_prompt)
                except UserError as error:
                    raise UserError(f"data.{key}: {path}: {error}") from None


def _check_file(path: Path, samples: Samples, settings: RewardSettings, gets_prompt: bool) -> None:
    rows = []
    for index, row in enumerate(islice(_rows(path), NUM_ROWS)):
        try:
            fields, prompt = _fields(row, gets_prompt)
            rows.append(samples.sample(fields, prompt, "."))
        except UserError as error:
            raise UserError(f"row {index}: {error}") from None
    definition = settings.definition
    if definition is None:
        return
    rules = {name: load_gate(f"gates.{name}", gate) for name, gate in definition.gates.items()}
    FirstSamples(definition, rules).check_fields(rows)
    languages = {row.get("tgt_lang") for row in rows} - {None, ""}
    check_languages(definition, rules, sorted(map(str, languages)))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=NUM_ROWS):
                yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise UserError(f"cannot be read: {' '.join(str(error).split())[:200]}") from None


def _fields(row: Mapping[str, Any], gets_prompt: bool) -> tuple[dict[str, Any], str | None]:
    """Return the fields and the prompt of a row that our reward gets."""
    model, extra = (row.get(key) or {} for key in ("reward_model", "extra_info"))
    for key, value in (("reward_model", model), ("extra_info", extra)):
        if not isinstance(value, Mapping):
            raise UserError(
                f"{key} is a {type(value).__name__}. Write it as a struct with named fields"
            )
    fields = {**extra, "ground_truth": model.get("ground_truth")}
    prompt = row.get("prompt") if gets_prompt else fields.get("prompt")
    return fields, None if prompt is None else message_text(prompt)


def external_modules(value: str | None) -> str:
    """Return VERL_USE_EXTERNAL_MODULES with the module that registers our estimator."""
    modules = [name for name in (value or "").split(",") if name]
    return ",".join([*modules, *({TOKENS_MODULE} - set(modules))])


def main() -> None:
    """Compose verl's config from the command line, check it, and start verl's trainer."""
    import hydra
    import verl
    from omegaconf import OmegaConf
    from verl.trainer import main_ppo

    def start(config: Any) -> None:
        try:
            check_config(OmegaConf.to_container(config, resolve=True))
        except UserError as error:
            print(f"verl_run: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        modules = external_modules(os.environ.get("VERL_USE_EXTERNAL_MODULES"))
        os.environ["VERL_USE_EXTERNAL_MODULES"] = modules
        variables = "ray_kwargs.ray_init.runtime_env.env_vars"
        key = f"{variables}.VERL_USE_EXTERNAL_MODULES"
        OmegaConf.update(config, key, modules, force_add=True)
        main_ppo.main.__wrapped__(config)

    folder = Path(verl.__file__).parent / "trainer/config"
    hydra.main(config_path=str(folder), config_name="ppo_trainer", version_base=None)(start)()


if __name__ == "__main__":
    run_command(main, stdout="log")
