"""Check for each step that asks: what is asked and spent never exceeds what `--estimate` says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scorekit.paid.account import ApiUsage
from scorekit.paid.store import open_store
from testing.judge import running_judge
from testing.openai_server import FakeOpenAI
from tests.kits.trainer.searching.asked_again import knowing
from tests.kits.trainer.searching.cold import (
    READING,
    rewriter,
    save_model,
    text_episode,
    text_run,
)
from tests.kits.trainer.searching.curated import make_question, searched, write_rows, write_run
from tests.kits.trainer.searching.episodes import COMPLETE, search
from tests.kits.trainer.searching.finished import sha256_of
from tests.kits.trainer.searching.verifying import questions, verifying
from trainer.search.answer.config import SEARCH
from trainer.search.cli import app
from trainer.search.records import GeneratedAnswer
from trainer.search.steps.table import STEPS, step

#: Each token costs 1, so that a sum of money is exact.
_PRICE = "{prompt: 1_000_000, completion: 1_000_000}"
#: The inputs of a step's command, and its chat models by the server's name in the estimate.
Scene = tuple[list[Any], dict[str, FakeOpenAI]]
Opened = Callable[[Path], AbstractContextManager[Scene]]


@contextmanager
def alternatives(folder: Path) -> Iterator[Scene]:
    pages = {"deck_1": "births 649,738", "deck_2": "births 810", "twin_1": "all births 810"}
    births = make_question("births", 2, question="How many births?", reference_answer="810")
    fact = make_question("known", 1, question="What is known?", reference_answer="649,738")
    says = {
        births.question: {"deck_2": "810", "twin_1": "810"},
        fact.question: {"": "649,738", "deck_1": "649,738"},
    }
    rows = write_rows(folder / "questions.jsonl", [births, fact])
    with knowing(pages, says) as servers:
        settings = [f"--set=data.train={rows}", "--set=alternatives.least_overlap=0.01"]
        yield [*servers.settings, *settings], {"generator": servers.fake}


@contextmanager
def hallucinations(folder: Path) -> Iterator[Scene]:
    pages = {name: name for name in ("deck_1", "deck_2", "other_1", "other_2")}
    question = make_question("q", 2, question="How much?", reference_answer="12 %")
    episodes = []
    for sample, page_ids in enumerate([(), ("other_1",), ("deck_1", "other_1", "other_2")]):
        hashes = [sha256_of(page_id) for page_id in page_ids]
        answer = GeneratedAnswer(status="ok", text="12 %", evidence=hashes)
        episode = searched(question, sample, judge=1.0, shown=page_ids)
        episodes.append(episode.model_copy(update={"answer": answer}))
    run = write_run(folder / "run", episodes)
    with knowing(pages, {question.question: {"": "12 %", "other_1": "12 %"}}) as servers:
        yield ["--run", run, *servers.settings], {"generator": servers.fake}


@contextmanager
def verify(folder: Path) -> Iterator[Scene]:
    rows = write_rows(folder / "questions.jsonl", questions())
    with verifying() as servers:
        fakes = {"verifier": servers.verifier, "generator": servers.generator}
        yield [*servers.flags, f"--set=data.train={rows}"], fakes


@contextmanager
def rewrite(folder: Path) -> Iterator[Scene]:
    model = save_model(folder / "model", READING)
    question = make_question("q")
    turns = (search("births"), search("rainfall"), COMPLETE)
    episodes = [
        text_episode(question, *turns),
        text_episode(question, COMPLETE, judge=0, sample=1),
    ]
    run = text_run(folder / "run", episodes)
    distilled = folder / "distilled"
    started("distill", "--run", run, "--out", distilled, f"--set=distill.model={model}")
    with rewriter() as (fake, settings):
        options = [f"--set={setting}" for setting in settings]
        yield ["--from", distilled, *options], {"rewriter": fake}


SCENES: dict[str, Opened] = {
    "alternatives": alternatives,
    "hallucinations": hallucinations,
    "verify": verify,
    "rewrite": rewrite,
}
PRICES = {
    "generator": "answering.money.generator",
    "judge": "answering.money.judge",
    "verifier": "verify.price",
    "rewriter": "rewrite.price",
}


def started(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def estimated(text: str) -> dict[str, ApiUsage]:
    """Return the usage of each server in the text of an estimate."""
    parts = re.findall(r"(\w+) ([\d,]+) calls, ([\d,]+) \+ ([\d,]+) tokens, ([\d.]+)", text)
    estimate = {}
    for server, *numbers in parts:
        calls, prompt, completion = (int(number.replace(",", "")) for number in numbers[:3])
        estimate[server] = ApiUsage(
            calls=calls,
            prompt_tokens=prompt,
            completion_tokens=completion,
            money=float(numbers[3]),
        )
    return estimate


def spent_by(name: str, out: Path) -> dict[str, ApiUsage]:
    """Return what a finished step has been charged, by server."""
    store = open_store(out.parent / "answers.sqlite", SEARCH, f"{name} {out}")
    usages = dict(store.spent)
    asyncio.run(store.close())
    return usages


@contextmanager
def paid_judge() -> Iterator[str]:
    """Yield the URL of a judge that asks a model, which its clients pay for."""
    with FakeOpenAI().running() as url, running_judge(upstream=url) as judge:
        yield judge


@pytest.mark.parametrize("name", [name for name in STEPS if step(name).asks])
def test_no_step_asks_or_spends_more_than_its_estimate(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asks = step(name).asks
    prices = [f"--set={PRICES[server]}={_PRICE}" for server in asks]
    with SCENES[name](tmp_path) as (options, fakes), paid_judge() as judge:
        settings = [*prices, f"--set=answering.judge.url={judge}"]
        command = [name, *options, *settings, "--out", out]
        estimate = estimated(started(*command, "--estimate"))
        assert not any(fake.requests for fake in fakes.values()) and not out.exists()
        started(*command)
        requests = {server: len(fake.requests) for server, fake in fakes.items()}
    spent = spent_by(name, out)
    assert list(estimate) == list(asks) and spent.keys() == set(asks)
    for server, limit in estimate.items():
        usage = spent[server]
        assert 0 < usage.calls <= limit.calls and requests.get(server, 0) <= limit.calls
        assert usage.prompt_tokens <= limit.prompt_tokens
        assert usage.completion_tokens <= limit.completion_tokens
        assert limit.money is not None
        assert usage.prompt_tokens + usage.completion_tokens <= limit.money
