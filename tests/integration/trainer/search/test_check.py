"""Test `python -m trainer check` for a search run: it loads no weights and makes no paid call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scorekit.config import load_config
from scorekit.paid.store import open_store
from scorekit.report.findings import Findings
from scorekit.retrieval.wire import IndexInfo
from testing.servers import free_port, running_app
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.search_answers import serving
from tests.kits.trainer.searching.policies import TINY_SIGHT, save_tiny
from trainer.__main__ import app
from trainer.search.answer.config import SEARCH
from trainer.search.check import check_run
from trainer.search.config import SearchConfig
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

PAGES = {f"{deck}_{n}": f"page {n} of {deck}" for deck in ("a", "b") for n in (1, 2, 3)}


class SearchServers:
    """A retriever, a generator and a judge on real ports, and the settings that name them."""

    def __init__(self, pages: StandInRetriever, paid: Any, settings: list[str]) -> None:
        self.pages, self.paid, self.settings = pages, paid, settings


@pytest.fixture(scope="module")
def services() -> Iterator[SearchServers]:
    pages = StandInRetriever(PAGES)
    with running_app(pages.app) as url, serving() as (paid, config_by_service):
        settings = [
            f"retriever.url={url}",
            f"answering.generator={json.dumps(config_by_service['generator'])}",
            f"answering.judge={json.dumps(config_by_service['judge'])}",
        ]
        yield SearchServers(pages, paid, settings)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("policy"))


def row(number: int, deck: str, page: int, **more: Any) -> dict[str, Any]:
    fields = {"id": f"q{number}", "question": f"What is {number}?", "reference_answer": "x"}
    return fields | {"file_name": f"{deck}.pdf", "reference_page": page} | more


def write_row_file(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row_fields) + "\n" for row_fields in rows))
    return path


@pytest.fixture
def settings(tmp_path: Path, services: SearchServers, policy: Path) -> list[str]:
    train = write_row_file(tmp_path / "train.jsonl", *(row(n, "a", 1 + n % 3) for n in range(8)))
    held_out = write_row_file(tmp_path / "eval.jsonl", *(row(n, "b", 1) for n in range(8, 11)))
    return [
        *services.settings,
        f"policy.path={policy}",
        f"data.train={train}",
        f"data.eval={held_out}",
        f"episode.sight={json.dumps(TINY_SIGHT)}",
        "generation.max_new_tokens=32",
        "rollout.n_agent=4",
        "rl.batch_size=2",
        "rl.epochs=1",
        "misc.device=cpu",
        f"misc.run_dir={tmp_path}/out",
    ]


def check(settings: list[str], *overrides: str) -> Findings:
    return check_run(load_config(SearchConfig, None, [*settings, *overrides]))


def message_of(findings: Findings, name: str) -> str:
    (message,) = [check.result for check in findings.checks if check.name == name]
    return message


def test_a_run_that_can_start_is_told_what_it_has(
    settings: list[str], services: SearchServers, tmp_path: Path
) -> None:
    services.paid.forget()
    findings = check(settings)
    assert not findings.failed, findings.failed
    assert (
        message_of(findings, "data.train") == "8 questions on 1 documents; the first: 'What is 0?'"
    )
    assert "; importance correction: " in message_of(findings, "config")
    assert message_of(findings, "updates").startswith("4 of 2 questions x 4 episodes, 1 steps")
    assert "6 pages of 1 documents, bm25, revision r1" in message_of(findings, "retriever.url")
    assert message_of(findings, "gold pages of data.eval") == "the index has those of 3 questions"
    assert message_of(findings, "overlap").startswith("no question of data.eval")
    assert message_of(findings, "policy.path").startswith("Qwen2_5_VLForConditionalGeneration, ")
    assert "is shown pictures of 1,024 to 4,096 pixels" in message_of(findings, "policy.tokenizer")
    assert message_of(findings, "chat template").startswith("turns join, and end at <|im_end|>")
    assert message_of(findings, "generator").endswith(
        "/v1: generator, 1024 tokens an answer; up to 8 originals of up to 1,572,864 pixels"
    )
    assert ": rules@" in message_of(findings, "judge")
    # 4 x 2 x 4 of training, and 3 questions before and after
    assert "32 episodes of training, 6 of 2 evaluations" in message_of(findings, "money")
    assert "at most 38 calls" in message_of(findings, "money") and "no price" in message_of(
        findings, "money"
    )
    assert dict(findings.memory)["all"] > 0
    assert not services.paid.requests, "nothing that is paid for was asked"
    assert not any((tmp_path / "out").iterdir()), "nothing was written"


def test_the_most_ids_of_an_episode_are_those_of_its_parts(settings: list[str]) -> None:
    message = message_of(check(settings), "episodes")
    max_tokens, prompt_tokens, turns, turn_tokens = (
        int(message.split(end)[0].split()[-1].replace(",", ""))
        for end in (" ids at most", " of the prompt", " x ", " of observations")
    )
    assert turns == 7 and max_tokens == prompt_tokens + 2048 + turns * turn_tokens
    assert turn_tokens > 64  # patches of the largest image, and the text about it
    short = message_of(check(settings, "episode.context_length=3000"), "episodes")
    assert "its context is 3,000" in short
    text = message_of(check(settings, "episode.observation=text"), "episodes")
    assert "the longest of 4 gold pages" in text


def test_every_fault_is_named_not_only_the_first(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: search\n")
    (tmp_path / "file").write_text("")
    nobody = f"http://127.0.0.1:{free_port()}"
    mistakes = [
        f"retriever.url={nobody}",
        "retriever.deadline_s=1",
        f"answering.generator.base_url={nobody}/v1",
        f"answering.judge.url={nobody}",
        "answering.judge.deadline_s=1",
        "data.eval=gone.jsonl",
        "rollout.n_agent=1",
        "generation.engine=vllm",
        f"generation.vllm.url={nobody}",
        "misc.trackers=[smoke]",
        f"misc.run_dir={tmp_path}/file/x",
        "episode.sight.factor=28",
        "episode.sight.max_pixels=401408",
    ]
    sets = [part for value in [*settings, *mistakes] for part in ("--set", value)]
    result = CliRunner().invoke(app, ["check", "--config", str(tmp_path / "config.yaml"), *sets])
    assert result.exit_code == 2, result.output
    errors = [line.removeprefix("error: ") for line in result.stderr.splitlines()]
    assert [line.split(":")[0] for line in errors if line.count(":") > 1] == [
        "data.eval",
        "config",
        "retriever.url",
        "policy.tokenizer",
        "generator",
        "judge",
        "vLLM",
        "misc.trackers",
        "misc.run_dir",
    ]


def test_pages_that_the_index_lacks_are_a_fault_or_left_out(
    settings: list[str], tmp_path: Path
) -> None:
    train = write_row_file(tmp_path / "t.jsonl", row(1, "a", 1), row(2, "a", 2), row(3, "c", 9))
    findings = check(settings, f"data.train={train}")
    assert [failed.name for failed in findings.failed] == ["gold pages of data.train"]
    assert "q3: the index has no page 'c_9'" in findings.failed[0].result
    leave = check(settings, f"data.train={train}", "data.missing_gold=leave_out")
    assert not leave.failed
    message = message_of(leave, "gold pages of data.train")
    assert message.startswith(
        "the index has those of 2 questions; 1 questions name others: left out"
    )


def test_what_is_held_out_and_learned_from_is_told(settings: list[str], tmp_path: Path) -> None:
    held_out = write_row_file(tmp_path / "e.jsonl", row(0, "a", 2), row(20, "b", 1))
    findings = check(settings, f"data.eval={held_out}")
    assert not findings.failed
    assert "1 of 2 questions stand in data.train, too (first q0)" in message_of(findings, "overlap")
    assert "are on documents of data.train (first 'a')" in message_of(findings, "overlap")


def test_long_questions_are_counted_and_may_be_a_fault(settings: list[str], tmp_path: Path) -> None:
    long = row(9, "a", 1, question="word " * 40)
    train = write_row_file(tmp_path / "t.jsonl", row(1, "a", 1), row(2, "a", 2), long)
    limit = [f"data.train={train}", "data.max_prompt_length=64"]
    findings = check(settings, *limit)
    assert not findings.failed
    assert "1 of 3 questions are too long" in message_of(findings, "prompts of data.train")
    refused = check(settings, *limit, "data.overlong_prompts=refuse")
    assert [failed.name for failed in refused.failed] == ["prompts of data.train"]


def test_a_run_that_goes_on_keeps_index_and_judge(
    settings: list[str], tmp_path: Path, services: SearchServers
) -> None:
    """Check that index and judge must be those recorded in the run's folder."""
    folder = tmp_path / "out"
    record_first_judge("teacher@1", folder, TrajectoryStore(folder / FOLDER, "out-1").run)
    index = IndexInfo(id="demo", revision="r0", pages=6, documents=1, backend="bm25")
    (folder / "index.json").write_text(index.model_dump_json())
    findings = check(settings)
    names = [failed.name for failed in findings.failed]
    assert "retriever.url" in names and "judge" in names
    assert "revision r1; the run started with 'demo', revision r0" in message_of(
        findings, "retriever.url"
    )
    assert "started with teacher@1" in message_of(findings, "judge")


def record_first_judge(judge: str, folder: Path, run: str) -> None:
    """Record a judge in a run's file of paid answers."""

    async def begin() -> None:
        store = open_store(folder / "answers.sqlite", SEARCH, run)
        await store.first_judge(judge)
        await store.close()

    asyncio.run(begin())


def test_without_a_judge_in_the_reward_nobody_is_looked_for(settings: list[str]) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    away = [f"answering.generator.base_url={nobody}/v1", f"answering.judge.url={nobody}"]
    findings = check(settings, "reward.preset=phase1", *away)
    assert not findings.failed
    assert {"generator", "judge"}.isdisjoint(check.name for check in findings.checks)
    assert message_of(findings, "money").startswith("no paid calls")


def test_money_is_told_where_prices_are(settings: list[str]) -> None:
    price = {"prompt": 1.0, "completion": 10.0}
    money = {"generator": price, "judge": price, "cap": 0.05}
    message = message_of(check(settings, f"answering.money={json.dumps(money)}"), "money")
    assert (
        "in all: at most" in message and "the cap pays for" in message and "no price" not in message
    )
