"""Check that file digests follow the content and are cached only where that is safe."""

from __future__ import annotations

import os
import threading

import pytest
from platformdirs import user_cache_path

from scorekit import digest
from scorekit.digest import digest_files
from scorekit.errors import UserError


@pytest.fixture
def settled(monkeypatch):
    """Make every file count as old enough."""
    monkeypatch.setattr(digest, "SETTLED_S", -1e9)


@pytest.fixture
def read_paths(monkeypatch):
    """Return the list of files that are read from disk."""
    read, original = [], digest._read_file
    monkeypatch.setattr(digest, "_read_file", lambda path: read.append(path) or original(path))
    return read


def test_a_digest_follows_the_content(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text("1")
    b.write_text("2")
    first = digest_files([a, b])
    assert first == digest_files([b, a]) and len(first) == 32
    b.write_text("3")
    changed = digest_files([a, b])
    assert changed != first
    b.write_text("2")
    assert digest_files([a, b]) == first


def test_equal_names_in_two_folders_give_one_digest_in_any_order(tmp_path):
    files = []
    for folder, text in (("x", "1"), ("y", "2")):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "config.json")
        files[-1].write_text(text)
    assert digest_files(files) == digest_files(files[::-1])


def test_a_digest_is_remembered_until_the_file_changes(tmp_path, settled, read_paths):
    path = tmp_path / "model.bin"
    path.write_text("weights")
    first = digest_files([path])
    assert digest_files([path]) == first and read_paths == [path]
    path.write_text("other weights")
    assert digest_files([path]) != first and read_paths == [path, path]


def test_a_file_that_was_just_written_is_not_remembered(tmp_path, read_paths):
    """Check a new file, for which a second write may not change size, inode and times."""
    path = tmp_path / "model.bin"
    path.write_text("weights")
    digest_files([path])
    digest_files([path])
    assert read_paths == [path, path]


def test_a_rewrite_that_keeps_size_mtime_and_inode_is_seen(tmp_path, settled):
    path = tmp_path / "model.bin"
    path.write_text("weights")
    first, before = digest_files([path]), path.stat()
    path.write_text("WEIGHTS")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_files([path]) != first


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, monkeypatch, settled):
    path = tmp_path / "model.bin"
    path.write_text("weights")
    monkeypatch.setattr(digest, "_read_file", lambda p: str(p.write_text("longer weights")))
    with pytest.raises(UserError, match=r"model.bin: changed while it was read"):
        digest_files([path])


def test_a_damaged_note_is_not_believed(tmp_path, settled, read_paths):
    path = tmp_path / "model.bin"
    path.write_text("weights " + str(tmp_path))
    before = set(_notes())
    first = digest_files([path])
    (note,) = set(_notes()) - before
    for text in ("", "0" * 31, "x" * 32, "0" * 32 + "\n"):
        note.write_text(text)
        assert digest_files([path]) == first
    assert len(read_paths) == 5


def test_processes_that_start_together_keep_each_others_notes(tmp_path, settled, read_paths):
    paths = [tmp_path / f"{i}.bin" for i in range(32)]
    for path in paths:
        path.write_text(str(path))
    threads = [threading.Thread(target=digest_files, args=([path],)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del read_paths[:]
    digest_files(paths)
    assert not read_paths
    assert not [note for note in _notes() if len(note.name) != 32], "temporary files are left"


def test_a_cache_folder_that_cannot_be_written_costs_only_time(tmp_path, settled, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert digest_files([tmp_path / "file"]) == digest_files([tmp_path / "file"])


def _notes():
    folder = user_cache_path("scorekit") / "digests"
    return list(folder.iterdir()) if folder.exists() else []
