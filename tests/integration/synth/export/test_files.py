"""Check an export of many files: names, processes, a killed export, and its manifest."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from scorekit.errors import UserError
from synth.export.files import ShardSlice, plan_files
from synth.repair import repair
from synth.run import RunOptions, run_stages
from synth.storage.store import StageFolder, read_records
from testing.servers import alive, wait_until
from tests.kits import forked
from tests.kits.spawned import forked_workers
from tests.kits.synth.output import (
    ROOT,
    config,
    exported_run,
    make_run,
    run_export,
    run_filter,
    train,
    write_stage,
)

SHARDED = {"rows_per_file": 3, "preference_pairs": True, "processes": 1}


@pytest.fixture
def filtered(tmp_path):
    """Return the folder of a run with 8 filtered pairs in shards of 3, 3 and 2."""
    make_run(tmp_path)
    run_filter(config(tmp_path))
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_large_export_is_numbered_files_that_hold_the_rows_of_a_small_one(filtered, tmp_path):
    plain = exported_run(tmp_path / "plain")
    cfg = config(filtered, export=SHARDED)
    run_export(cfg)
    folder = filtered / "export"
    assert {path.name for path in folder.iterdir()} == {"README.md", "manifest.json"} | {
        f"{name}-0000{number}-of-00003.{kind}"
        for name in ("train", "pairs")
        for number in range(3)
        for kind in ("jsonl.zst", "parquet")
    }
    rows = [r for path in sorted(folder.glob("train-*.zst")) for r in read_records(path)]
    assert rows == train(plain)
    tables = [pyarrow.parquet.read_table(path) for path in sorted(folder.glob("train-*.parquet"))]
    assert [table.num_rows for table in tables] == [3, 3, 2]
    assert pyarrow.concat_tables(tables).to_pylist() == rows
    pairs = [r for path in sorted(folder.glob("pairs-*.zst")) for r in read_records(path)]
    assert pairs == list(read_records(plain.run.out_dir / "export" / "pairs.jsonl"))


def test_files_take_their_rows_across_shards(tmp_path):
    folder = StageFolder(tmp_path, "format_filter")
    write_stage(folder, [[{}] * 5, [], [{}] * 2])
    assert plan_files(folder, 3, None) == [
        [ShardSlice(0, 0, 3)],
        [ShardSlice(0, 3, 5), ShardSlice(2, 0, 1)],
        [ShardSlice(2, 1, 2)],
    ]
    assert plan_files(folder, 3, 4) == [[ShardSlice(0, 0, 3)], [ShardSlice(0, 3, 4)]]
    assert plan_files(folder, 7, None) == [[ShardSlice(0, 0, 5), ShardSlice(2, 0, 2)]]
    write_stage(folder, [[]])
    assert plan_files(folder, 3, None) == [[]]


def test_any_number_of_processes_writes_the_same_bytes(filtered):
    run_export(config(filtered, export=SHARDED))
    single_process = contents(filtered / "export")
    with forked_workers("synth"):
        run_export(config(filtered, export={**SHARDED, "processes": 3}), overwrite=True)
    assert contents(filtered / "export") == single_process


def test_a_row_that_is_not_of_the_schema_is_named_by_the_process_that_found_it(filtered):
    folder = StageFolder(filtered, "format_filter")
    records = list(folder.records())
    records[7]["source_meta"]["madlad"]["line"] = "seven"
    write_stage(folder, [records])
    with forked_workers("synth"):
        with pytest.raises(ValueError, match=r"export: selection.madlad.line: .*seven"):
            run_export(config(filtered, export={**SHARDED, "processes": 2}))
    assert not (filtered / "export").exists()


DYING = """
import os, sys
import synth.export.files as files
from tests.kits.synth.output import config, run_export
left = iter(range(int(sys.argv[2])))
make = files.row_maker
def dying(*args):
    inner = make(*args)
    return lambda r: os.kill(os.getpid(), 9) if next(left, None) is None else inner(r)
files.row_maker = dying
run_export(config(sys.argv[1], export={"rows_per_file": 3, "preference_pairs": True,
                                       "processes": 1}))
