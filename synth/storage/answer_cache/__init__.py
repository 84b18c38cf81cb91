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

from synth.storage.answer_cache.redis_server import RedisAnswers
from synth.storage.answer_cache.repair import repair_database as repair_database
from synth.storage.answer_cache.sqlite_file import SqliteAnswers

#: damaged: number of broken values read since it was opened. Once `put` returns, kill -9 does not
#: lose the answers.
AnswerCache = SqliteAnswers | RedisAnswers


def open_answers(location: str | Path) -> AnswerCache:
    """Open a SQLite file (a path), or a Redis or Valkey (redis://, rediss://, unix://).

    Raises UserError."""
    return RedisAnswers(str(location)) if "://" in str(location) else SqliteAnswers(Path(location))
