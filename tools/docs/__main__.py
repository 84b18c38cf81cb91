"""Write the committed reference, and the sources of the documentation site into a folder.

`make docs` builds the site of them.

python -m tools.docs build/docs            # once
python -m tools.docs build/docs --watch    # and again when a page changes: `make docs-serve`
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from scorekit.command import print_line, run_command
from scorekit.errors import UserError
from tools.docs.pages import ROOT, write_committed_pages, write_pages

_POLL_S = 1.0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write the sources of the documentation site.")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--watch", action="store_true", help="write again when a page changes")
    options = parser.parse_args()
    write_committed_pages()
    write_pages(options.folder)
    state = page_times()
    while options.watch:
        time.sleep(_POLL_S)
        if state != (state := page_times()):
            try:
                write_pages(options.folder)
            except UserError as error:  # the page is being written
                print_line(f"error: {error}")
    return 0


def page_times() -> dict[Path, int]:
    """Return when each page of the repository was last changed."""
    patterns = ("docs/**/*", "*.md", "*/README.md", "*/*/README.md")
    pages = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return {path: path.stat().st_mtime_ns for path in pages if path.is_file()}


if __name__ == "__main__":
    run_command(main)
