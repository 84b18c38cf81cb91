"""Check the comparison of two policies: each gets its own prompts, both are scored alike."""

from __future__ import annotations

import json

import yaml
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tests.kits.trainer.roleplay import TEMPLATE, turn, write_policy, write_turns
from trainer.__main__ import app
from trainer.runs.run_log import read_jsonl


def evaluate(run_files, folder, *arguments, **changes):
    """Run `trainer evaluate` for the session's policy."""
    config = folder.with_suffix(".yaml")
    cfg = run_files.config(folder, misc__dtype="float32", **changes)
    config.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    return CliRunner().invoke(app, ["evaluate", "--config", str(config), *arguments])


def test_each_policy_is_asked_by_its_own_template(run_files, tmp_path):
    other = write_policy(tmp_path / "other", "<|im_start|>{{ '' }}" + TEMPLATE)
    alone = evaluate(run_files, tmp_path / "alone", policy__path=str(other))
    assert alone.exit_code == 0, alone.output
    both = evaluate(run_files, tmp_path / "both", "--against", str(other))
    assert both.exit_code == 0, both.output
    of_other = read_jsonl(tmp_path / "alone/evaluation.jsonl")
    assert read_jsonl(tmp_path / "both/against/evaluation.jsonl") == of_other
    own_lines = read_jsonl(tmp_path / "both/evaluation.jsonl")
    assert [line["completion"] for line in own_lines] != [line["completion"] for line in of_other]


def test_scores_of_other_anchors_or_weights_are_not_compared(run_files, tmp_path):
    assert evaluate(run_files, tmp_path / "first").exit_code == 0
    earlier = ("--against", str(tmp_path / "first"))
    same = evaluate(run_files, tmp_path / "same", *earlier)
    assert same.exit_code == 0, same.output
    anchors = json.loads(run_files.anchors.read_text())
    anchors["grounded"]["high"] -= 0.01
    moved = tmp_path / "moved.json"
    moved.write_text(json.dumps(anchors))
    changed = {
        "anchors": {"calibration": str(moved)},
        "weights": {"calibration": str(run_files.anchors), "weights": {"reward_format": 0.5}},
        "player_name_rule": {"calibration": str(run_files.anchors), "player_name_rule": "literal"},
    }
    for word, reward in changed.items():
        reward_changes = {"embedding_model": run_files.server.url} | reward
        other = run_files.config(tmp_path / word, misc__dtype="float32").model_dump(mode="json")
        other["reward"] |= reward_changes
        config = tmp_path / f"{word}.yaml"
        config.write_text(yaml.safe_dump(other))
        result = CliRunner().invoke(app, ["evaluate", "--config", str(config), *earlier])
        assert result.exit_code == 2 and word in result.stderr, result.output
    assert not (tmp_path / "weights/evaluation.json").exists()


def test_control_tokens_of_the_other_policy_are_found_in_the_turns(run_files, tmp_path):
    other = write_policy(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    tokenizer.save_pretrained(other)
    row = turn(40)
    row["prompt"][1]["content"] += "<stop>"
    held_out = str(write_turns(tmp_path / "eval.jsonl", [row, turn(41)]))
    refused = evaluate(
        run_files, tmp_path / "refused", "--against", str(other), data__eval=held_out
    )
    assert refused.exit_code == 2
    assert "turn t40: turn 2 (user): has the control token '<stop>'" in refused.stderr
