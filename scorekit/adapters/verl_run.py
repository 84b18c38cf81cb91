"""Start verl's trainer after its config has been checked.

python -m scorekit.adapters.verl_run OVERRIDES...

OVERRIDES are those of `python -m verl.trainer.main_ppo`. A config in which a failed score would
become reward 0, or in which verl would not call our code, ends the command with exit code 2 and one
line, before Ray starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from scorekit.adapters.rewards import Samples, reward_settings
from scorekit.adapters.verl import RAISING_MANAGERS, plain_settings
from scorekit.errors import UserError

#: Advantage estimators of verl 0.9.1 that keep the position of a token's reward, and ours.
POSITION_ESTIMATORS = ("scorekit_tokens", "gae", "reinforce_plus_plus")
TOKENS_AGENT = "scorekit_tokens"
TOKENS_MODULE = "scorekit.adapters.verl_tokens"
_FUNCTION = "reward.custom_reward_function"


def check_config(config: Mapping[str, Any]) -> None:
    """Raise UserError if a failed score could become a number, or our code would not be called.

    config: verl's whole config, as a dictionary without interpolations.
    """
    if (config.get("custom_reward_function") or {}).get("path"):
        raise UserError(
            f"custom_reward_function.path: verl 0.9 does not read it. Set {_FUNCTION}.path"
        )
    agent = config["actor_rollout_ref"]["rollout"]["agent"]["default_agent_loop"]
    if agent == TOKENS_AGENT:
        _check_token_rewards(config)
    else:
        _check_function(config["reward"])


def _check_function(reward: Mapping[str, Any]) -> None:
    function = reward.get("custom_reward_function") or {}
    if not function.get("path"):
        raise UserError(f"{_FUNCTION}.path: not set, so verl would use its own scorer. Set it")
    manager = reward["reward_manager"]
    name = manager["name"]
    if manager["source"] != "register" or name not in RAISING_MANAGERS:
        raise UserError(
            f"reward.reward_manager: {name!r} ({manager['source']}) may turn a failed score into "
            f"reward 0, or cannot call an async function. Use one of {', '.join(RAISING_MANAGERS)}"
        )
    values = dict(function.get("reward_kwargs") or {})
    if values.pop("reward_manager", None) != name:
        raise UserError(
            f"{_FUNCTION}.reward_kwargs.reward_manager: expected {name!r}. Set it to "
            "'${reward.reward_manager.name}'"
        )
    Samples(reward_settings(**plain_settings(values)))


def _check_token_rewards(config: Mapping[str, Any]) -> None:
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
    if not rollout["agent"]["agent_loop_config_path"]:
        raise UserError(
            "actor_rollout_ref.rollout.agent.agent_loop_config_path: required for the agent loop "
            f"{TOKENS_AGENT}. Name a YAML file with its settings"
        )


def external_modules(value: str | None) -> str:
    """Return VERL_USE_EXTERNAL_MODULES with the module that registers our estimator."""
    modules = [name for name in (value or "").split(",") if name]
    return ",".join([*modules, *({TOKENS_MODULE} - set(modules))])


def main() -> None:
    """Compose verl's config from the command line, check it, and start verl's trainer."""
    from pathlib import Path

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
    main()
