"""A cache of paid answers, under a key of everything that they depend on, shared by runs.

A stage looks here before it calls a service. So a run that is killed, extended, or started with
other settings pays only for new answers.

    answers = open_answers("runs/exp001/answers.sqlite")     # one machine, any number of processes
    answers = open_answers("rediss://user@host:6379/0")       # several machines

A value is stored with a checksum of its key and bytes. A damaged value is counted, and its answer
requested again.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from scorekit.errors import UserError
from synth.storage.answer_cache.base import AnswerCache as AnswerCache
from synth.storage.answer_cache.redis_server import REDIS_PASSWORD, RedisAnswers
from synth.storage.answer_cache.repair import repair_database as repair_database
from synth.storage.answer_cache.sqlite_file import SqliteAnswers


def open_answers(location: str | Path) -> AnswerCache:
    """Open a SQLite file (a path), or a Redis or Valkey (redis://, rediss://, unix://).

    Raises UserError."""
    check_place(str(location))
    return RedisAnswers(str(location)) if "://" in str(location) else SqliteAnswers(Path(location))


def check_place(location: str) -> None:
    """Raise UserError for an invalid location, and for a URL with a password.

    The password would be in the saved config and in logs."""
    if "://" not in location:
        return
    try:
        parts = urlsplit(location)
        has_password = parts.password is not None or "password" in parse_qs(parts.query)
        is_supported = parts.scheme in ("redis", "rediss", "unix") and (parts.port or True)
    except ValueError:
        has_password, is_supported = False, False
    if has_password:
        raise UserError(
            f"run.answers: a URL must not contain a password. Put it into {REDIS_PASSWORD}"
        )
    if not is_supported:
        raise UserError(
            "run.answers: give a path, redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix://PATH"
        )
