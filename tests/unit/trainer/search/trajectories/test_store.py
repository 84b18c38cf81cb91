"""Check that stored trajectories are read back completely or refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.searching.finished import episode, png_of, sha256_of
from trainer.search.records import (
    ApiUsage,
    EpisodeReward,
    GeneratedAnswer,
    JudgedAnswer,
    Trajectory,
)
from trainer.search.trajectories.store import TrajectoryStore

PAGES = ("deck_1", "deck_2")


def opened(tmp_path: Path, run: str = "run-a") -> TrajectoryStore:
    store = TrajectoryStore(tmp_path / "trajectories", run)
    for name in PAGES:
        store.save_image(sha256_of(name), png_of(name))
    return store


def rewarded(trajectory_id: str, **more: object) -> Trajectory:
    trajectory = episode(trajectory_id, **more)  # type: ignore[arg-type]
    trajectory.answer = GeneratedAnswer(
        status="ok",
        text="서울 \u2028 <b>42</b>",
        model="g",
        evidence=[sha256_of("deck_2")],
        charge=ApiUsage(calls=1, prompt_tokens=900, completion_tokens=12, money=0.002),
    )
    trajectory.judged = JudgedAnswer(
        status="ok", score=0.5, reason="half of it\nis there", model="j"
    )
    trajectory.reward = EpisodeReward(status="ok", value=0.6, parts={"judge": 0.5, "ndcg": 1.0})
    return trajectory


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(x) + "\n" for x in lines).encode()))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    first = [rewarded("t1"), rewarded("t2", sample=1, end="forced")]
    opened(tmp_path).write_step(1, first)
    later = TrajectoryStore(tmp_path / "trajectories", "run-a")
    later.write_step(12, [episode("t3", step=12)])
    read = TrajectoryStore(tmp_path / "trajectories")
    assert read.steps() == [1, 12]
    assert list(read.read()) == [*first, episode("t3", step=12)]
    assert list(read.read([12])) == [episode("t3", step=12)]
    assert read.read_image(sha256_of("deck_1")) == png_of("deck_1")


@pytest.mark.parametrize("compact", [True, False])
def test_it_is_read_without_ids_where_nobody_wants_them(tmp_path: Path, compact: bool) -> None:
    """Check files with spaces from other programs and texts that look like id fields, too."""
    store = opened(tmp_path)
    sly = rewarded("t2", sample=1, end_detail='{"tokens":{"a":1},"tokens":{}}', policy='"tokens":{')
    path = store.write_step(1, [rewarded("t1"), sly, episode("t3", tokens=None)])
    if not compact:
        write_lines(path, lines_of(path))
    trajectories = list(store.read())
    light = list(store.read(tokens=False))
    assert trajectories[0].tokens and trajectories[1].end_detail == sly.end_detail
    assert light == [trajectory.model_copy(update={"tokens": None}) for trajectory in trajectories]


def test_other_tools_read_it_and_see_its_schema(tmp_path: Path) -> None:
    path = opened(tmp_path).write_step(1, [rewarded("t1")])
    (line,) = lines_of(path)
    assert line["schema_version"] == 1
    assert (line["run"], line["step"], line["trajectory_id"]) == ("run-a", 1, "t1")


def test_two_runs_never_merge(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(UserError, match=r"run 'run-a', not of 'run-b'.*misc\.run_dir"):
        TrajectoryStore(tmp_path / "trajectories", "run-b")
    with pytest.raises(ValueError, match=r"not of step 1 of the run 'run-a': \['t9'\]"):
        store.write_step(1, [episode("t9", run="run-b")])
    with pytest.raises(ValueError, match="not of step 2"):
        store.write_step(2, [episode("t9", step=1)])
    assert store.steps() == []


def test_a_step_of_another_run_that_was_copied_here_is_told(tmp_path: Path) -> None:
    path = opened(tmp_path).write_step(1, [episode()])
    other = TrajectoryStore(tmp_path / "b", "run-b")
    (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    for tokens in (True, False):
        with pytest.raises(UserError, match=r"step-000001.*line 1: of step 1 of the run 'run-a'"):
            list(other.read(tokens=tokens))


def test_a_step_done_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.next_attempt(1) == 0
    store.write_step(1, [episode("t1"), episode("t2")])
    assert store.next_attempt(1) == 1
    with pytest.raises(ValueError, match="step 1 exists: its next attempt is 1"):
        store.write_step(1, [episode("t3")])
    with pytest.raises(ValueError, match="attempts"):
        store.write_step(1, [episode("t1", attempt=1), episode("t2", attempt=2)])
    store.write_step(1, [episode("t3", attempt=1)])
    assert [t.trajectory_id for t in store.read()] == ["t3"]


def test_what_is_behind_the_checkpoint_is_cut(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for step in (1, 2, 3):
        store.write_step(step, [episode(step=step)])
    store.cut(1)
    assert store.steps() == [1]
    assert store.next_attempt(2) == 0


def test_a_step_refers_to_no_picture_that_was_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ValueError, match=rf"t1: image {sha256_of('deck_9')} is not stored"):
        store.write_step(1, [episode("t1", shown=("deck_9",))])
    unsent = rewarded("t1")
    assert unsent.answer
    unsent.answer.evidence.append(sha256_of("a crop"))
    with pytest.raises(ValueError, match="is not stored"):
        store.write_step(1, [unsent])


def test_a_step_holds_an_id_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="duplicate id"):
        opened(tmp_path).write_step(1, [episode("t1"), episode("t1")])


def test_a_mask_that_is_not_its_digests_is_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    wrong = episode("t1")
    assert wrong.tokens
    wrong.tokens.action_mask[2] = True
    with pytest.raises(ValueError, match="t1: its action mask"):
        store.write_step(1, [wrong])
    path = store.write_step(1, [episode("t1"), episode("t2")])
    lines = lines_of(path)
    lines[1]["tokens"]["action_mask"] = [True, True, True, True]  # type: ignore[index]
    write_lines(path, lines)
    with pytest.raises(UserError, match=r"line 2: its action mask does not have the digest"):
        list(store.read())
    lines[1]["tokens"]["action_mask"] = [True, True, False]  # type: ignore[index]
    write_lines(path, lines)
    with pytest.raises(UserError, match=r"line 2: 4 ids, an action mask of 3"):
        list(store.read())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "line 1: schema version 2, but this version reads 1"),
        ({"surprise": "secret"}, "line 1: surprise: Extra inputs"),
        ({"step": "seven"}, "line 1: step: Input should be a valid integer"),
    ],
)
def test_a_line_that_is_not_ours_is_told(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    store = opened(tmp_path)
    path = store.write_step(1, [episode()])
    write_lines(path, [lines_of(path)[0] | change])
    for tokens in (True, False):
        with pytest.raises(UserError, match=message) as caught:
            list(store.read(tokens=tokens))
        assert "secret" not in str(caught.value)


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    path = store.write_step(1, [episode()])
    content_bytes = path.read_bytes()
    for content in (
        b"",
        content_bytes[:-20],
        content_bytes[:40] + b"zzz" + content_bytes[43:],
        b"no gzip",
    ):
        path.write_bytes(content)
        for tokens in (True, False):
            with pytest.raises(
                UserError, match=r"step-000001\.jsonl\.gz: cannot be read: .*search salvage"
            ):
                list(store.read(tokens=tokens))


def test_a_folder_without_trajectories_or_of_another_schema_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trajectories of a run: No such file"):
        TrajectoryStore(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    opened(tmp_path)
    (tmp_path / "trajectories/store.json").write_text('{"schema_version": 9, "run": "run-a"}')
    with pytest.raises(UserError, match="have schema version 9, but this version reads 1"):
        TrajectoryStore(tmp_path / "trajectories", "run-a")


def test_a_picture_is_its_hash(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ValueError, match="does not have the hash"):
        store.save_image(sha256_of("deck_3"), png_of("deck_4"))
    with pytest.raises(UserError, match="No such file"):
        store.read_image(sha256_of("deck_3"))
    for wrong in ("../../etc/passwd", "A" * 64, "ab" * 31):
        with pytest.raises(UserError, match="is not the SHA-256"):
            store.read_image(wrong)
    path = next((tmp_path / "trajectories/images").rglob("*.png"))
    path.write_bytes(b"half")
    with pytest.raises(UserError, match="damaged: its content"):
        store.read_image(path.stem)


def test_an_empty_picture_of_a_power_cut_is_written_again(tmp_path: Path) -> None:
    sha = sha256_of("deck_1")
    opened(tmp_path)
    path = tmp_path / "trajectories/images" / sha[:2] / f"{sha}.png"
    path.write_bytes(b"")
    assert opened(tmp_path).read_image(sha) == png_of("deck_1")


def test_pictures_reach_the_disk_before_the_step_that_refers_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    store = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", noted)
    store.write_step(1, [episode()])
    image_names = {f"{sha256_of(name)}.png" for name in PAGES}
    step = next(i for i, name in enumerate(synced) if "step-000001" in name)
    assert image_names <= set(synced[:step])
    assert {sha256_of(name)[:2] for name in PAGES} | {"images"} <= set(synced[:step])
    assert synced[-1] == "trajectories"


def test_a_disk_that_fails_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, synced = opened(tmp_path), []
    real = os.fsync

    def fails(descriptor: int) -> None:
        raise OSError("I/O error")

    def noted(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="I/O error"):
        store.write_step(1, [episode()])
    monkeypatch.setattr(os, "fsync", noted)
    store.write_step(1, [episode()])
    assert {f"{sha256_of(name)}.png" for name in PAGES} <= set(synced)


def test_a_picture_that_is_stored_while_others_reach_the_disk_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sync = opened(tmp_path), os.fsync
    synced: set[str] = set()
    entered, stored = threading.Event(), threading.Event()

    def slow(number: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{number}")).stem)
        entered.set()
        stored.wait(10)
        sync(number)

    store.save_image(sha256_of("first"), png_of("first"))
    monkeypatch.setattr(os, "fsync", slow)
    threads = [threading.Thread(target=store.sync_images) for _ in range(2)]
    threads[0].start()
    entered.wait(10)
    threads[1].start()  # it has the same images to sync as the first
    store.save_image(sha256_of("second"), png_of("second"))
    stored.set()
    for thread in threads:
        thread.join()
    store.sync_images()
    assert {sha256_of("first"), sha256_of("second")} <= synced


def test_a_number_that_is_none_is_refused_when_it_is_written(tmp_path: Path) -> None:
    wrong = episode()
    wrong.reward = EpisodeReward.model_construct(status="ok", value=float("nan"), parts={})
    with pytest.raises(ValueError, match="reward"):
        opened(tmp_path).write_step(1, [wrong])
    assert TrajectoryStore(tmp_path / "trajectories").steps() == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.kits.trainer.searching.finished import episode, png_of, sha256_of
from trainer.search.trajectories.store import TrajectoryStore

store = TrajectoryStore(Path(sys.argv[1]), "run-a")
for name in ("deck_1", "deck_2"):
    store.save_image(sha256_of(name), png_of(name))
store.write_step(1, [episode("t1")])
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.write_step(1, [episode("t2", attempt=1), episode("t3", attempt=1)])
"""


