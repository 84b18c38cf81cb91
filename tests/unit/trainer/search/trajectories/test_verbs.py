"""Check `trainer search view` and `export` as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.episodes import played, scripted, search
from trainer.search.cli import app
from trainer.search.trajectories.store import TrajectoryStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two steps of one episode."""
    images: dict[str, bytes] = {}
    (episode,) = played(scripted(search("Births in Europe")), pictures=images)
    store = TrajectoryStore(tmp_path / "run/trajectories", "r")
    for name, png in images.items():
        store.save_image(name, png)
    for step in (3, 4):
        changes = {"step": step, "trajectory_id": f"{step}-0"}
        store.write_step(step, [episode.model_copy(update=changes)])
    return tmp_path / "run"


def start(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in args])
    return done.exit_code, done.output


def test_view_writes_the_page_of_the_steps_that_were_named(run: Path) -> None:
    code, out = start("view", run, "--step", 4)
    assert code == 0 and str(run / "view.html") in out.replace("\n", "")
    page = (run / "view.html").read_text("utf-8")
    assert "4-0 " in page and "3-0 " not in page
    assert start("view", run, "--step", 5)[0] == 2
    assert start("view", run / "nothing")[0] == 2


@pytest.mark.parametrize("form", ["atif", "inspect"])
def test_export_names_the_script_that_writes_other_formats(run: Path, form: str) -> None:
    code, out = start("export", run, run / "out", "--format", form)
    assert code == 2 and "examples/export_trajectories.py" in out.replace("\n", "")
    assert not (run / "out").exists()
