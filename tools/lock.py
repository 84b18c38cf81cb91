"""Resolve `.[all,dev]` from scratch with pip and write one `name==version` a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scorekit.command import clean_exit

HEADER = "# Every version of the development environment; made by `make lock`, not by hand.\n"


def main(target: str) -> None:
    """Resolve without installing. A local build tag (+cpu) is dropped: it is a matter of place."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        "-",
        "-e",
        ".[all,dev]",
    ]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    pins = {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"].split("+")[
            0
        ]
        for item in report["install"]
    }
    pins.pop("scorekit")
    # CUDA's own packages follow from torch's build, which is chosen at set-up.
    lines = [
        f"{n}=={v}\n" for n, v in sorted(pins.items()) if not n.startswith(("nvidia-", "cuda-"))
    ]
    Path(target).write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{target}: {len(lines)} pins")


if __name__ == "__main__":
    with clean_exit():
        main(sys.argv[1])