"""


def test_a_killed_export_goes_on_with_the_files_that_are_missing(filtered, tmp_path):
    plain_cfg = exported_run(tmp_path / "plain")
    run_export(config(plain_cfg.run.out_dir, export=SHARDED), overwrite=True)
    died = forked.run(
        [sys.executable, "-c", DYING, str(filtered), "7"],
        cwd=ROOT,
        capture_output=True,
    )
    assert died.returncode == -9, died.stderr.decode()
    staging = filtered / ".export"
    inode_by_name = {path.name: path.stat().st_ino for path in staging.glob("[!.]*")}
    assert len(inode_by_name) == 8 and not (filtered / "export").exists()
    damaged = staging / "train-00001-of-00003.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run_export(config(filtered, export=SHARDED), resume=True)
    assert contents(filtered / "export") == contents(plain_cfg.run.out_dir / "export")
    now = {path.name: path.stat().st_ino for path in (filtered / "export").iterdir()}
    unchanged = {name for name, inode in inode_by_name.items() if now[name] == inode}
    assert unchanged >= {name for name in inode_by_name if "-00000-" in name}
    assert "train-00001-of-00003.jsonl.zst" not in unchanged  # its number was rewritten
    assert not staging.exists()


def test_no_process_writes_on_when_the_driver_was_killed(filtered):
    shard = StageFolder(filtered, "format_filter").shard(0)
    shard.unlink()
    os.mkfifo(shard)  # a reader waits forever
    code = (
        "import sys\nfrom tests.kits.synth.output import config, run_export\n"
        "run_export(config(sys.argv[1], export={'rows_per_file': 2, 'processes': 2}))\n"
    )
    driver = forked.Popen([sys.executable, "-c", code, str(filtered)], cwd=ROOT)
    try:
        temporary_files = ".train-0000[01]-*.jsonl.zst*.tmp"
        wait_until(lambda: len(list((filtered / ".export").glob(temporary_files))) == 2)
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        command_by_pid = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        workers = [pid for pid, command in command_by_pid.items() if b"spawn_main" in command]
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert len(workers) == 2
    wait_until(lambda: not any(alive(int(pid)) for pid in workers))


def test_the_manifest_says_what_the_rows_share(tmp_path):
    cfg = exported_run(tmp_path / "run")
    folder = cfg.run.out_dir / "export"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert {file["name"] for file in manifest["files"]} == {
        "train.jsonl",
        "train.parquet",
        "pairs.jsonl",
        "pairs.parquet",
    }
    for file in manifest["files"]:
        content = (folder / file["name"]).read_bytes()
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["bytes"] == len(content)
    assert manifest["rows"] == {"train": 8, "pairs": 7} and manifest["partial"] is False
    for row in train(cfg):
        teacher = row["selection"]["teacher"]
        assert {key: manifest["teacher"][key] for key in ("backend", "base_url", "model")} == {
            key: teacher[key] for key in ("backend", "base_url", "model")
        }
        for name, block in manifest["teacher"]["sampling_params"][row["kind"]].items():
            all_params = teacher["sampling_params"][name]
            assert {**all_params, **block} == all_params and set(all_params) - set(block) == {
                "seed",
                "candidate",
            }
        versions = row["selection"]["metricx"]["versions"]
        assert {**manifest["services"]["metricx"]["versions"], **versions} == (
            manifest["services"]["metricx"]["versions"]
        )
    for stage in manifest["funnel"]:
        assert stage["in"] == stage["out"] + sum(stage["rejected"].values())
    assert manifest["funnel"][-1]["out"] == 8 and manifest["corpus"]["documents"] == 15
    assert (
        manifest["settings"]["filters"]["on_reject"] == "drop"
        and "{text}" in manifest["teacher"]["prompt"]
    )
    assert "secret" not in (folder / "manifest.json").read_text()


def test_a_damaged_export_is_noticed_when_its_run_is_resumed(tmp_path):
    cfg = exported_run(tmp_path / "run")
    path = cfg.run.out_dir / "export" / "train.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    resume_options = RunOptions(("export",), resume=True)
    with pytest.raises(UserError, match=r"parquet: has changed.*export --repair 0"):
        run_stages(cfg, resume_options)
    assert any("--stage export --repair 0" in line for line in repair(cfg))
    run_stages(cfg, replace(resume_options, repair=0))
    assert path.read_bytes() == content


def test_rows_join_with_what_was_rejected(tmp_path):
    cfg = exported_run(tmp_path / "run")
    sampled = {r["source_id"] for r in StageFolder(cfg.run.out_dir, "sample_sources").records()}
    rows = {row["source_id"] for row in train(cfg)}
    rejected = {
        record["source_id"]
        for name in ("select_sources", "format_filter")
        for record in StageFolder(cfg.run.out_dir, name).all_rejected()
    }
    assert rows | rejected == sampled and not rows & rejected


#: The hub's limits on fields that the card uses.
SIZES = {
    "n<1K",
    "1K<n<10K",
    "10K<n<100K",
    "100K<n<1M",
    "1M<n<10M",
    "10M<n<100M",
    "100M<n<1B",
    "n>1T",
}


def test_the_head_of_the_card_is_what_the_hub_and_datasets_read(filtered):
    from datasets import DatasetInfo, load_dataset
    from huggingface_hub import DatasetCard

    run_export(config(filtered, export=SHARDED))
    card = DatasetCard.load(filtered / "export" / "README.md", ignore_metadata_errors=False)
    head = card.data.to_dict()
    assert yaml.safe_load(card.content.split("---\n")[1])["pretty_name"].startswith("Synthetic")
    assert head["license"] == "odc-by" and head["task_categories"] == ["translation"]
    assert set(head["size_categories"]) <= SIZES and head["language"] == ["en", "ko"]
    patterns = {c["config_name"]: c["data_files"][0]["path"] for c in head["configs"]}
    assert patterns == {"default": "train-*.parquet", "preference_pairs": "pairs-*.parquet"}
    for raw_info in head["dataset_info"]:
        info = DatasetInfo._from_yaml_dict(raw_info)
        loaded = load_dataset(
            str(filtered / "export"),
            raw_info["config_name"],
            split="train",
            cache_dir=str(filtered / "cache"),
        )
        assert loaded.features == info.features
        assert loaded.num_rows == info.splits["train"].num_examples
    text = card.content
    for part in ("## How they were made", "## Limits", "## Licences", "## Citation", "2601.09012"):
        assert part in text


def test_the_trainer_reads_the_numbered_files(filtered):
    from trainer.translation.data import load_examples

    run_export(config(filtered, export={**SHARDED, "formats": ["parquet"]}))
    columns = {
        "src_text": "source_text",
        "src_lang": "source_lang_code",
        "tgt_lang": "target_lang_code",
        "src_lang_code": "source_lang_code",
        "tgt_lang_code": "target_lang_code",
        "ref_text": "target_text",
    }
    examples = load_examples(filtered / "export", columns=columns, split="train")
    assert len(examples) == 8
