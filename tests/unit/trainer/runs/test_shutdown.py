"""Check the signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from trainer.runs import shutdown
from trainer.runs.shutdown import Interrupted, ShutdownHandler


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.getsignal(number)  # Python runs the handler before its next call


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_asks_and_the_second_leaves(
    number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with ShutdownHandler() as run:
        run.is_deferring = True
        send(number)
        assert run.signal_number == number
        send(number)  # the same signal, passed on by torchrun
        assert run.signal_number == number
        monkeypatch.setattr(shutdown, "_ECHO_S", 0.0)
        with pytest.raises(Interrupted) as caught:
            send(number)
        assert caught.value.number == number
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err.count("ends with a checkpoint after this update") == 1


def test_before_there_is_something_to_save_the_first_leaves() -> None:
    with ShutdownHandler(quiet=True) as run, pytest.raises(Interrupted):
        send(signal.SIGTERM)
    assert run.signal_number == 0


def test_outside_the_main_thread_nothing_is_changed() -> None:
    def work() -> None:
        with ShutdownHandler():
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers: list[object] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
