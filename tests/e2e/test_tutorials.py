"""Run every command of the tutorials in order, as a reader does, and look for what they show.

A block of `bash` is run. A block of `text` below it is a part of what its commands print: each of
its lines must appear, in this order. Numbers may differ, `...` stands for anything, and so do the
lines between. A block of `python` is saved under the name that stands before it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scorekit.processes import end_with_parent
from testing.processes import free_port

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
#: Seconds for the commands of one page. They take one to three minutes on two quiet cores.
PATIENCE_S = 1800
_BLOCK = re.compile(r"^```(bash|text|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PORT = re.compile(r"(?<=:)8\d{3}\b|(?<=--port )8\d{3}\b")
_FILE = re.compile(r"`([\w./-]+\.py)`")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_FRAMES = re.compile(r"[\s\u2500-\u257f]+")


@dataclass
class Block:
    """Holds commands, the Python file that is saved before them, and the lines that they show."""

    commands: str
    files: dict[str, str] = field(default_factory=dict)
    expected: list[str] = field(default_factory=list)


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page's commands, in order."""
    blocks: list[Block] = []
    files: dict[str, str] = {}
    for match in _BLOCK.finditer(text):
        kind, content = match.groups()
        if kind == "bash":
            blocks.append(Block(content, files))
            files = {}
        elif kind == "text":
            blocks[-1].expected += content.splitlines()
        else:
            files[_FILE.findall(text[: match.start()])[-1]] = content
    assert not files, "no command follows the last Python file"
    return blocks


def with_free_ports(text: str) -> str:
    """Return a page's text with a free port for each port that it names."""
    ports = {port: str(free_port()) for port in sorted(set(_PORT.findall(text)))}
    return _PORT.sub(lambda match: ports[match[0]], text)


def missing_line(expected: list[str], output: str) -> str | None:
    """Return the first expected line that is not in the output behind the lines before it."""
    flat, position = _flat(output), 0
    for line in expected:
        parts = [re.escape(_flat(part)) for part in line.split("...")]
        match = re.compile(".*?".join(parts)).search(flat, position)
        if match is None:
            return line
        position = match.end()
    return None


def _flat(text: str) -> str:
    """Return a text with # for each number, and without frames and repeated spaces."""
    return _FRAMES.sub(" ", _NUMBER.sub("#", text)).strip()


def _numbered(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: int(path.name))


def _script(blocks: list[Block], folder: Path) -> str:
    """Return a script of all blocks that ends at the first command that fails.

    The output of block k is the file k of the folder. Servers in the background end with it.
    """
    end = "code=$?; kill $(jobs -p) 2>/dev/null || true; wait; exit $code"
    lines = ["set -e", f"trap '{end}' EXIT"]
    for index, block in enumerate(blocks):
        lines += [f"exec >'{folder / str(index)}' 2>&1", block.commands]
    return "\n".join(lines)


def _link_tree(folder: Path) -> None:
    """Let a folder look like the checkout, but for `runs`."""
    for path in ROOT.iterdir():
        if path.name not in {".git", "runs", "build"}:
            (folder / path.name).symlink_to(path)


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_show_what_its_page_says(page: Path, tmp_path: Path) -> None:
    tree, outputs = tmp_path / "scorekit", tmp_path / "outputs"
    tree.mkdir()
    outputs.mkdir()
    _link_tree(tree)
    blocks = blocks_of(with_free_ports(page.read_text(encoding="utf-8")))
    for name, content in [item for block in blocks for item in block.files.items()]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content, encoding="utf-8")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(tree),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    process = subprocess.Popen(
        ["bash", "-c", _script(blocks, outputs)],
        cwd=tree,
        env=os.environ | environment,
        start_new_session=True,
        preexec_fn=end_with_parent(),
    )
    try:
        code = process.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the script has left
    written = [path.read_text(encoding="utf-8", errors="replace") for path in _numbered(outputs)]
    last = blocks[len(written) - 1].commands
    assert code == 0, f"exit code {code} in:\n{last}\nwhich printed:\n{written[-1][-4000:]}"
    for block, output in zip(blocks, written, strict=True):
        line = missing_line(block.expected, output)
        assert line is None, f"not shown: {line}\nby:\n{block.commands}\nwhich printed:\n{output}"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_says_what_its_commands_show_and_where_to_go_next(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) >= 3 and sum(bool(block.expected) for block in blocks) >= 3
    assert "## What you have seen" in text and "## Where to go next" in text


def test_a_shown_line_may_differ_in_numbers_and_frames_but_not_in_words() -> None:
    output = "loading\n│ MetricX score │ 19.8 │ 16.9 │\nreport  runs/x/report.html\n"
    assert missing_line(["MetricX score 21 3", "report ... report.html"], output) is None
    assert missing_line(["report", "MetricX"], output) == "MetricX"  # the other order
    assert missing_line(["MetricY"], output) == "MetricY"


def test_a_page_becomes_blocks_with_files_and_shown_lines() -> None:
    page = (
        "```bash\na --port 8001 &\n```\n```text\nx\n```\nSave `b.py`:\n\n```python\nc\n```\n\n"
        "```bash\npython b.py http://localhost:8001\n```\n"
    )
    first, second = blocks_of(page)
    assert first.commands == "a --port 8001 &\n" and first.expected == ["x"]
    assert second.files == {"b.py": "c\n"} and second.expected == []
    changed = with_free_ports(page)
    assert "8001" not in changed and len(set(re.findall(r"\d{5}", changed))) == 1
