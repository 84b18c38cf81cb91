"""Check that an export is pushed to a hub, with a local server, the real client and command."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import pytest

from synth.config import pair_configs
from synth.pairs import write_dataset
from synth.run import RunOptions
from synth.storage.store import StageFolder, read_records
from testing.servers import free_port, wait_until
from tests.kits import forked
from tests.kits.hub_server import TOKEN, Hub
from tests.kits.synth.output import ROOT, config, exported_run, make_run, run_export, run_filter

REPO = "us/pairs"


@pytest.fixture
def hub():
    """Yield a running hub."""
    hub = Hub()
    with hub.running():
        yield hub


@pytest.fixture
def sharded(tmp_path):
    """Return the config of a run whose export has three files of each kind."""
    return exported(tmp_path / "run", rows_per_file=3, processes=1)


def exported(folder, **export):
    folder.mkdir(exist_ok=True)
    cfg = config(folder, export=export)
    make_run(folder)
    run_filter(cfg)
    run_export(cfg)
    return cfg


def environment(hub, token=TOKEN):
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    home = {"HF_HOME": str(os.environ["HF_HOME_OF_TEST"])}
    env |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **home}
    env["HF_HUB_DISABLE_XET"] = "1"  # its storage is another server, which the small hub lacks
    return env | ({"HF_TOKEN": token} if token else {})


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    """Set a home without tokens and cache of the machine."""
    monkeypatch.setenv("HF_HOME_OF_TEST", str(tmp_path / "home"))


def command(cfg, *more, repo=REPO):
    path = cfg.run.out_dir.with_name("c.yaml")
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    return [sys.executable, "-m", "synth", "push", "--config", str(path), "--repo-id", repo, *more]


def push(hub, cfg, *more, token=TOKEN, repo=REPO):
    return forked.run(
        command(cfg, *more, repo=repo),
        cwd=ROOT,
        env=environment(hub, token),
        capture_output=True,
        text=True,
    )


def refused(done, message):
    """Check that the command is refused in one line, with exit code 2."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(lines)) == (2, 1) and "Traceback" not in done.stderr, done.stderr
    assert message in lines[0], done.stderr
    return True


def test_a_hub_that_is_away_is_one_line(sharded):
    away = Hub()
    away.url = f"http://127.0.0.1:{free_port()}"
    assert refused(push(away, sharded), "Push again: only missing files are sent")


def test_what_is_pushed_is_what_comes_back(hub, sharded, tmp_path):
    result = push(hub, sharded, "--private")
    assert result.returncode == 0, result.stderr
    folder = sharded.run.out_dir / "export"
    repo = hub.repos[REPO]
    assert repo.private and repo.commits == ["8 pairs, en->ko"]
    assert repo.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert result.stdout.strip() == f"{hub.url}/datasets/{REPO}/commit/{repo.sha}"
    code = (
        "import json, sys\nfrom datasets import load_dataset\n"
        "from huggingface_hub import snapshot_download\n"
        f"folder = snapshot_download({REPO!r}, repo_type='dataset')\n"
        "json.dump(list(load_dataset(folder, split='train')), sys.stdout)\n"
    )
    back = forked.run(
        [sys.executable, "-c", code],
        env=environment(hub),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert back.returncode == 0, back.stderr
    rows = [r for path in sorted(folder.glob("*.zst")) for r in read_records(path)]
    assert json.loads(back.stdout) == rows


def test_a_push_that_was_killed_sends_only_what_is_missing(hub, sharded):
    folder = sharded.run.out_dir / "export"
    last = hashlib.sha256((folder / "train-00002-of-00003.parquet").read_bytes()).hexdigest()
    hub.blocked_uploads.add(last)
    pushing = forked.Popen(command(sharded), cwd=ROOT, env=environment(hub))
    try:
        wait_until(lambda: hub.entered.is_set() and len(hub.blobs) == 5)
    finally:
        pushing.kill()
        pushing.wait()
    assert not hub.repos[REPO].files  # no part of it is visible
    hub.blocked_uploads.clear()
    hub.go.set()
    assert push(hub, sharded).returncode == 0
    assert len(hub.repos[REPO].files) == 8 and set(hub.puts.values()) == {1}
    assert push(hub, sharded).returncode == 0
    assert len(hub.puts) == hub.puts.total() == 6


def test_a_push_takes_away_the_files_of_the_one_before(hub, sharded):
    assert push(hub, sharded).returncode == 0
    small = exported(sharded.run.out_dir.with_name("small"))
    hub.repos[REPO].files["notes.md"] = b"of people"
    assert push(hub, small).returncode == 0
    assert set(hub.repos[REPO].files) == {
        "train.jsonl",
        "train.parquet",
        "README.md",
        "manifest.json",
        "notes.md",
    }


def test_no_run_that_is_not_finished_or_was_changed_is_pushed(hub, tmp_path):
    (tmp_path / "new").mkdir()
    assert refused(push(hub, config(tmp_path / "new")), "no finished export")
    cfg = exported_run(tmp_path / "run")
    stage = StageFolder(cfg.run.out_dir, "export")
    manifest = stage.manifest()
    # Another stage run has started.
    stage.set_manifest({k: v for k, v in manifest.items() if k != "shards"})
    assert refused(push(hub, cfg), "no finished export")
    stage.set_manifest({**manifest, "digest": "another"})
    assert refused(push(hub, cfg), "belongs to another run")
    stage.set_manifest(manifest)
    path = cfg.run.out_dir / "export" / "train.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert refused(push(hub, cfg), "train.jsonl: changed or missing. Run: run --stage export")
    assert not hub.repos


def test_a_part_of_a_run_wants_to_be_asked_for(hub, tmp_path):
    folder = tmp_path / "run"
    cfg = exported(folder)
    run_export(cfg, overwrite=True, limit=3)
    assert refused(push(hub, cfg), "give --partial")
    assert not hub.repos
    assert push(hub, cfg, "--partial").returncode == 0


def test_what_the_hub_refuses_is_said_in_one_line(hub, sharded):
    assert refused(push(hub, sharded, token=None), "HF_TOKEN: give a token")
    assert refused(push(hub, sharded, token="hf_wrong"), "does not accept this token")
    assert refused(push(hub, sharded, repo="others/pairs"), "may not write there")
    assert refused(push(hub, sharded, repo="a/b/c"), "a/b/c")
    hub.sick = 400
    assert refused(push(hub, sharded), "Push again: only missing files are sent")
    hub.sick = None
    assert push(hub, sharded).returncode == 0
    assert refused(push(hub, sharded, "--private"), "is public")


def test_several_pairs_are_one_dataset_of_the_hub(hub, tmp_path):
    pairs = [{"src_lang": "eng", "tgt_lang": "kor"}, {"src_lang": "eng", "tgt_lang": "de"}]
    cfg = config(
        tmp_path / "run",
        data={"src_lang": "", "tgt_lang": "", "pairs": pairs},
        filters={"rule_based": False},
    )
    for pair_cfg in pair_configs(cfg).values():
        pair_cfg.run.out_dir.mkdir(parents=True)
        make_run(pair_cfg.run.out_dir)
        run_filter(pair_cfg)
        run_export(pair_cfg)
    write_dataset(cfg, RunOptions(("export",)))
    assert push(hub, cfg).returncode == 0
    folder = cfg.run.out_dir / "export"
    assert hub.repos[REPO].files == {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert hub.repos[REPO].commits == ["20 pairs, en->ko, en->de"]
    (folder / "en-de" / "train.parquet").unlink()
    assert refused(push(hub, cfg), "en-de/train.parquet: changed or missing")
