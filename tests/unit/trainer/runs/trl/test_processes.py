"""Check what a start of several processes is refused, and told, before weights are loaded."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from scorekit.errors import UserError
from trainer.roleplay.config import RoleplayConfig
from trainer.runs.checkpoints.checkpoint import CheckpointState
from trainer.runs.trl.processes import (
    changed_processes,
    check_sharding,
    check_trl_launch,
    shares_text,
)
from trainer.sft.config import SftConfig

MODEL = {"path": "model"}
TASKS = {"role-play": RoleplayConfig, "sft": SftConfig}


def config(task, policy=None, **sections):
    return TASKS[task].model_validate(
        {
            "data": {"train": "rows.jsonl"},
            "policy": MODEL | (policy or {}),
            "misc": {"run_dir": "runs/a"},
        }
        | sections
    )


def world(kind):
    from accelerate import DistributedType

    accelerator = SimpleNamespace(distributed_type=DistributedType[kind])
    return SimpleNamespace(accelerator=accelerator, is_sharded=kind == "FSDP")


LORA = {"lora": {"r": 2}}


@pytest.mark.parametrize(
    ("task", "policy", "kind", "message"),
    [
        ("role-play", LORA, "FSDP", r"policy\.lora\.r: role-play with sharded weights trains"),
        ("role-play", {"load_in_4bit": True} | LORA, "FSDP", r"policy\.load_in_4bit: weights in"),
        ("sft", {"load_in_4bit": True} | LORA, "FSDP", r"policy\.load_in_4bit: weights in"),
        ("role-play", {}, "DEEPSPEED", "role-play does not learn with DeepSpeed"),
        ("sft", {}, "DEEPSPEED", "sft does not learn with DeepSpeed"),
    ],
)
def test_what_trl_cannot_share_is_refused(task, policy, kind, message):
    with pytest.raises(UserError, match=message) as error:
        check_trl_launch(config(task, policy), task, world(kind))
    assert "configs/accelerate/ddp.yaml" in str(error.value)


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU", "FSDP"])
@pytest.mark.parametrize("task", TASKS)
def test_all_else_is_shared(task, kind):
    check_trl_launch(config(task), task, world(kind))
    if kind != "FSDP" or task == "sft":
        check_trl_launch(config(task, LORA), task, world(kind))
    if kind != "FSDP":
        check_trl_launch(config(task, {"load_in_4bit": True} | LORA), task, world(kind))


@pytest.mark.parametrize(
    ("saved", "now", "config_name"), [(True, "MULTI_GPU", "fsdp2"), (False, "FSDP", "ddp")]
)
def test_a_run_stays_sharded_or_whole(saved, now, config_name):
    cfg = config("sft")
    state = CheckpointState(1, cfg.model_dump(mode="json"), is_sharded=saved)
    with pytest.raises(UserError, match=rf"--resume: runs/a .*configs/accelerate/{config_name}"):
        check_sharding(cfg, state, world(now))
    check_sharding(cfg, state, world("FSDP" if saved else "MULTI_GPU"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("before", "size", "now", "new_size", "effect"),
    [
        (2, 4, 1, 8, ": an update has 16 sequences as before, of the same rows. "),
        (1, 8, 2, 4, ": an update has 16 sequences as before, of the same rows. "),
        (
            2,
            4,
            4,
            4,
            ": an update has 32 sequences, and had 16: the run continues at its update of this "
            "size, so some rows come again, or are left out, in this pass "
            "({section}.per_device_train_batch_size: 2 keeps the size). ",
        ),
        (1, 4, 3, 4, "or are left out, in this pass. "),
    ],
)
def test_another_number_of_processes_is_told(task, before, size, now, new_size, effect, caplog):
    section = "sft" if task == "sft" else "grpo"

    def sized(size):
        keys = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2}
        return config(task, **{section: keys})

    state = CheckpointState(1, sized(size).model_dump(mode="json"), processes=before)
    with caplog.at_level(logging.WARNING):
        changed_processes(sized(new_size), state, before)
        assert not caplog.text
        changed_processes(sized(new_size), state, now)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"changed since the run started: processes: {before} then, {now} now: ")
    assert text.endswith(effect.format(section=section) + "Random states start anew")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_share_of_a_process_is_told(processes):
    section = config(
        "sft", sft={"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    ).sft
    expected = ["one update: 6 rows", "one update: 12 rows, 6 for each of 2 processes"]
    assert shares_text(section, processes, "rows").startswith(expected[processes - 1])
