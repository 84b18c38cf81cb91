"""Check that a missing server is reported only while a request waits for it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from scorekit.net.retry import Deadline, OutageLog


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_nobody_is_said_to_wait_once_every_request_has_given_up(monkeypatch, caplog, num_waiting):
    monkeypatch.setattr("scorekit.net.retry.TELL_AFTER_S", 0.0)
    caplog.set_level(logging.WARNING, "scorekit.net.retry")

    async def give_up() -> None:
        absence, deadline = OutageLog("the server"), Deadline(600)
        tries = [absence.trying() for _ in range(num_waiting)]
        for request in tries:
            request.__enter__()
        with absence.trying():
            absence.failed(deadline)
        for _ in range(3):  # the timer is due
            await asyncio.sleep(0)
        for request in tries:
            request.__exit__(None, None, None)

    asyncio.run(give_up())
    assert len(caplog.records) == num_waiting