def test_a_process_killed_while_it_writes_a_step_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    dead = subprocess.run([sys.executable, "-c", _KILLED, str(folder)], cwd=Path.cwd())
    assert dead.returncode == -signal.SIGKILL
    assert list(folder.glob(".step-000001.jsonl.gz.*.tmp"))
    store = TrajectoryStore(folder, "run-a")  # as each process of a run does: it removes nothing
    assert list(folder.glob(".*"))
    store.cut(1)
    assert not list(folder.rglob(".*"))
    assert [t.trajectory_id for t in store.read()] == ["t1"]
    assert store.next_attempt(1) == 1
    store.write_step(1, [episode("t2", attempt=1)])
    assert [t.trajectory_id for t in store.read()] == ["t2"]


def test_a_picture_that_a_killed_process_was_writing_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore(tmp_path / "trajectories", "run-a")
    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", lambda *_: None)
        store.save_image(sha256_of("deck_1"), png_of("deck_1"))
    assert [path.suffix for path in store.folder.rglob("*") if path.is_file()].count(".tmp") == 1
    opened(tmp_path).cut(0)
    assert not list(store.folder.rglob("*.tmp"))


def test_the_digest_of_a_mask_is_over_its_bytes() -> None:
    tokens = episode().tokens
    assert tokens
    assert tokens.mask_digest == hashlib.sha256(b"\x01\x01\x00\x01").hexdigest()
