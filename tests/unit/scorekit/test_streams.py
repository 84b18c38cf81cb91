"""Check the streams that lose lines instead of a run, and those that must lose nothing."""

from __future__ import annotations

import errno
import io
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from scorekit import streams
from scorekit.streams import Output, open_log, stop_waiting, write_some_now
from tests.kits.disk.full import full_disk
from tests.kits.unwritable import BY_NAME, Unwritable, full_device, pipe_without_reader, unread_pipe


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no reader, and forget the logs of other tests and a call of stop_waiting."""
    monkeypatch.setattr(streams, "MAX_WAIT_S", 0.0)
    monkeypatch.setattr(streams, "END_WAIT_S", 0.0)
    monkeypatch.setattr(streams, "_give_up_at", math.inf)
    monkeypatch.setattr(streams, "_outputs", weakref.WeakSet())


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return a pipe whose ends the test closes or not."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


@pytest.mark.parametrize("unwritable", BY_NAME.values(), ids=BY_NAME)
def test_a_log_drops_and_counts_what_it_cannot_write(unwritable: Unwritable) -> None:
    with unwritable() as writer:
        output = Output(writer, "stderr", is_log=True)
        stream = io.TextIOWrapper(output, line_buffering=True)
        for _ in range(3):
            print("line", "of a log", file=stream)
        assert output.lost_lines == 3
        assert output.error is not None and output.reason in str(output.error)
        report = f"stderr: lines that were not written: 3 ({output.reason})"
        assert streams.lost_lines() == [report]


@pytest.mark.parametrize("unwritable", [pipe_without_reader, full_device])
def test_a_result_raises_its_first_error_and_takes_nothing_more(unwritable: Unwritable) -> None:
    """Check that Python's flush at its exit finds nothing to write again."""
    with unwritable() as writer:
        output = Output(writer, "stdout", is_log=False)
        stream = io.TextIOWrapper(io.BufferedWriter(output))
        stream.write("rows\n")
        with pytest.raises(OSError) as raised:
            stream.flush()
        assert output.error is raised.value and not output.lost_lines
        stream.write("more\n")
        stream.flush()


def test_a_log_says_what_it_lost_as_soon_as_it_is_read(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    output = Output(writer, "stderr", is_log=True)
    text = b"x" * 99 + b"\n"
    sent = 0
    while not output.lost_lines:
        sent += output.write(text)
    output.write(text)
    read = os.read(reader, 2**20)
    assert output.write(b"after\n") == 6
    later_text = os.read(reader, 2**20).decode()
    whole_lines = read.count(b"\n")
    num_lost = (sent + len(text)) // len(text) - whole_lines
    reason = "its reader does not read"
    start = "" if read.endswith(b"\n") else "\n"  # a torn line is ended first
    assert later_text == f"{start}lines that were not written: {num_lost} ({reason})\nafter\n"
    assert output.lost_lines == 0 and not streams.lost_lines()


def test_a_log_waits_for_a_slow_reader(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_WAIT_S", 1000.0)
    reader, writer = pipe
    content = b"".join(b"%d\n" % number for number in range(100_000))
    output = Output(writer, "stderr", is_log=True)
    thread = threading.Thread(target=output.write, args=[content])
    thread.start()
    read = bytearray()
    while len(read) < len(content):
        read += os.read(reader, 2**12)
    thread.join()
    assert read == content and output.lost_lines == 0


@pytest.mark.parametrize("is_log", [True, False])
def test_who_waits_gives_up_when_the_command_is_to_end(
    is_log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_WAIT_S", 1000.0)
    with unread_pipe() as writer:
        output = Output(writer, "stderr", is_log=is_log)
        errors: list[OSError] = []
        waits = threading.Event()
        real_wait = streams._wait_for_room

        def wait(fd: int, seconds: float) -> bool:
            waits.set()
            return real_wait(fd, seconds)

        monkeypatch.setattr(streams, "_wait_for_room", wait)

        def write() -> None:
            try:
                output.write(b"line\n")
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        assert waits.wait(60)
        stop_waiting()
        thread.join(60)
        assert not thread.is_alive()
        assert output.lost_lines == is_log
        assert [error.errno for error in errors] == ([] if is_log else [errno.ETIMEDOUT])


def test_what_a_signal_handler_writes_never_waits() -> None:
    with unread_pipe() as writer:
        with pytest.raises(BlockingIOError):
            write_some_now(writer, b"SIGTERM: ...\n")
        assert os.get_blocking(writer)  # other processes share it


def test_a_pipe_that_another_process_fills_meanwhile_is_not_waited_for(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that nothing hangs if poll says that there is room, and there is none any more."""
    monkeypatch.setattr(streams, "_wait_for_room", lambda fd, seconds: True)
    with unread_pipe() as writer, pytest.raises(BlockingIOError):
        write_some_now(writer, b"line\n")


def test_a_terminal_that_is_not_read_is_not_waited_for() -> None:
    """Check that a long line is dropped, of which the terminal has room for a part."""
    reader, terminal = os.openpty()
    try:
        output = Output(terminal, "stderr", is_log=True)
        output.write(b"-" * 2**20 + b"\n")
        assert output.lost_lines == 1
        assert isinstance(output.error, TimeoutError)
    finally:
        os.close(reader)
        os.close(terminal)


def test_a_log_file_on_a_full_disk_loses_lines(tmp_path: Path) -> None:
    path = tmp_path / "messages.log"
    with open_log(path) as log, full_disk(8):
        for number in range(4):
            print(f"line {number}", file=log)
        assert path.read_text().startswith("line 0\n")
        assert streams.lost_lines() == [f"{path}: lines that were not written: 3 (File too large)"]
    assert path.stat().st_size <= 8


def test_a_log_file_that_cannot_be_opened_loses_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "none" / "messages.log"
    log = open_log(path)
    print("line", file=log)
    report = f"{path}: lines that were not written: 1 (No such file or directory)"
    assert streams.lost_lines() == [report]
    log.close()


def test_a_lock_that_another_thread_holds_is_none_of_a_forked_process(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    output = Output(writer, "stderr", is_log=True)
    is_held, may_release = threading.Event(), threading.Event()

    def hold() -> None:
        with output._lock:
            is_held.set()
            may_release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(60)
    child = os.fork()
    if child == 0:
        output.write(b"child\n")
        os._exit(0)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.001)
    may_release.set()
    thread.join()
    os.set_blocking(reader, False)
    assert os.read(reader, 100) == b"child\n"
