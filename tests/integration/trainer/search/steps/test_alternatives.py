"""Check pages with the same fact: their text proposes them, an answer from that page confirms
them."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scorekit.server.app import create_app
from scorekit.server.settings import ServiceSettings
from testing.fake_embedder import FakeEmbedder
from testing.servers import running_app, wait_until
from tests.kits import forked
from tests.kits.trainer.searching.asked_again import Knowing, flags, knowing
from tests.kits.trainer.searching.curated import (
    decisions_of,
    everything,
    kept_rows,
    make_question,
    write_rows,
)
from trainer.search.cli import app

PAGES = {
    "deck_1": "births in Korea 1990 649,738",
    "deck_2": "births in Europe 1990 8,100,000",
    "twin_1": "Europe at a glance births 1990 8,100,000",
    "twin_2": "Europe at a glance deaths 1990 7,300,000",
    "far_1": "rain in July 394 mm",
    "pair_1": "income Norway 40,000",
    "pair_2": "income Sweden 30,000",
    "pair_3": "income Sweden and its neighbours 30,000",
}
BIRTHS = make_question("births", 2, question="How many births?", reference_answer="8,100,000")
PAIR = make_question(
    "pair", 1, 2, deck="pair", question="Both incomes?", reference_answer="A and B"
)
KNOWN = make_question("known", 1, question="What is known?", reference_answer="649,738 births")
BROKEN = make_question(
    "broken", 1, deck="far", question="What rain?", reference_answer="394 mm in July"
)
OPEN = make_question("open", question="And this?", reference_answer="8,100,000")
SAYS = {
    BIRTHS.question: {"deck_2": "8,100,000", "twin_1": "8100000", "twin_2": "7,300,000"},
    PAIR.question: {"pair_1": "A", "pair_2": "B", "pair_3": "B"},
    KNOWN.question: {"": "649,738 births", "deck_1": "649,738 births", "deck_2": "649,738 births"},
    BROKEN.question: {"far_1": "12 mm"},
}


@pytest.fixture(scope="module")
def servers() -> Iterator[Knowing]:
    with knowing(PAGES, SAYS) as running:
        yield running


@pytest.fixture
def services(servers: Knowing) -> Knowing:
    servers.fake.well()
    servers.fake.forget()
    return servers


def command(services: Knowing, tmp_path: Path, out: Path, *more: str) -> list[str]:
    rows = write_rows(tmp_path / "questions.jsonl", [BIRTHS, PAIR, KNOWN, BROKEN, OPEN])
    threshold = {"alternatives__least_overlap": 0.01}
    arguments = flags(out, data__train=rows, **threshold)
    return ["alternatives", *arguments, *services.settings, *more]


def find_alternatives(
    services: Knowing, tmp_path: Path, *more: str
) -> tuple[dict[str, dict[str, Any]], Any]:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, command(services, tmp_path, out, "--overwrite", *more))
    assert result.exit_code == 0, result.output
    return decisions_of(out), result


def test_what_answers_in_the_gold_pages_place_is_found(services: Knowing, tmp_path: Path) -> None:
    rows, _ = find_alternatives(services, tmp_path)
    assert {name: row["reason"] for name, row in rows.items()} == {
        "births": "grown",
        "pair": "grown",
        "known": "known_without",
        "broken": "gold_fails",
        "open": "no_gold",
    }
    assert rows["births"]["confirmed"] == {"deck_2": ["twin_1"]}
    assert rows["pair"]["confirmed"] == {"pair_2": ["pair_3"]}
    grown = {row["id"]: row.get("alternatives") for row in kept_rows(tmp_path / "out")}
    assert grown["births"] == {"deck_2": ["twin_1"]} and grown["open"] is None
    assert len(grown) == 5  # an unconfirmed row is unchanged
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "twin_1" in page and "8100000" in page


def test_without_the_control_what_is_known_anyway_passes(services: Knowing, tmp_path: Path) -> None:
    rows, _ = find_alternatives(services, tmp_path, "--set=alternatives.control=false")
    assert rows["known"]["reason"] == "grown"


def test_nobody_is_asked_about_a_page_in_vain(services: Knowing, tmp_path: Path) -> None:
    """Check that no page is tried if the generator fails with the gold pages or answers without
    them."""
    find_alternatives(services, tmp_path)
    asked_about = [pages for question, pages in services.served() if question == BROKEN.question]
    assert asked_about == [("far_1",)]
    asked_about = [pages for question, pages in services.served() if question == KNOWN.question]
    assert sorted(asked_about) == [(), ("deck_1",)]


def test_a_call_that_fails_leaves_its_row_undecided(services: Knowing, tmp_path: Path) -> None:
    services.fake.fail(500, times=None)
    rows, _ = find_alternatives(services, tmp_path)
    assert {rows[name]["reason"] for name in ("births", "pair", "known")} == {"undecided"}
    assert len(kept_rows(tmp_path / "out")) == 5
    services.fake.well()
    rows, _ = find_alternatives(services, tmp_path)  # a failed call is not cached as an answer
    assert rows["births"]["reason"] == "grown"


def test_an_estimate_asks_nobody_and_is_no_less_than_what_is_asked(
    services: Knowing, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prices = ["--set=answering.money.generator={prompt: 1, completion: 1}"]
    result = CliRunner().invoke(app, command(services, tmp_path, out, "--estimate", *prices))
    assert result.exit_code == 0 and not services.fake.requests and not out.exists()
    max_calls = int(result.output.split("generator ")[1].split(" calls")[0].replace(",", ""))
    assert max_calls == 3 * (1 + 5 + 1) + 1 + 2 * (5 + 1) and "no price" in result.output
    find_alternatives(services, tmp_path)
    assert 0 < services.served().total() <= max_calls


def test_embeddings_propose_what_words_do_not(services: Knowing, tmp_path: Path) -> None:
    """Check embeddings at a threshold where the word overlap proposes no page."""
    service = create_app(FakeEmbedder(16, 512), ServiceSettings(cache_url=None))
    with running_app(service) as url:
        more = [f"--set=alternatives.embeddings_url={url}", "--set=alternatives.least_cosine=-1"]
        rows, _ = find_alternatives(services, tmp_path, "--set=alternatives.least_overlap=1", *more)
    assert rows["births"]["confirmed"] == {"deck_2": ["twin_1"]}
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["embedder"] == "fake" and manifest["index"] == "r1"


def test_a_page_that_the_index_lacks_is_one_line(services: Knowing, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "other.jsonl", [make_question("lost", 9, reference_answer="1")])
    arguments = ["alternatives", *flags(tmp_path / "out", data__train=rows), *services.settings]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "no page 'deck_9'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_killed_command_pays_nothing_twice_and_leaves_the_same_bytes(
    services: Knowing, tmp_path: Path
) -> None:
    fake = services.fake
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()

    def served() -> int:
        return sum(request.status == 200 for request in fake.requests)

    def start(folder: str) -> forked.Popen:
        arguments = command(services, tmp_path, tmp_path / folder / "out")
        return forked.Popen([sys.executable, "-m", "trainer", "search", *arguments])

    assert start("a").wait() == 0
    served_once = services.served()
    assert set(served_once.values()) == {1}
    fake.forget()
    fake.hang = lambda body: served() >= 6
    killed = start("b")
    wait_until(lambda: served() >= 6 and fake.in_flight > 0)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "b/out").exists()
    fake.hang = False
    wait_until(lambda: fake.in_flight == 0)
    assert start("b").wait() == 0
    repeated = services.served() - served_once
    # At most those in flight.
    assert services.served().keys() == served_once.keys() and repeated.total() <= 3
    assert everything(tmp_path / "b/out") == everything(tmp_path / "a/out")
