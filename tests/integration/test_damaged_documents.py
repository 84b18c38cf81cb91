"""Check that each reader of a YAML or JSON file of a user refuses a hostile one in a line."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.rows.read import RowFile

LONG = "9" * 5000
JSON = {
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "long number": f'{{"a": {LONG}, "id": {LONG}, "examples": {LONG}}}\n',
}
YAML = {
    "deep": "a: " + "[" * 5000,
    "long number": f"a: {LONG}",
    "no date": "a: 2026-02-30",
    "in itself": "a: &x [*x]",
    "a billion values": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
    "no bool": "a: !!bool x",
}


def _call(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _rows(name: str) -> Callable[[Path], Any]:
    return lambda folder: list(RowFile(folder / name).rows((), None))


#: The file that is damaged, and the reader, called with its folder.
JSON_READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "rows": ("rows.jsonl", _rows("rows.jsonl")),
    "rows of a trainer": (
        "rows.json",
        lambda folder: list(_call("trainer.runs.readers:read_rows")(str(folder / "rows.json"))),
    ),
    "MetricX": ("config.json", _call("services.metricx.model:check_folder")),
    "MetricX's tokenizer": (
        "tokenizer_config.json",
        lambda folder: _call("services.metricx.model:load_tokenizer")(folder, "mine"),
    ),
    "embedder": (
        "modules.json",
        lambda folder: _call("services.embedder.model:check_folder")(folder, None),
    ),
    "weights' index": (
        "model.safetensors.index.json",
        _call("trainer.rl.model_files:count_weights"),
    ),
    "adapters": ("adapter_config.json", _call("trainer.runs.checkpoints.adapters:base_of")),
    "checkpoint": ("state.json", _call("trainer.runs.checkpoints.checkpoint:read_state")),
    "generation config": (
        "generation_config.json",
        lambda folder: _call("trainer.chat.template_check:fixed_generation_config")(folder, [1]),
    ),
    "decisions": (
        "manifest.json",
        lambda folder: _call("trainer.search.steps.prior:read_decisions")(folder, None),
    ),
    "steps of a loop": ("steps.json", _call("trainer.search.rounds.steps:read_steps")),
    "file of a synthesis": (
        "stats.json",
        lambda folder: _call("synth.storage.store:read_json")(folder / "stats.json"),
    ),
    "ViDoSeek": (
        "rows.json",
        lambda folder: _call("trainer.search.importers.vidoseek:_rows")(folder / "rows.json"),
    ),
}


@pytest.mark.parametrize("kind", JSON)
@pytest.mark.parametrize("reader", JSON_READERS)
def test_a_json_file_is_refused_in_a_line(reader, kind, tmp_path):
    name, read = JSON_READERS[reader]
    (tmp_path / "model.safetensors").touch()
    (tmp_path / name).write_text(JSON[kind], encoding="utf-8")
    with pytest.raises(UserError) as raised:
        read(tmp_path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("column", ["gold_pages", "reference_answers", "alternatives"])
def test_json_in_a_cell_is_refused_in_a_line(column):
    row = {
        "id": "a",
        "question": "q",
        "reference_answer": "r",
        "file_name": "f.pdf",
        "gold_pages": '["f_1"]',
        column: "[" * 100_000,
    }
    with pytest.raises(UserError, match=f"{column}: not JSON") as raised:
        _call("trainer.search.data:question_from_row")(row)
    assert len(str(raised.value)) < 200


#: The reader of a YAML file, called with its path.
YAML_READERS: dict[str, Callable[[Path], Any]] = {
    "translation": lambda path: load_config(
        _call("trainer.translation.config:TranslationConfig"), path
    ),
    "role-play": lambda path: load_config(_call("trainer.roleplay.config:RoleplayConfig"), path),
    "search": lambda path: load_config(_call("trainer.search.config:SearchConfig"), path),
    "fine-tuning": lambda path: load_config(_call("trainer.sft.config:SftConfig"), path),
    "synthesis": lambda path: load_config(_call("synth.config:SynthConfig"), path),
    "rubric": lambda path: _call("services.judge.rubrics:load_rubrics")(path.parent),
    "reward": _call("scorekit.rewards.definition:load_definition"),
    "verl's agent loops": lambda path: _call("scorekit.adapters.verl_run:_loop_entry")(str(path)),
    "xCOMET": lambda path: _call("services.xcomet.checkpoint:_read_hparams")(path),
    "fetched xCOMET": lambda path: _call("scorekit.hub:_hparams")(path),
}


@pytest.mark.parametrize("kind", YAML)
@pytest.mark.parametrize("reader", YAML_READERS)
def test_a_yaml_file_is_refused_in_a_line(reader, kind, tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(YAML[kind], encoding="utf-8")
    with pytest.raises(UserError, match=r"my\.yaml, line \d: not YAML: ") as raised:
        YAML_READERS[reader](path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300 + len(str(tmp_path))
