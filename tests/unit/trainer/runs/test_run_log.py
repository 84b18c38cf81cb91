"""Check which files of an earlier run a new run removes and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from scorekit.files import temporary_of
from tests.kits.trainer.runs import example
from trainer.runs.run_log import RunLog, append_jsonl, check_run_dir, read_jsonl
from trainer.translation.config import MiscConfig, TranslationConfig
from trainer.translation.train import train_translation


def replacing(folder: Path, **changes: Any) -> TranslationConfig:
    return TranslationConfig(misc=MiscConfig(run_dir=str(folder), overwrite=True), **changes)


def test_an_earlier_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    cfg = TranslationConfig(misc=MiscConfig(run_dir=str(tmp_path)))
    (tmp_path / "report.html").write_text("kept")
    RunLog(cfg).write_update({"update": 1})
    with pytest.raises(UserError, match="has a run"):
        RunLog(cfg)
    RunLog(replacing(tmp_path))
    assert not (tmp_path / "log.jsonl").exists()
    assert (tmp_path / "report.html").exists()
    RunLog(replacing(tmp_path))  # a run killed before its first update


def test_a_run_that_goes_on_keeps_what_is_behind_its_checkpoint(tmp_path: Path) -> None:
    cfg = TranslationConfig(misc=MiscConfig(run_dir=str(tmp_path)))
    log = RunLog(cfg)
    for update in range(4):
        log.write_evaluation({"update": update}, [{"mt": "a"}])
        log.write_update({"update": update + 1})
        log.write_completions(update + 1, [{"mt": "b"}])
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"update": 5, "los')  # killed while it wrote
    RunLog(cfg, done=2).write_update({"update": 3, "again": True})
    lines = read_jsonl(tmp_path / "log.jsonl")
    assert lines == [{"update": 1}, {"update": 2}, {"update": 3, "again": True}]
    assert [line["update"] for line in read_jsonl(tmp_path / "eval.jsonl")] == [0, 1, 2]
    names = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert [name[:-6] for name in names] == [
        "eval-000000",
        "eval-000001",
        "eval-000002",
        "train-000001",
        "train-000002",
    ]


def test_a_run_without_a_checkpoint_starts_again_under_its_name(tmp_path: Path) -> None:
    """Check that only the trajectories remain, which have the name: paid calls count by it."""
    cfg = TranslationConfig(misc=MiscConfig(run_dir=str(tmp_path)))
    log = RunLog(cfg)
    log.write_update({"update": 1})
    log.write_completions(1, [{"mt": "b"}])
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories/store.json").write_text("the name")
    RunLog(cfg, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "trajectories"]
    assert (tmp_path / "trajectories/store.json").read_text() == "the name"
    RunLog(replacing(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]


@pytest.mark.parametrize("done", [None, 1])
def test_what_a_killed_run_was_writing_goes_when_the_next_begins(
    tmp_path: Path, done: int | None
) -> None:
    RunLog(replacing(tmp_path)).write_update({"update": 1})
    temporary_paths = [
        temporary_of(tmp_path / name)
        for name in (
            "log.jsonl",
            "index.json",
            "completions/eval-000002.jsonl",
            "checkpoints/step-000002",
        )
    ]
    other_path = temporary_of(tmp_path / "evaluation.json")  # `evaluate` may be writing it
    (tmp_path / "checkpoints").mkdir()
    temporary_paths[-1].mkdir()
    (tmp_path / "completions").mkdir()
    for path in (*temporary_paths[:-1], other_path):
        path.write_text("{")
    RunLog(replacing(tmp_path), done=done)
    assert not [path for path in temporary_paths if path.exists()] and other_path.exists()


@pytest.mark.parametrize("config_text", ["", "misc: {seed: 1}"])
def test_a_config_that_no_run_wrote_makes_a_folder_no_run(tmp_path: Path, config_text: str) -> None:
    """Check that a foreign or empty config.yaml never deletes `checkpoints`, even on resume."""
    (tmp_path / "config.yaml").write_text(config_text)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/thesis.txt").write_text("theirs")
    with pytest.raises(UserError, match="It is no run"):
        check_run_dir(replacing(tmp_path))
    with pytest.raises(UserError, match="It is no run"):
        train_translation([example("a")], [], replacing(tmp_path), resume=True)
    assert (tmp_path / "checkpoints/thesis.txt").exists()


@pytest.mark.parametrize("name", ["checkpoints", "completions", "config.yaml", "eval.jsonl"])
def test_a_folder_of_something_else_is_never_touched(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix:
        path.write_text("theirs: 1")
    else:
        path.mkdir()
        (path / "model").write_text("theirs")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"has a run or other files \\({name}"):
        RunLog(TranslationConfig(misc=MiscConfig(run_dir=str(tmp_path))))
    with pytest.raises(UserError, match="It is no run"):
        RunLog(replacing(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {"path": "checkpoints/step-000001"}},
        {"policy": {"reference_path": "checkpoints/step-000001"}},
        {"data": {"train": "completions/train-000001.jsonl"}},
    ],
)
def test_a_run_does_not_remove_what_it_is_made_of(tmp_path: Path, changes: Any) -> None:
    log = RunLog(TranslationConfig(misc=MiscConfig(run_dir=str(tmp_path))))
    log.write_update({"update": 1})
    log.write_completions(1, [])
    (tmp_path / "checkpoints").mkdir()
    ((section, values),) = changes.items()
    inside = {section: {key: str(tmp_path / value) for key, value in values.items()}}
    with pytest.raises(UserError, match=rf"{section}\..* is in"):
        RunLog(replacing(tmp_path, **inside))
    assert (tmp_path / "log.jsonl").exists()


def test_a_run_dir_that_cannot_be_written_to_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cfg = TranslationConfig(misc=MiscConfig(run_dir=str(tmp_path / "file" / "run")))
    with pytest.raises(UserError, match=r"misc.run_dir: .*file/run: Not a directory"):
        train_translation([example("a")], [], cfg)
    with pytest.raises(UserError, match="no examples"):
        train_translation([], [], cfg)


def test_a_run_says_which_services_it_had(tmp_path: Path) -> None:
    RunLog(replacing(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]  # no empty file
    RunLog(replacing(tmp_path), {})
    assert json.loads((tmp_path / "services.json").read_text()) == {}


def test_a_line_of_the_log_is_one_line_of_json(tmp_path: Path) -> None:
    odd = "a\x85b\u2028c\u2029\n열"
    append_jsonl(tmp_path / "log.jsonl", {"mt": odd, "loss": float("nan"), "kl": float("inf")})
    (line,) = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"mt": odd, "loss": None, "kl": None}
    assert "열" in line
