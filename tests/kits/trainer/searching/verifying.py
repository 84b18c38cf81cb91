"""A generator, a verifier, a judge by rules and pages, on real ports, for tests of `search verify`.

The answers of the two models are a function of the question: `SAID` has (verifier, generator) by
the question's id, each one text, or one text for each sample. A "?" before a verifier's text: it is
not sure. A "!": it answers with the rest unchanged, which has no valid form.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.judge import running_judge
from testing.openai_server import FakeOpenAI
from testing.servers import running_app
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.searching.curated import make_question
from trainer.search.records import Question

SAID: dict[str, tuple[str | Sequence[str], str | Sequence[str]]] = {
    "ok": ("12 euros", "12 euros"),
    "gt": ("15", "15"),
    "gen": ("12", ("12", "15", "16")),
    "both": ("15", "16"),
    "unsure": ("?15", "12"),
    "differs": (("12", "15", "16"), "12"),
    "outvoted": ("15", "12"),
    "form": ("12", "12 dollars"),  # the reference is 12 euros
    "hostile": ("!class: GT_ERROR", "12"),
    "one-hostile": (("12", '!{"sure": true}', "12"), "12"),
    "silent": ("12", ""),
}
CLASSES = {
    "ok": "OK",
    "gt": "GT_ERROR",
    "gen": "GEN_ERROR",
    "both": "BOTH_WRONG",
    "unsure": "UNCERTAIN",
    "differs": "UNCERTAIN",
    "outvoted": "OK",
    "form": "FORMAT_DIFF",
    "hostile": None,
    "one-hostile": "OK",
    "silent": None,
}


def questions() -> list[Question]:
    """Return one question of each kind, on three pages."""
    return [
        make_question(
            name, number % 3 + 1, question=f"What is {name}, exactly?", reference_answer=euros
        )
        for number, (name, euros) in enumerate((quote, "12 euros") for quote in SAID)
    ]


@dataclass(frozen=True, slots=True)
class VerifyServers:
    """The running servers.

    flags: options of the command line that name them.
    """

    verifier: FakeOpenAI
    generator: FakeOpenAI
    pages: StandInRetriever
    flags: list[str]

    def forget(self) -> None:
        """Clear the recorded requests."""
        for fake in (self.verifier, self.generator):
            fake.well()
            fake.forget()

    def counted(self, fake: FakeOpenAI) -> Counter[tuple[str, int]]:
        """Return (question, sample) -> how often it was served."""
        return Counter(
            (_question(request.body), request.body.get("seed") or 0)
            for request in fake.requests
            if request.status == 200
        )


@contextmanager
def verifying() -> Iterator[VerifyServers]:
    """Start everything, and end it with the block."""
    verifier = FakeOpenAI("verifier", respond=_verifier)
    generator = FakeOpenAI("generator", respond=_generator)
    pages = StandInRetriever({f"deck_{number}": "" for number in (1, 2, 3)})
    with (
        verifier.running() as verifier_url,
        generator.running() as two,
        running_judge() as judge,
        running_app(pages.app) as retriever,
    ):
        values = {
            "verify.prompts": "all",
            "verify.verifier.base_url": verifier_url,
            "verify.verifier.model": "verifier",
            "verify.verifier.max_attempts": 1,
            "verify.verifier.max_requests": 2,
            "answering.generator.base_url": two,
            "answering.generator.model": "generator",
            "answering.generator.max_attempts": 1,
            "answering.generator.max_requests": 2,
            "answering.judge.url": judge,
            "retriever.url": retriever,
        }
        flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        yield VerifyServers(verifier, generator, pages, flags)


def write_config(path: Path, **sections: Any) -> Path:
    """Write a config as a file."""
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def _question(body: dict[str, Any]) -> str:
    text: str = body["messages"][1]["content"][0]["text"]
    return text.removeprefix("What is ").removesuffix(", exactly?")


def _answer_for_seed(answers: str | Sequence[str], body: dict[str, Any]) -> str:
    return answers if isinstance(answers, str) else answers[body.get("seed") or 0]


def _generator(body: dict[str, Any], seed: int | None) -> str:
    return _answer_for_seed(SAID[_question(body)][1], body)


def _verifier(body: dict[str, Any], seed: int | None) -> str:
    scripted = _answer_for_seed(SAID[_question(body)][0], body)
    if scripted.startswith("!"):
        return scripted[1:]
    sure, answer = not scripted.startswith("?"), scripted.removeprefix("?")
    quotes = [{"picture": 1, "quote": f"=sum of {answer}"}]
    return json.dumps({"sure": sure, "answer": answer, "evidence": quotes})
