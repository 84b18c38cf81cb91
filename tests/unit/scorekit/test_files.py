"""Check that files and folders are complete or absent, even after a power failure."""

from __future__ import annotations

import ast
import errno
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scorekit.files import (
    atomic_writer,
    put_folder,
    remove_folder,
    remove_temporaries,
    replacing_folder,
    temporary_of,
    write_atomic,
)
from tests.kits.disk.full import full_disk

ROOT = Path(__file__).parents[3]
#: Modules that rename files without scorekit/files.py, with the reason.
NO_WRITERS = {
    "scorekit/score_database.py",  # moves a broken file aside
    "scorekit/paid/repair.py",  # a SQLite file with its log
    "synth/report/views.py",  # appends
    "trainer/rl/engines/vllm_weights.py",  # weights for a server, unused after the run
    "trainer/runs/batches.py",  # appends, and cuts an incomplete last line
}


class Log:
    """Records disk operations in order as (operation, name)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, str]] = []
        real_open, real_sync, real_rename = os.open, os.fsync, os.rename
        names: dict[int, str] = {}

        def opened(path: str, *args: int, **more: int) -> int:
            handle = real_open(path, *args, **more)
            names[handle] = Path(os.fsdecode(path)).name
            return handle

        def synced(handle: int) -> None:
            self.done.append(("sync", names.get(handle, "?")))
            real_sync(handle)

        def renamed(source: str, target: str) -> None:
            self.done.append(("rename", Path(target).name))
            real_rename(source, target)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "replace", renamed)


def test_a_file_has_its_name_when_its_content_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    write_atomic(tmp_path / "a", "new")
    (first, _), *later_operations = log.done
    assert first == "sync" and later_operations == [("rename", "a"), ("sync", tmp_path.name)]
    assert (tmp_path / "a").read_text() == "new"


def test_whoever_dies_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt), atomic_writer(tmp_path / "a") as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def _folder(path: Path, content: str) -> Path:
    (path / "deep").mkdir(parents=True)
    (path / "deep/file").write_text(content)
    return path


def test_a_folder_has_its_name_when_all_in_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path / "x", "old")
    new = _folder(tmp_path / ".x.partial", "new")
    log = Log(monkeypatch)
    put_folder(new, tmp_path / "x")
    named = log.done.index(("rename", "x"))
    assert {name for _, name in log.done[:named]} >= {"file", "deep", ".x.partial"}
    assert log.done[named + 1] == ("sync", tmp_path.name)
    assert (tmp_path / "x/deep/file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_goes_at_once_and_what_a_killed_process_left_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path / "x", "old")
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *_, **__: None)
        remove_folder(folder)
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 1
    remove_folder(_folder(tmp_path / "x", "again"))
    assert not list(tmp_path.iterdir())
    remove_folder(folder)  # which does not exist


def test_a_new_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing_folder(tmp_path / "x") as folder:
        (folder / "half").write_text("")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with replacing_folder(tmp_path / "x") as folder:
        (folder / "whole").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x/whole").exists()


def test_a_model_can_be_read_by_whoever_can_read_its_folder(tmp_path: Path) -> None:
    open_to_all, private = tmp_path / "policy", tmp_path / "own"
    for folder, umask in ((open_to_all, 0o022), (private, 0o077)):
        before = os.umask(umask)
        try:
            with replacing_folder(folder) as partial:
                (partial / "adapter").mkdir()
                for path in (partial / "model.safetensors", partial / "adapter/model.safetensors"):
                    save_file({"weight": np.zeros(2)}, path)
        finally:
            os.umask(before)
    modes = {
        folder: {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*.safetensors")}
        for folder in (open_to_all, private)
    }
    assert modes == {open_to_all: {0o644}, private: {0o600}}


def test_a_full_disk_elsewhere_keeps_the_name_of_its_own_file(tmp_path: Path) -> None:
    elsewhere = OSError(errno.ENOSPC, "No space left on device", "/cache/blob.incomplete")
    with (
        pytest.raises(OSError) as caught,
        atomic_writer(tmp_path / "a"),
        atomic_writer(tmp_path / "b"),
    ):
        raise elsewhere
    assert caught.value is elsewhere
    with (
        pytest.raises(OSError) as caught,
        atomic_writer(tmp_path / "a"),
        atomic_writer(tmp_path / "b"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "b")


def test_a_full_disk_is_told_with_the_name_that_the_file_was_to_have(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", "old")
    with pytest.raises(OSError) as caught, full_disk(9):
        write_atomic(tmp_path / "a", b"new" * 9)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "a"))
    with pytest.raises(OSError) as caught, full_disk(9), replacing_folder(tmp_path / "x") as folder:
        (folder / "deep").write_bytes(b"new" * 9)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "x"))
    with pytest.raises(FileNotFoundError) as other, atomic_writer(tmp_path / "a"):
        (tmp_path / "gone").read_bytes()
    assert other.value.filename == str(tmp_path / "gone")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_what_a_killed_process_left_goes_and_nothing_else(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    temporary_paths = [temporary_of(tmp_path / "a.json"), temporary_of(deep / "b[1].json")]
    other_paths = [
        tmp_path / name for name in ("a.json", ".a.json.tmp", ".a.gone", "a.0123456789ab.tmp")
    ]
    for path in (*temporary_paths, *other_paths):
        path.write_text("")
    folders = [_folder(temporary_of(tmp_path / "c"), ""), _folder(tmp_path / ".d.gone", "")]
    remove_temporaries(tmp_path, "a.*")
    assert [path.exists() for path in (*temporary_paths, *folders)] == [False, True, True, True]
    remove_temporaries(tmp_path)
    assert [path.exists() for path in (*temporary_paths, *folders)] == [False, True, False, False]
    remove_temporaries(tmp_path, deep=True)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(other_paths)
    remove_temporaries(tmp_path / "not there")


def test_only_who_writes_a_file_alone_takes_away_what_another_left_of_it(tmp_path: Path) -> None:
    path = tmp_path / "b[1].json"
    left, other_temporary = temporary_of(path), temporary_of(tmp_path / "b1.json")
    for temporary in (left, other_temporary):
        temporary.write_text("")
    write_atomic(path, "1")
    assert left.exists()  # another process may be writing it
    write_atomic(path, "2", alone=True)
    assert not left.exists() and other_temporary.exists() and path.read_text() == "2"


def _renames(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    if not re.search(r"\b(rename|fsync|(os|temporary|partial)\.replace)\(", text):
        return False
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = getattr(node.func.value, "id", "")
            if node.func.attr in ("rename", "fsync") or (
                node.func.attr == "replace" and owner in ("os", "temporary", "partial")
            ):
                return True
    return False


def test_one_place_gives_files_their_names() -> None:
    writers = {
        str(path.relative_to(ROOT))
        for package in (
            "scorekit",
            "services",
            "trainer",
            "synth",
            "demo",
            "bench",
            "evidence",
            "testing",
        )
        for path in (ROOT / package).rglob("*.py")
        if _renames(path)
    }
    assert writers - {"scorekit/files.py"} == NO_WRITERS
