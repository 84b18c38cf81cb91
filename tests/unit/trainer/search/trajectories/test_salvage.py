"""Check that damage to a step file costs the lines that it touches, and that these are named."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorekit.errors import UserError
from tests.kits.trainer.searching.finished import episode, png_of, sha256_of
from trainer.search.cli import app
from trainer.search.trajectories.salvage import salvage
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

NAMES = ("t1", "t2", "t3", "t4")


def stored(run: Path) -> tuple[TrajectoryStore, Path]:
    """Return a store with a step of four episodes, and the step's file."""
    store = TrajectoryStore(run / FOLDER, "run-a")
    for name in ("deck_1", "deck_2"):
        store.save_image(sha256_of(name), png_of(name))
    trajectories = [episode(name, sample=n) for n, name in enumerate(NAMES)]
    return store, store.write_step(1, trajectories)


def starts(path: Path) -> list[int]:
    """Return the position of each line's first byte, and of the end."""
    content = path.read_bytes()
    positions = [0]
    while (position := content.find(b"\x1f\x8b\x08\x00", positions[-1] + 1)) > 0:
        positions.append(position)
    return [*positions, len(content)]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def ids(store: TrajectoryStore) -> list[str]:
    return [trajectory.trajectory_id for trajectory in store.read()]


@pytest.mark.parametrize("line", [0, 1, 3])
@pytest.mark.parametrize("part", ["head", "body", "checksum"])
def test_a_flipped_bit_costs_one_line(tmp_path: Path, line: int, part: str) -> None:
    store, path = stored(tmp_path)
    before = list(store.read())
    first, end = starts(path)[line : line + 2]
    flip(path, {"head": first, "body": (first + end) // 2, "checksum": end - 6}[part])
    damaged_bytes = path.read_bytes()
    with pytest.raises(UserError, match=f"search salvage {tmp_path}`, which keeps"):
        ids(store)
    (step,) = salvage(tmp_path)
    assert list(store.read()) == [item for n, item in enumerate(before) if n != line]
    assert (step.num_kept, len(step.losses)) == (3, 1)
    assert step.losses[0].startswith(f"line {line + 1}")
    assert step.damaged.read_bytes() == damaged_bytes
    assert salvage(tmp_path) == []


def test_every_single_byte_costs_one_line_at_most(tmp_path: Path) -> None:
    """Flip bytes all over a file, each in a fresh copy."""
    store, path = stored(tmp_path)
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 60)):
        path.write_bytes(content)
        flip(path, position)
        salvage(tmp_path)
        assert len(ids(store)) >= 3, position


def test_a_line_with_wrong_content_is_lost_and_named(tmp_path: Path) -> None:
    store, path = stored(tmp_path)
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"run":"run-a"', b'"run":"run-b"')
    lines[2] = b'{"trajectory_id": "t3", "step": 1'
    path.write_bytes(b"".join(gzip.compress(line, mtime=0) for line in [*lines, lines[0]]))
    result = CliRunner().invoke(app, ["salvage", str(tmp_path)], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert ids(store) == ["t1", "t4"]
    for text in (
        "kept 2 lines, lost 3",
        "line 2 (t2): of step 1 of the run 'run-b'",
        "line 3 (t3): the line has no end",
        "line 5 (t1): its trajectory is in the file already",
        "step-000001.jsonl.gz.damaged",
    ):
        assert text in result.stdout, text


def test_a_file_of_an_earlier_version_keeps_the_lines_before_the_damage(tmp_path: Path) -> None:
    store, path = stored(tmp_path)
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text, mtime=0))
    assert ids(store) == list(NAMES) and salvage(tmp_path) == []
    path.write_bytes(path.read_bytes()[:-30])
    (step,) = salvage(tmp_path)
    remaining = ids(store)
    assert 1 <= len(remaining) < 4 and remaining == list(NAMES[: len(remaining)])
    assert step.has_unchecked and "a kept one may be changed, too" in "\n".join(step.lines())
    # a wrong checksum alone loses nothing, and is said
    path.write_bytes(gzip.compress(text, mtime=0))
    flip(path, path.stat().st_size - 6)
    (step,) = salvage(tmp_path)
    assert ids(store) == list(NAMES)
    assert step.losses == [] and step.has_unchecked
    assert step.damaged.name == "step-000001.jsonl.gz.damaged1"


@pytest.mark.parametrize("content", [b"", b"no gzip", b"\0" * 400])
def test_a_step_without_a_readable_line_is_gone_and_kept_aside(
    tmp_path: Path, content: bytes
) -> None:
    store, path = stored(tmp_path)
    path.write_bytes(content)
    (step,) = salvage(tmp_path)
    assert store.steps() == [] and step.damaged.read_bytes() == content
    assert "--resume repeats it" in "\n".join(step.lines())


def test_a_whole_store_is_left_as_it_is(tmp_path: Path) -> None:
    _, path = stored(tmp_path)
    before = path.read_bytes()
    result = CliRunner().invoke(app, ["salvage", str(tmp_path)])
    assert (result.exit_code, path.read_bytes()) == (0, before)
    assert "no line is damaged" in result.output
    assert CliRunner().invoke(app, ["salvage", str(tmp_path / "none")]).exit_code == 2


def test_a_step_without_episodes_is_read(tmp_path: Path) -> None:
    store, _ = stored(tmp_path)
    store.write_step(2, [])
    assert list(store.read([2])) == [] and salvage(tmp_path) == []
