"""A full disk: a file has at most so many bytes, and a longer one fails with EFBIG.

python -m tests.kits.disk.full BYTES MODULE ARGUMENTS    as `python -m MODULE ARGUMENTS`
"""

from __future__ import annotations

import resource
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(max_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes, for the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    limit, module = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    with full_disk(limit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
