"""Open a store of paid answers: a SQLite file for one machine, or a Redis for several.

    store = open_store("runs/exp001/answers.sqlite", SEARCH, run="exp001")
    store = open_store("rediss://user@host:6379/0", SEARCH, run="exp001")

What a store does is in answers.py.
"""

from __future__ import annotations

from pathlib import Path

from scorekit.paid.account import ApiUsage
from scorekit.paid.answers import Space, Store
from scorekit.paid.redis import RedisStore, judge_in_redis, spent_in_redis
from scorekit.paid.sqlite import SqliteStore, judge_in_file, spent_in_file


def open_store(location: str | Path, space: Space, run: str | None = None, rank: int = 0) -> Store:
    """Open a SQLite file (a path), or a Redis or Valkey (redis://, rediss://, unix://).

    run: name of the run whose money is counted; None: no money is counted.
    rank: of this process among those of the run; the first one has to open the store before the
    others.
    Raises UserError, also if another process of the run has the store open.
    """
    if "://" in str(location):
        return RedisStore(str(location), space, run, rank)
    return SqliteStore(Path(location), space, run, rank)


def spent_in(location: str | Path, space: Space) -> ApiUsage:
    """Return the usage of all runs in a store; zero if there is no file yet.

    Raises UserError for another kind of file, a damaged one, or a Redis that is down.
    """
    if "://" in str(location):
        return spent_in_redis(str(location), space)
    return spent_in_file(Path(location))


def judge_of(location: str | Path, space: Space, run: str) -> str | None:
    """Return the first judge of a run (`Store.first_judge`), or None. Only reads the store.

    Raises UserError if it cannot be read.
    """
    if "://" in str(location):
        return judge_in_redis(str(location), space, run)
    return judge_in_file(Path(location), space, run)
