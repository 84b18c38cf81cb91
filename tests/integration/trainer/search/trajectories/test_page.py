"""Test the page of a run in a real browser: filters, boxes, a narrow window, Korean text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kits.browser import BROWSER, ask_page, screenshot
from tests.kits.trainer.searching.episodes import ask, crop, played, scripted, search
from trainer.search.records import GeneratedAnswer, JudgedAnswer
from trainer.search.trajectories.layout import KINDS
from trainer.search.trajectories.view import write_episodes

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
WRITTEN, CUT = (209, 0, 108), (0, 96, 199)
KOREAN = "1990년 유럽에서는 아이가 몇 명 태어났나요? " * 4


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three episodes: a wrong answer with gold seen, a forced one, an invalid action."""
    image_by_hash: dict[str, bytes] = {}
    questions = [ask(), ask("q2", max_turns=1), ask("q3", KOREAN, gold=("deck_4",))]
    turns = search("Births in Europe"), crop(100, 80, 500, 300), "no action" * 60
    trajectories = played(scripted(*turns), questions, pictures=image_by_hash)
    trajectories[0] = trajectories[0].model_copy(
        update={
            "answer": GeneratedAnswer(status="ok", text="7" * 300, evidence=trajectories[0].images),
            "judged": JudgedAnswer(status="ok", score=0.0, reason="another number"),
        }
    )
    path = tmp_path_factory.mktemp("view") / "view.html"
    write_episodes(path, trajectories, image_by_hash.__getitem__, title="three episodes")
    return path


def test_a_filter_leaves_the_episodes_of_its_kind(page: Path, tmp_path: Path) -> None:
    visibility = "[...document.querySelectorAll('article')].map((a) => a.offsetHeight > 0 ? 1 : 0)"
    radio = "document.getElementById('only-{}')"
    seen = [f"({radio.format(kind)}.checked = true, {visibility}.join(''))" for kind in KINDS]
    output = ask_page(tmp_path, page, f"[{', '.join(seen)}].join(' ')")
    assert dict(zip(KINDS, output.split(), strict=True)) == {
        "all": "111",
        "seen-wrong": "100",
        "unsent": "000",
        "unshown-right": "000",
        "forced": "010",
        "invalid": "101",
        "unscored": "111",
    }


def test_nothing_is_wider_than_a_narrow_window(page: Path, tmp_path: Path) -> None:
    assert int(ask_page(tmp_path, page, "document.documentElement.scrollWidth", width=390)) <= 390


def test_pictures_and_boxes_are_drawn(page: Path, tmp_path: Path) -> None:
    seen = screenshot(tmp_path, page, 1200, 2400)
    for name, colour in (("written", WRITTEN), ("cut", CUT)):
        rows, columns = np.nonzero((np.abs(seen - colour).max(axis=2) < 12)[300:])
        assert len(rows) > 300, name
        assert np.ptp(columns) < 480, name
    box = "document.querySelector('article .{}').getBoundingClientRect()"
    shot = "document.querySelector('article .shot').getBoundingClientRect()"
    sides = (
        f"((b, s) => [(b.x - s.x) / s.width, b.width / s.width])({box.format('written')}, {shot})"
    )
    left, width = map(float, ask_page(tmp_path, page, f"{sides}.join(' ')").split())
    assert left == pytest.approx(100 / 840, abs=0.01)
    assert width == pytest.approx(400 / 840, abs=0.01)
