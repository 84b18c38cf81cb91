"""Two policies side by side: each is asked as it was trained, and both are scored alike."""

from __future__ import annotations

import json

import yaml
from typer.testing import CliRunner

from tests.kits.trainer.roleplay import TEMPLATE, write_policy
from trainer.__main__ import app
from trainer.runs.run_log import read_jsonl


def evaluate(place, folder, *told, **changes):
    """`trainer evaluate` of the session's policy."""
    config = folder.with_suffix(".yaml")
    cfg = place.config(folder, misc__dtype="float32", **changes)
    config.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    return CliRunner().invoke(app, ["evaluate", "--config", str(config), *told])


def test_each_policy_is_asked_by_its_own_template(place, tmp_path):
    other = write_policy(tmp_path / "other", "<|im_start|>{{ '' }}" + TEMPLATE)
    alone = evaluate(place, tmp_path / "alone", policy__path=str(other))
    assert alone.exit_code == 0, alone.output
    both = evaluate(place, tmp_path / "both", "--against", str(other))
    assert both.exit_code == 0, both.output
    of_other = read_jsonl(tmp_path / "alone/evaluation.jsonl")
    assert read_jsonl(tmp_path / "both/against/evaluation.jsonl") == of_other
    ours = read_jsonl(tmp_path / "both/evaluation.jsonl")
    assert [line["completion"] for line in ours] != [line["completion"] for line in of_other]


def test_scores_of_other_anchors_or_weights_are_not_compared(place, tmp_path):
    assert evaluate(place, tmp_path / "first").exit_code == 0
    earlier = ("--against", str(tmp_path / "first"))
    same = evaluate(place, tmp_path / "same", *earlier)
    assert same.exit_code == 0, same.output
    anchors = json.loads(place.anchors.read_text())
    anchors["grounded"]["high"] -= 0.01
    moved = tmp_path / "moved.json"
    moved.write_text(json.dumps(anchors))
    changed = {
        "anchors": {"calibration": str(moved)},
        "weights": {"calibration": str(place.anchors), "weights": {"reward_format": 0.5}},
        "player_name_rule": {"calibration": str(place.anchors), "player_name_rule": "literal"},
    }
    for word, reward in changed.items():
        told = {"embedding_model": place.server.url} | reward
        other = place.config(tmp_path / word, misc__dtype="float32").model_dump(mode="json")
        other["reward"] |= told
        config = tmp_path / f"{word}.yaml"
        config.write_text(yaml.safe_dump(other))
        done = CliRunner().invoke(app, ["evaluate", "--config", str(config), *earlier])
        assert done.exit_code == 2 and word in done.stderr, done.output
    assert not (tmp_path / "weights/evaluation.json").exists()
