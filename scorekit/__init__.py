"""The shared core of the scoring services, the trainer and the synthesis driver."""

from __future__ import annotations

import logging
import os
from functools import cache

#: Written here, because an image copies this code and has no installed package to ask.
__version__ = "0.2.0"

# peft and sentence-transformers import bitsandbytes, used or not. On a CPU with AVX512-BF16 it
# warns that a further package would make its products of 4-bit weights faster.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)


@cache
def commit() -> str | None:
    """Return the git commit of this code, or None if it is not known.

    An image has it in SCOREKIT_COMMIT. A checkout asks git; `-dirty` marks changed files.
    """
    import subprocess  # here: until `end_at_once`, which follows this module, Ctrl-C is a traceback
    from pathlib import Path

    if commit_of_image := os.environ.get("SCOREKIT_COMMIT"):
        return commit_of_image
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():  # installed: a parent folder may be another checkout
        return None
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
