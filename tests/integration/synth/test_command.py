"""Check the command under both names and its error messages."""

from __future__ import annotations

import re
import sys

import pytest
import yaml
from typer.testing import CliRunner

from scorekit.config import load_config, save_config
from scorekit.errors import UserError
from synth.__main__ import app
from synth.config import SynthConfig
from tests.kits import forked

NAMES = ("synth", "synth_parallel.cli")


def command(name, *arguments):
    """Run the command as a user does."""
    return forked.run(
        [sys.executable, "-m", name, *arguments], capture_output=True, text=True, timeout=120
    )


def written(path, **sections):
    """Write a config file of a run in this folder."""
    data = {
        "run": {"out_dir": str(path / "run")},
        "data": {"src_lang": "eng", "tgt_lang": "kor", "files": [str(path / "*.jsonl")]},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    (path / "c.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    return path / "c.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_both_names_are_one_command(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # no number may be cut
    assert "estimate" in command(name, "--help").stdout
    config = str(written(tmp_path))
    done = command(name, "estimate", "--config", config)
    assert (done.returncode, done.stderr) == (0, "") and "generate_128" in done.stdout
    assert re.search(r"answers.sqlite +[0-9.]+ .?B", done.stdout) and "…" not in done.stdout
    done = command(name, "run", "--config", config, "--stage", "none")
    assert done.returncode == 2 and done.stderr.startswith("error: --stage none: ")


def ratios(tmp_path, **blob):
    cfg = load_config(SynthConfig, written(tmp_path, final_generation={"blob": blob}))
    return cfg.final_generation.blob


def test_the_share_of_sentences_may_be_given_in_place_of_that_of_blobs(tmp_path):
    assert ratios(tmp_path, sentence_ratio=0.7).blob_ratio == 0.3
    assert ratios(tmp_path, sentence_ratio=0.7, blob_ratio=0.3).blob_ratio == 0.3
    assert ratios(tmp_path).blob_ratio == 0.5
    with pytest.raises(UserError, match=r"sentence_ratio 0.7 and blob_ratio 0.5 do not add up"):
        ratios(tmp_path, sentence_ratio=0.7, blob_ratio=0.5)


def test_a_run_is_the_same_whichever_share_was_given(tmp_path):
    configs = [ratios(tmp_path, **blob) for blob in ({"sentence_ratio": 0.7}, {"blob_ratio": 0.3})]
    assert configs[0].model_dump() == configs[1].model_dump()
    cfg = load_config(
        SynthConfig, written(tmp_path, final_generation={"blob": {"sentence_ratio": 1}})
    )
    save_config(cfg, tmp_path / "kept.yaml")
    assert load_config(SynthConfig, tmp_path / "kept.yaml").final_generation.blob.blob_ratio == 0


WRONG = {
    "no file": ([], {}, "cannot be read"),
    "not the URL": ([], {"teacher": {"base_url": "localhost:8000/v1"}}, "teacher.base_url"),
    "half a URL": ([], {"metricx": {"url": "http://["}}, "metricx.url"),
    "half a place": ([], {"run": {"answers": "redis://["}}, "run.answers"),
    "no prompt": ([], {"teacher": {"prompt": "/no/such/prompt"}}, "prompt template"),
    "no folder": (["run.out_dir=/dev/null/run"], {}, "run.out_dir"),
    "no list": ([], {"data": {"files": []}}, "data.files"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_of_the_config_is_one_line_before_anything_is_begun(name, tmp_path):
    overrides, sections, message = WRONG[name]
    path = written(tmp_path, **sections)
    if name == "no file":
        path.unlink()
    flags = [part for override in overrides for part in ("--set", override)]
    done = CliRunner().invoke(app, ["run", "--config", str(path), "--stage", "all", *flags])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "run").exists()
