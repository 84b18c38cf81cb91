"""Check the warning for file systems whose locks other machines do not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from scorekit.errors import UserError
from synth import location
from synth.config import SynthConfig

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:40 / /data rw shared:2 - nfs4 server:/data rw,vers=4.2,local_lock=none
41 22 0:41 / /old rw shared:3 - nfs server:/old rw,nolock
42 22 0:42 / /my\\040disk rw shared:4 - fuse.sshfs me@server: rw,user_id=0
43 22 0:43 / /share rw shared:5 - cifs //server/share rw,nobrl
a line that is none
"""


@pytest.mark.parametrize(
    "folder, words",
    [
        ("/home/run", []),
        ("/database/run", []),
        ("/data/run", ["SQLite"]),
        ("/old/run", ["locks", "SQLite"]),
        ("/my disk/run", ["locks", "SQLite"]),
        ("/share/a/run", ["locks", "SQLite"]),
    ],
)
def test_what_a_run_lies_on_is_told_where_machines_would_not_see_each_other(
    tmp_path, monkeypatch, folder, words
):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    mount_of = location.mount_of
    monkeypatch.setattr(location, "mount_of", lambda path: mount_of(path, mounts))
    data = {"src_lang": "eng", "tgt_lang": "kor"}
    cfg = SynthConfig.model_validate({"run": {"out_dir": folder}, "data": data})
    lines = list(location.warnings(cfg, Path(folder)))
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))
    cfg.run.answers = "redis://host:6379/0"
    assert not any("SQLite" in line for line in location.warnings(cfg, Path(folder)))


def test_a_folder_that_may_not_be_used_is_named_in_one_line(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(location, "_has_content", refuse)
    with pytest.raises(UserError, match=f"^run.out_dir: {tmp_path}: Permission denied$"):
        location.create_run_dir(tmp_path)


def test_a_system_that_tells_nothing_is_told_nothing(tmp_path):
    assert location.mount_of(tmp_path, tmp_path / "none") is None
    assert location.mount_of(tmp_path) is None or location.mount_of(tmp_path).kind
