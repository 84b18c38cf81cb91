"""The shared core of the scoring services, the trainer and the synthesis driver."""

from __future__ import annotations

import logging
import os
import subprocess
from functools import cache
from pathlib import Path

#: Stands here and is not asked of pip, which in an image has not installed this code.
__version__ = "0.2.0"

# peft and sentence-transformers import bitsandbytes, used or not. On a CPU with AVX512-BF16 it says
# that a further package would make its products of 4-bit weights quicker.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)


@cache
def commit() -> str | None:
    """Return the git commit of this code, or None where nothing says it.

    An image knows it by SCOREKIT_COMMIT, a checkout by git, with `-dirty` where files were changed.
    """
    if named := os.environ.get("SCOREKIT_COMMIT"):
        return named
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():  # installed; a folder above it may be another checkout
        return None
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
