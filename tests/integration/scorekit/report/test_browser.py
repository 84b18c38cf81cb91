"""Check the reports in a real browser: nothing blank, nothing cut off, Korean as Korean."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from scorekit.report.page import STYLE
from tests.kits.browser import BROWSER, ask_page, screenshot
from trainer.translation.evaluation.compare import compare_policies
from trainer.translation.evaluation.report import write_comparison, write_report

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
SRC, MT = "Open the configuration file. " * 8, "설정파일을열고저장하십시오" * 12


def line(number: int, score: float) -> dict:
    span = {"start": 0, "end": 4, "severity": "CRITICAL", "confidence": 0.9, "text": MT[:4]}
    return {
        "id": str(number),
        "pair": "en-US>ko-KR",
        "src": SRC,
        "mt": MT,
        "ref": MT,
        "tokens": 30,
        "finish_reason": "eos",
        "metricx_score": score,
        "xcomet_score": 0.5,
        "chrf": 30.0,
        "error_spans": [span],
        "error": None,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run whose texts are long, in two language pairs."""
    folder = tmp_path / "run"
    (folder / "completions").mkdir(parents=True)
    stats = {
        "samples": 12,
        "metricx_score_mean": 8.0,
        "xcomet_score_mean": 0.5,
        "chrf": 20.0,
        "spans_mean": 1.0,
        "bleu": 5.0,
        "bleu_tokenize": "char",
    }
    stats["pairs"] = {pair: dict(stats) for pair in ("en-US>ko-KR", "en-US>de-DE")}
    for update in (0, 4):
        name = f"completions/eval-{update:06d}.jsonl"
        rows = [line(n, 9.0 - update + n % 3) for n in range(12)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        with (folder / "eval.jsonl").open("a") as file:
            file.write(json.dumps(stats | {"update": update, "completions": name}) + "\n")
    logged = [{"update": n, "metricx_score_mean": 8.0 - n, "kl_ref": n / 9} for n in range(1, 5)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    (folder / "config.yaml").write_text("misc:\n  seed: 1\n")
    return folder


def test_the_report_shows_its_figures_and_its_marked_spans(run: Path, tmp_path: Path) -> None:
    page = write_report(run)
    seen = screenshot(tmp_path, page, 1280, 2400)
    assert seen.shape == (2400, 1280, 3)
    dark = (seen.max(axis=2) < 100).mean(axis=1)  # share of ink in each row of pixels
    assert 0.002 < dark.mean() < 0.3
    parts = dark.reshape(8, -1).max(axis=1)
    assert (parts[:6] > 0).all(), "a blank stretch"
    for name, colour in (("a curve", (31, 119, 180)), ("a critical span", (255, 159, 154))):
        assert (np.abs(seen - colour).max(axis=2) < 12).sum() > 100, name


def test_nothing_is_wider_than_a_narrow_window(run: Path, tmp_path: Path) -> None:
    """Check that a wide table scrolls within itself, and a text without spaces wraps."""
    lines = [line(n, 5.0 + n % 4) for n in range(12)]
    groups = compare_policies(lines, [eval_line | {"metricx_score": 2.0} for eval_line in lines])
    comparison_arguments = ("a" * 90, "b"), groups, lines, lines[::-1]
    pages = [write_report(run), write_comparison(run / "comparison.html", *comparison_arguments)]
    for page in pages:
        size = "document.documentElement.scrollWidth + '/' + document.documentElement.scrollHeight"
        wide, high = ask_page(tmp_path, page, size, width=390).split("/")
        assert int(wide) <= 390, page.name
        assert int(high) > 800


@pytest.mark.skipif(
    not (
        shutil.which("fc-list")
        and subprocess.run(
            ["fc-list", ":lang=ko"], capture_output=True, text=True, check=False
        ).stdout
    ),
    reason="no Korean font",
)
def test_korean_has_glyphs(tmp_path: Path) -> None:
    """Check that syllables differ: without a font, each is the same empty box."""
    page = tmp_path / "korean.html"
    boxes = "".join(
        f'<div style="position:absolute;left:{100 * index}px;top:0;font-size:64px">{syllable}</div>'
        for index, syllable in enumerate("가힣밥으")
    )
    page.write_text(f"<meta charset=utf-8><style>{STYLE}</style>{boxes}", encoding="utf-8")
    seen = screenshot(tmp_path, page, 800, 200) < 128
    cut = [seen[:, 100 * index : 100 * index + 100, 0] for index in range(4)]
    assert all(box.sum() > 100 for box in cut)
    for index, box in enumerate(cut):
        for other in cut[:index]:
            assert (box != other).sum() > 100
