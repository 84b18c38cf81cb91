"""Check what a role-play run looks at before its first update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scorekit.config import check_config
from tests.kits.trainer.roleplay import turn, write_policy, write_turns
from trainer.rl.policy.tokens import load_tokenizer
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import load_train
from trainer.roleplay.training.preflight import chat_findings, drop_overlong


@pytest.mark.parametrize(("end", "passes"), [(2, True), (1, False)])
def test_without_a_generation_config_sampling_ends_as_config_json_says(
    end: int, passes: bool, tmp_path: Path
) -> None:
    folder = write_policy(tmp_path / "policy")
    (folder / "generation_config.json").unlink()
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": end}), encoding="utf-8")
    data = {
        "data": {"train": str(write_turns(tmp_path / "turns.jsonl", [turn(0)]))},
        "policy": {"path": str(folder)},
    }
    cfg = check_config(RoleplayConfig, data, "test")
    findings = chat_findings(cfg, load_tokenizer(cfg.policy), load_train(cfg.data))
    (finding,) = (finding for finding in findings if finding.name == "generation_config")
    assert finding.ok is passes


def test_no_turns_have_no_overlong_prompt(tmp_path: Path) -> None:
    tokenizer_folder = write_policy(tmp_path / "policy")
    cfg = check_config(RoleplayConfig, {"policy": {"path": str(tokenizer_folder)}}, "test")
    assert drop_overlong("data.eval", [], cfg, load_tokenizer(cfg.policy)) == []
