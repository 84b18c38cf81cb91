"""Test `scorekit headroom` with a small policy and a service: its files, words, and going on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from testing.servers import running_service
from tests.kits.trainer.rewards import Recorder, switched_service
from tests.kits.trainer.runs import letter_tokenizer, save_policy, write_examples
from trainer.__main__ import app
from trainer.runs.run_log import read_jsonl
from trainer.translation.best_of_n import candidates

SOURCES = [f"{a}{b}{c}" for a in "abc" for b in "def" for c in "gh"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("headroom") / "policy", letter_tokenizer())


@pytest.fixture
def service() -> Iterator[tuple[Recorder, str]]:
    recorder = Recorder("metricx")
    with running_service(recorder) as url:
        recorder.samples.clear()  # those of the warm-up
        yield recorder, url


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "CHUNK", 5)


def config(folder: Path, policy: Path, url: str, ref: str | None = "abc") -> Path:
    values: dict[str, Any] = {
        "data": {"eval": str(write_examples(folder / "e.jsonl", SOURCES, ref=ref))},
        "policy": {"path": str(policy)},
        "generation": {"prompt_template": "source", "max_new_tokens": 6},
        "reward": {"metricx_urls": url, "w_xcomet_span": 0, "deadline_s": 2},
        "misc": {
            "device": "cpu",
            "threads": 1,
            "run_dir": str(folder / "run"),
            "caching": False,  # the recorder sees every request
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def headroom(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["headroom", "--config", str(path), "--samples", "4", *options])


def test_it_writes_a_table_a_page_and_a_last_line(
    tmp_path: Path, policy: Path, service: tuple[Recorder, str]
) -> None:
    recorder, url = service
    path = config(tmp_path, policy, url)
    done = headroom(path, "--reverse", str(policy))
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "run/headroom.json").read_text("utf-8"))
    names = [choice["name"] for choice in result["choices"]]
    assert names == [
        "greedy",
        "mean sample",
        "reward",
        "own log-probability",
        "reverse log-probability",
        "own + reverse",
        "MBR (chrF)",
        "oracle (chrF)",
    ]
    assert all(name in done.output for name in names)
    assert result["sources"] == len(SOURCES) and result["samples"] == 4
    assert done.output.strip().endswith(result["in_words"])
    assert "chrF over greedy" in result["in_words"]
    page = (tmp_path / "run/headroom.html").read_text("utf-8")
    assert "own + reverse" in page and "reverse policy" in page
    by_name = {choice["name"]: choice for choice in result["choices"]}
    assert by_name["reward"]["reward"]["second"] > by_name["mean sample"]["reward"]["second"]
    assert by_name["oracle (chrF)"]["chrf"]["second"] >= by_name["reward"]["chrf"]["second"]
    # Each source's different translations were requested, and no other text.
    requested = [(sample.src, sample.mt) for sample in recorder.samples]
    lines = read_jsonl(tmp_path / "run/headroom/scores.jsonl")
    texts = [(SOURCES[line["source"]], c["text"]) for line in lines for c in line["candidates"]]
    assert set(requested) == set(texts) and len(requested) <= len(texts)

    before = len(recorder.samples)
    second = headroom(path, "--reverse", str(policy))
    assert second.exit_code == 0 and len(recorder.samples) == before
    assert json.loads((tmp_path / "run/headroom.json").read_text("utf-8")) == result

    other = headroom(path, "--set", "generation.temperature=0.5")
    assert other.exit_code == 2
    assert "its samples are of another run (generation.temperature differ)" in other.stderr
    assert other.stderr.count("\n") == 1 and len(recorder.samples) == before
    anew = headroom(path, "--set", "generation.temperature=0.5", "--overwrite")
    assert anew.exit_code == 0 and len(recorder.samples) > before


def test_it_goes_on_where_it_was_killed(
    tmp_path: Path, policy: Path, service: tuple[Recorder, str]
) -> None:
    """Cut the files as a kill does, and expect the same result from the missing part alone."""
    recorder, url = service
    path = config(tmp_path, policy, url)
    assert headroom(path).exit_code == 0
    result = (tmp_path / "run/headroom.json").read_text("utf-8")
    folder = tmp_path / "run/headroom"
    completions, scores = folder / "completions.jsonl", folder / "scores.jsonl"
    all_lines = completions.read_text("utf-8").splitlines(keepends=True)
    scored = scores.read_text("utf-8").splitlines(keepends=True)
    completions.write_text("".join(all_lines[:12]) + all_lines[12][:20], "utf-8")  # two chunks of 5
    scores.write_text("".join(scored[:7]) + scored[7][:20], "utf-8")
    (folder / "own.jsonl").unlink()
    recorder.samples.clear()
    done = headroom(path)
    assert done.exit_code == 0, done.output
    assert completions.read_text("utf-8") == "".join(all_lines)
    assert (tmp_path / "run/headroom.json").read_text("utf-8") == result
    assert {sample.src for sample in recorder.samples} == set(SOURCES[7:])


def test_a_service_that_is_down_ends_it_and_what_is_done_stays(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "_ATTEMPTS", 1)
    with switched_service() as (switch, url):
        path = config(tmp_path, policy, url)
        switch.down = lambda body: any(f'"{source}"' in body for source in SOURCES[10:])
        done = headroom(path)
        assert done.exit_code == 1, done.output
        assert "the same command goes on from there" in done.stderr
        scored = {line["source"] for line in read_jsonl(tmp_path / "run/headroom/scores.jsonl")}
        assert set(range(5)) <= scored <= set(range(10))
        switch.down = lambda body: False
        assert headroom(path).exit_code == 0


def test_without_references_it_tells_of_the_reward_alone(
    tmp_path: Path, policy: Path, service: tuple[Recorder, str]
) -> None:
    done = headroom(config(tmp_path, policy, service[1], ref=None))
    assert done.exit_code == 0, done.output
    assert "There are no references" in done.output.splitlines()[-1] and "BLEU" not in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "data.eval=null"], "data.eval: required"),
        (["--set-name", "dev"], "--set-name: 'dev' is no evaluation set (eval)"),
        (["--set", "generation.temperature=0"], "generation.temperature: 0 is greedy"),
        (["--reverse", "no/such/folder"], "--reverse: "),
        (["--set", "reward.w_metricx=0"], "reward: every weight is 0"),
        (["--set", "task=search"], "only translation policies have a headroom"),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    policy: Path,
    service: tuple[Recorder, str],
) -> None:
    path = config(tmp_path, policy, service[1])
    if options[-1] == "task=search":
        path.write_text("task: sft\n", encoding="utf-8")
        done = CliRunner().invoke(app, ["headroom", "--config", str(path)])
    else:
        done = headroom(path, *options)
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not service[0].samples
