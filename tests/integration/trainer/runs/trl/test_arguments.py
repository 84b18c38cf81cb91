"""Check that TRL options in a run's config are refused if the run would override them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scorekit.errors import UserError
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.training import options as roleplay
from trainer.runs.trl.arguments import OURS, REFUSED
from trainer.sft import trainer as sft
from trainer.sft.config import SftConfig

CPU = torch.device("cpu")


def grpo_arguments(
    options: dict[str, Any], folder: Path, policy: dict[str, Any] | None = None, **misc: Any
) -> Any:
    values = {"grpo": {"options": options, "max_steps": 8}, "misc": {"run_dir": str(folder)} | misc}
    values["policy"] = policy or {}
    return roleplay.grpo_arguments(RoleplayConfig.model_validate(values), CPU, [1.0], 64)


def sft_arguments(
    options: dict[str, Any], folder: Path, policy: dict[str, Any] | None = None, **misc: Any
) -> Any:
    values = {"sft": {"options": options, "max_steps": 8}, "misc": {"run_dir": str(folder)} | misc}
    values["policy"] = policy or {}
    return sft.sft_arguments(SftConfig.model_validate(values), CPU)


@pytest.mark.parametrize("arguments", [grpo_arguments, sft_arguments])
@pytest.mark.parametrize(
    ("option", "trl_args"),
    [
        ("max_steps", r"options\.max_steps: set \w+\.max_steps"),
        ("learning_rate", r"options\.learning_rate: set \w+\.learning_rate"),
        *((name, rf"options\.{name}: set .* instead") for name in OURS),
        *((name, rf"options\.{name}.*: this command does not support it") for name in REFUSED),
        ("hub_token", "this command does not support it"),
        ("fsdp_config", "this command does not support it"),
        ("optimm", "has no such option \\(did you mean optim\\?\\)"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_in_one_line(
    arguments: Any, option: str, trl_args: str, tmp_path: Path
):
    with pytest.raises(UserError, match=trl_args) as refused:
        arguments({option: 3}, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        *((grpo_arguments, name) for name in roleplay._OWN_OPTIONS),
        *((grpo_arguments, name) for name in RoleplayConfig().grpo.model_dump()),
        *((sft_arguments, name) for name in sft._OWN_OPTIONS),
        *((sft_arguments, name) for name in SftConfig().sft.model_dump()),
    ],
)
def test_no_option_stands_beside_a_key_of_ours(arguments: Any, option: str, tmp_path: Path):
    with pytest.raises(UserError, match=rf"options\.{option}: "):
        arguments({option: 3}, tmp_path)


@pytest.mark.parametrize("arguments", [grpo_arguments, sft_arguments])
def test_any_other_option_of_trl_reaches_it(arguments: Any, tmp_path: Path):
    trl_args = arguments({"adam_beta2": 0.5, "torch_empty_cache_steps": 7}, tmp_path)
    assert (trl_args.adam_beta2, trl_args.torch_empty_cache_steps, trl_args.max_steps) == (
        0.5,
        7,
        8,
    )


@pytest.mark.parametrize("arguments", [grpo_arguments, sft_arguments])
@pytest.mark.parametrize("is_on", [True, False])
def test_layers_are_recomputed_if_the_policy_says_so_and_nothing_is_deprecated(
    arguments: Any, is_on: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    trl_args = arguments({}, tmp_path, policy={"gradient_checkpointing": is_on})
    assert trl_args.gradient_checkpointing is is_on
    assert [str(w.message) for w in recwarn if issubclass(w.category, FutureWarning)] == []


@pytest.mark.parametrize("arguments", [grpo_arguments, sft_arguments])
def test_what_trl_itself_refuses_is_one_line(arguments: Any, tmp_path: Path):
    with pytest.raises(UserError, match=r"^(grpo|sft): ") as refused:
        arguments({"optim": "none such"}, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.fixture
def nobody_elses_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore accelerate's process-wide precision state for later tests."""
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("nobody_elses_precision")
@pytest.mark.parametrize("arguments", [grpo_arguments, sft_arguments])
def test_a_run_has_its_own_precision_whatever_ran_before_it(arguments: Any, tmp_path: Path):
    from accelerate import Accelerator

    for dtype, precision in (("bfloat16", "bf16"), ("float32", "no"), ("bfloat16", "bf16")):
        trl_args = arguments({}, tmp_path, dtype=dtype)
        assert trl_args.bf16 == (dtype == "bfloat16")
        handed_on = Accelerator(cpu=True, mixed_precision=trl_args.mixed_precision)
        assert handed_on.mixed_precision == precision
