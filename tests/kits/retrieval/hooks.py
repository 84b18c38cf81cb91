"""OCR hooks for tests: what they do depends on the top left pixel of the image."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from scorekit.retrieval.wire import TextBox

#: Names a file with the number of pages that a process may read.
MOST = "SCOREKIT_TEST_PAGES"
_read = [0]
#: The parent at the first page: it may have been killed before a later one.
_parents: list[int] = []


def read(image: Any) -> list[TextBox]:
    """Read an image whose pixel decides: red gives text, green kills the process, blue hangs.

    Another color raises ValueError.
    """
    match image.getpixel((0, 0)):
        case (255, 0, 0):
            box = TextBox(text="read by ocr", x1=1, y1=2, x2=30, y2=12, letter_height=10)
            return [box]
        case (0, 128, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        case (0, 0, 255):
            time.sleep(3600)
    raise ValueError("nothing to be read")


def read_blocking(image: Any) -> list[TextBox]:
    """Return text for as many pages as the file allows.

    The next call waits until its reader is orphaned.
    """
    _parents.append(os.getppid())
    while _read[0] >= int(Path(os.environ[MOST]).read_text()):
        if os.getppid() != _parents[0]:
            os._exit(0)
        time.sleep(0.01)
    _read[0] += 1
    return [TextBox(text="read by ocr", x1=1, y1=2, x2=30, y2=12, letter_height=10)]


def read_shade(image: Any) -> list[TextBox]:
    """Return `shade NUMBER` of the first pixel's red, as text that tells images apart."""
    text = f"shade {image.getpixel((0, 0))[0]}"
    return [TextBox(text=text, x1=1, y1=2, x2=30, y2=12, letter_height=10)]
