"""Test `python -m trainer template-check` on folders of models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.kits.forked import completed
from tests.kits.trainer.chat import CHATML, byte_tokenizer, template_text, turns
from trainer.rl.model_files import save_tokenizer

ROW = {"messages": turns("안녕", '지민은 웃었다.\n"네 뷁"', "왜?", "그냥요 😀", system="시스템")}


def model(folder: Path, template: str | None, end: str = "<|im_end|>", **generation: Any) -> Path:
    """Save the parts of a model that the check reads: everything except weights."""
    folder.mkdir()
    save_tokenizer(byte_tokenizer(template, end), folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def check(folder: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "80"}
    result = completed(
        "trainer", "template-check", "--model", str(folder), *arguments, environment=environment
    )
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW, ensure_ascii=False) + "\n", encoding="utf-8")
    return str(path)


def test_a_right_template_is_shown_with_what_is_learned(tmp_path: Path, rows: str) -> None:
    code, out, _ = check(model(tmp_path / "m", CHATML), "--data", rows)
    assert code == 0 and "FAIL" not in out
    # Brackets, because the output has no colors.
    assert '⟦지민은 웃었다.\n"네 뷁"<|im_end|>⟧' in out
    assert f"{rows} line 1: " in out


def test_a_wrong_one_ends_with_2_and_a_remedy_and_fix_mends_it(tmp_path: Path, rows: str) -> None:
    text = template_text("qwen3_instruct_2507_training")
    stop = "        {{- '<|im_end|>\\n' }}\n        {%- endgeneration %}"
    moved = "        {%- endgeneration %}\n        {{- '<|im_end|>\\n' }}"
    assert stop in text
    folder = model(tmp_path / "m", text.replace(stop, moved), "<|endoftext|>", eos_token_id=258)
    code, out, _ = check(folder, "--data", rows)
    assert code == 2
    assert "FAIL stop token: " in out and "-> " in out

    code, out, _ = check(folder, "--data", rows, "--fix")
    assert code == 0 and "FAIL" not in out
    assert "\n+" in out and "\n-" in out  # the diff
    fixed = folder / "chat_template.fixed.jinja"
    stop_ids = json.loads((folder / "generation_config.fixed.json").read_text())["eos_token_id"]
    assert stop_ids == [258, byte_tokenizer().convert_tokens_to_ids("<|im_end|>")]
    # The check of generation_config fails.
    assert check(folder, "--data", rows, "--template", str(fixed))[0] == 2

    (folder / "generation_config.fixed.json").replace(folder / "generation_config.json")
    fixed.replace(folder / "chat_template.jinja")
    assert check(folder, "--data", rows)[0] == 0  # the fixed template replaces the model's own


def test_fix_replaces_no_other_file(tmp_path: Path, rows: str) -> None:
    folder = model(tmp_path / "m", CHATML)
    (folder / "chat_template.fixed.jinja").write_text("mine")
    code, _, errors = check(folder, "--data", rows, "--fix")
    assert code == 2 and "exists and is not replaced" in errors
    assert check(folder, "--data", rows, "--fix", "--to", str(tmp_path / "other"))[0] == 0


def test_qwen3_is_right_one_turn_a_row_without_thinking(tmp_path: Path, rows: str) -> None:
    folder = model(tmp_path / "m", template_text("qwen3"))
    code, out, _ = check(folder, "--data", rows, "--no-thinking")
    assert code == 2 and "train on one turn a row (turns: each)" in out
    assert check(folder, "--data", rows, "--no-thinking", "--turns", "each")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/none.jsonl"], "no such file"),
        (["--template", "/none.jinja"], "chat.template: /none.jinja: cannot be read"),
        ([], "no chat template. Set chat.template"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, _, errors = check(model(tmp_path / "m", None), *arguments)
    assert code == 2
    assert message in errors.splitlines()[-1] and "Traceback" not in errors


def test_control_tokens_and_placeholders_in_rows_are_found(tmp_path: Path) -> None:
    folder, path = model(tmp_path / "m", CHATML), tmp_path / "rows.jsonl"
    bad = [turns("a", "b<|im_end|>\n<|im_start|>user\nc"), turns("{{user}}", "d"), turns("e", "f")]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in bad))
    code, out, _ = check(folder, "--data", str(path), "--show", "0")
    assert code == 2
    assert f"FAIL control tokens: {path} line 1: turn 2 (assistant): has the control token" in out
    assert f"FAIL placeholders: {path} line 2: turn 1 (user): has the placeholder" in out
    options = ["--control-tokens", "neutralize", "--placeholders", "keep"]
    code, out, _ = check(folder, "--data", str(path), "--show", "1", *options)
    assert code == 0 and "FAIL" not in out
    assert "⟦b< |im_end|>\n< |im_start|>user\nc<|im_end|>⟧" in out
