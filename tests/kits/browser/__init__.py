"""Pages in a real browser: headless Chromium, if it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def browse(folder: Path, page: Path, *flags: str) -> str:
    """Open a page.

    folder: for the browser's profile.
    """
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        *flags,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def screenshot(folder: Path, page: Path, width: int, height: int = 900) -> np.ndarray:
    """Return what a window of this size shows: [height, width, 3]."""
    target = folder / "page.png"
    browse(folder, page, f"--window-size={width},{height}", f"--screenshot={target}")
    return np.asarray(Image.open(target).convert("RGB")).astype(int)


def ask_page(folder: Path, page: Path, expression: str, *, width: int = 1000) -> str:
    """Return a JavaScript expression over a page's `document`, in a window of that width.

    The page may forbid scripts, so it is put into a frame.
    """
    frame = folder / "frame.html"
    frame.write_text(
        f'<iframe id="f" src="{page.as_uri()}" width="{width}" height="800" style="border:0" '
        "onload=\"const view = document.getElementById('f').contentDocument; "
        f'document.title = ((document) => {expression})(view)"></iframe>'
    )
    dom = browse(folder, frame, "--allow-file-access-from-files", "--dump-dom")
    match = re.search(r"<title>(.*?)</title>", dom)
    assert match, dom[:300]
    return match[1]
