"""Check what a start of several processes is refused before a model is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate import DistributedType

from scorekit.errors import UserError
from trainer.runs.config import MiscConfig
from trainer.runs.launch import check_launch, read_on_all
from trainer.search.config import SearchConfig
from trainer.translation.config import TranslationConfig

LORA = {"path": "model", "lora": {"r": 2}}
CONFIGS = (
    lambda policy: TranslationConfig.model_validate({"policy": policy}),
    lambda policy: SearchConfig.model_validate(
        {"data": {"train": "questions.jsonl"}, "policy": policy}
    ),
)


def world(kind):
    accelerator = SimpleNamespace(distributed_type=DistributedType[kind])
    return SimpleNamespace(accelerator=accelerator, is_sharded=kind == "FSDP")


@pytest.mark.parametrize("config", CONFIGS)
def test_what_cannot_be_shared_is_refused(config):
    in_4bit = config(LORA | {"load_in_4bit": True})
    with pytest.raises(UserError, match=r"policy\.load_in_4bit: weights in 4 bits are not sharded"):
        check_launch(in_4bit, "this task", world("FSDP"))
    with pytest.raises(UserError, match="this task does not learn with DeepSpeed"):
        check_launch(config(LORA), "this task", world("DEEPSPEED"))
    for kind in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        check_launch(config(LORA), "this task", world(kind))
        if kind != "FSDP":
            check_launch(in_4bit, "this task", world(kind))


def test_one_process_reads_without_the_others(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def read():
        raise UserError("no such file")

    assert read_on_all(MiscConfig(), lambda: 3) == 3
    with pytest.raises(UserError, match="no such file"):
        read_on_all(MiscConfig(), read)
