"""Run every command of the tutorials in order, as a reader does, and look for what they show.

A block of `bash` is run. A block of `text` below it is a part of what its commands print: each of
its lines must appear, in this order. Numbers may differ, `...` stands for anything, and so do the
lines between. A block of `python` is saved under the name that stands before it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scorekit.processes import end_with_parent
from testing.processes import free_port
from testing.servers import alive, wait_until

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
#: Seconds for the commands of one page. They take one to three minutes on two quiet cores.
PATIENCE_S = 1800
_BLOCK = re.compile(r"^```(bash|text|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^\s*(?:```|~~~)", re.MULTILINE)
_RETRIES = re.compile(r"--retry \d+")
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
    """Return the blocks of a page's commands, in order.

    A page has no other kind of block, which nothing would run, and saves files in `runs` only.
    """
    assert len(_FENCE.findall(text)) == 2 * len(_BLOCK.findall(text)), "a block of another kind"
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
            name = _FILE.findall(text[: match.start()])[-1]
            assert name.startswith("runs/"), f"{name} would be saved in the checkout"
            files[name] = content
    assert not files, "no command follows the last Python file"
    return blocks


def with_free_ports(text: str) -> str:
    """Return a page's text with a free port for each port that it names; no two are equal."""
    ports: dict[str, str] = {}
    for port in sorted(set(_PORT.findall(text))):
        while port not in ports:
            if (free := str(free_port())) not in ports.values():
                ports[port] = free
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

    A command before a pipe counts, too. The output of block k is the file k of the folder. All
    processes of the group end with the script, also if it is terminated. They are told again until
    they have ended: a process that was forked just now may lose a signal. A server has more time to
    start than a reader waits for it: other tests run beside it.
    """
    end = 'code=$?; trap "" TERM; while kill 0; [ "$(jobs -r)" ]; do sleep 0.5; done; exit $code'
    lines = ["set -e -o pipefail", f"trap '{end}' EXIT"]
    for index, block in enumerate(blocks):
        commands = _RETRIES.sub("--retry 300", block.commands)
        lines += [f"exec >'{folder / str(index)}' 2>&1", commands]
    return "\n".join(lines)


def _link_tree(folder: Path) -> None:
    """Let a folder look like the checkout, but for `runs`, with this environment as `.venv`."""
    for path in ROOT.iterdir():
        if path.name not in {".git", ".venv", "runs", "build", "outputs"}:
            (folder / path.name).symlink_to(path)
    if (Path(sys.prefix) / "bin/activate").is_file():
        (folder / ".venv").symlink_to(sys.prefix)
    else:  # the Python of the system, which needs no activation
        (folder / ".venv/bin").mkdir(parents=True)
        (folder / ".venv/bin/activate").touch()


def _run(blocks: list[Block], tree: Path, outputs: Path, env: dict[str, str]) -> int:
    """Run all blocks in a folder and return the exit code; no process is left then."""
    process = subprocess.Popen(
        ["bash", "-c", _script(blocks, outputs)],
        cwd=tree,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent(),
    )
    try:
        return process.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the script has left


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorials use curl")
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
    code = _run(blocks, tree, outputs, os.environ | environment)
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
        "```bash\na --port 8001 &\n```\n```text\nx\n```\nSave `runs/b.py`:\n\n```python\nc\n```\n\n"
        "```bash\npython runs/b.py http://localhost:8001\n```\n"
    )
    first, second = blocks_of(page)
    assert first.commands == "a --port 8001 &\n" and first.expected == ["x"]
    assert second.files == {"runs/b.py": "c\n"} and second.expected == []
    changed = with_free_ports(page)
    assert "8001" not in changed and len(set(re.findall(r"\d{5}", changed))) == 1


@pytest.mark.parametrize(
    "page",
    ["```bash\na\n```\n\n```sh\nb\n```\n", "```bash\na\n```\n  ~~~\n  b\n  ~~~\n"],
)
def test_a_block_that_nothing_would_run_is_refused(page: str) -> None:
    with pytest.raises(AssertionError, match="another kind"):
        blocks_of(page)


def test_a_file_outside_runs_is_refused() -> None:
    with pytest.raises(AssertionError, match="in the checkout"):
        blocks_of("Save `demo/b.py`:\n\n```python\nc\n```\n\n```bash\na\n```\n")


@pytest.mark.parametrize(
    ("commands", "code"),
    [("false\n", 1), ("false | cat\n", 1), ("sh -c 'exit 7' || exit $?\n", 7), ("true\n", 0)],
)
def test_a_script_ends_at_the_first_command_that_fails(
    commands: str, code: int, tmp_path: Path
) -> None:
    blocks = [Block("echo one\nsleep 1000 &\n"), Block(commands), Block("echo three\n")]
    assert _run(blocks, tmp_path, tmp_path, dict(os.environ)) == code
    assert (tmp_path / "0").read_text() == "one\n"
    assert (tmp_path / "2").exists() is (code == 0)


def test_a_terminated_script_leaves_no_process(tmp_path: Path) -> None:
    names = ("background", "foreground")
    commands = "sleep 1000 &\necho $! >background\nsh -c 'echo $$ >foreground; exec sleep 1000'\n"
    process = subprocess.Popen(
        ["bash", "-c", _script([Block(commands)], tmp_path)], cwd=tmp_path, start_new_session=True
    )
    try:
        wait_until(lambda: all((tmp_path / name).is_file() for name in names))
        wait_until(lambda: all((tmp_path / name).read_text().strip() for name in names))
        # A signal that comes before bash waits for the command takes effect after the command.
        wait_until(lambda: "(bash) S" in Path(f"/proc/{process.pid}/stat").read_text())
        process.terminate()
        assert process.wait(PATIENCE_S) != 0
        pids = [int((tmp_path / name).read_text()) for name in names]
        wait_until(lambda: not any(map(alive, pids)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
