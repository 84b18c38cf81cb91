"""Answers that were paid for, under a key of all that they depend on: of this run and of others.

A stage asks here before it asks a service. So a run that is killed, extended, or begun again
under other settings pays only for what nobody has answered yet.

    answers = open_answers("runs/exp001/answers.sqlite")     # one machine, any number of processes
    answers = open_answers("rediss://user@host:6379/0")       # several machines

A value stands behind a checksum of its key and bytes. One that is damaged is no answer: it is
counted, and asked for again.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from scorekit.errors import UserError
from synth.folder.answers.contract import Answers as Answers
from synth.folder.answers.mending import mend as mend
from synth.folder.answers.redis_server import REDIS_PASSWORD, RedisAnswers
from synth.folder.answers.sqlite_file import SqliteAnswers


def open_answers(where: str | Path) -> Answers:
    """A SQLite file (a path), or a Redis or Valkey (redis://, rediss://, unix://). Raises
    UserError."""
    check_place(str(where))
    return RedisAnswers(str(where)) if "://" in str(where) else SqliteAnswers(Path(where))


def check_place(where: str) -> None:
    """Raise UserError for what is no place of answers, and for one with a password in it: it would
    stand in the kept config and in logs."""
    if "://" not in where:
        return
    try:
        parts = urlsplit(where)
        has_password = parts.password is not None or "password" in parse_qs(parts.query)
        known = parts.scheme in ("redis", "rediss", "unix") and (parts.port or True)
    except ValueError:
        has_password, known = False, False
    if has_password:
        raise UserError(f"run.answers: no password in a URL: put it into {REDIS_PASSWORD}")
    if not known:
        raise UserError(
            "run.answers: give a path, redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix://PATH"
        )
