"""Runs the demo's retriever, judge, generator and searcher over some of its PDFs, for tests of
full runs.

They are real services on real ports, and deterministic.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.search.run import HERE, open_services
from testing.flaky_server import FlakyServer
from testing.openai_server import FakeOpenAI
from testing.processes import child_environment
from testing.servers import running_app
from tests.kits.forked import Command, modules_forked

#: Of which the demo's searcher answers some: it knows names and numbers, and no measures.
PICKED = ("q001", "q013", "q034", "q079", "q083")


@dataclass(frozen=True, slots=True)
class Stack:
    """The running services.

    settings: flags of `trainer search` that name them.

    policy: flags that name the searcher.
    questions: a file of questions that the index answers.
    """

    folder: Path
    settings: list[str]
    policy: list[str]
    questions: Path

    def begin(self, command_name: str, *flags: str) -> Command:
        """Start a command of `trainer search`."""
        arguments = ("search", command_name, *self.settings, *flags)
        return Command("trainer", *arguments, environment=child_environment())

    def run(self, command_name: str, *flags: str) -> tuple[int | None, str, str]:
        """Run a command of `trainer search`, and return its exit code, output and errors."""
        process = self.begin(command_name, *flags)
        out, errors = process.communicate(timeout=600)
        return process.returncode, out, errors


@contextmanager
def demo_stack(folder: Path, index: Path) -> Iterator[Stack]:
    """Start all services, and end them with the block.

    index: see `make_demo_index`.
    """
    (folder / "index").symlink_to(index)
    files = [HERE / name for name in ("questions.jsonl", "heldout.jsonl")]
    rows = [json.loads(line) for f in files for line in f.read_text(encoding="utf-8").splitlines()]
    rows = [row | {"alternatives": {}} for row in rows if row["id"] in PICKED]
    rows.sort(key=lambda row: row["id"])
    questions = folder / "questions.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    questions.write_text(text, encoding="utf-8")
    with modules_forked(), open_services(folder) as (settings, policy):
        yield Stack(folder, settings, policy, questions)


@contextmanager
def hanging_generator() -> Iterator[tuple[str, ...]]:
    """Start a generator that lists its model and never answers; yield the flags that name it.

    A call waits 0.1 s for its answer. So no call is answered, on however fast a machine.
    """
    server = FlakyServer(
        FakeOpenAI("demo-generator").app,
        lambda path, body: "hang" if path.endswith("completions") else None,
    )
    with running_app(server) as url:
        keys = {"base_url": f"{url}/v1", "deadline_s": 0.1}
        yield tuple(
            flag
            for key, value in keys.items()
            for flag in ("--set", f"answering.generator.{key}={value}")
        )
