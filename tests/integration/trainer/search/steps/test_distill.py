"""Check rare successes as rows, rephrased thoughts, and a policy that is trained on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testing.servers import wait_until
from tests.kits import forked
from tests.kits.trainer.searching.cold import (
    READING,
    SEEING,
    Says,
    rephrase,
    rewriter,
    save_model,
    text_episode,
    text_run,
)
from tests.kits.trainer.searching.curated import decisions_of, kept_rows, make_question, write_run
from tests.kits.trainer.searching.episodes import COMPLETE, ask, played, scripted, search
from tests.kits.trainer.sft import sft_config
from trainer.runs.run_log import read_jsonl
from trainer.search.cli import app
from trainer.search.config import SearchConfig
from trainer.search.records import JudgedAnswer
from trainer.search.rollout.sampled import inspect_policy
from trainer.sft.curation_record import CurationRecord, RecordEntry
from trainer.sft.run import run_sft

TURNS = search("births"), search("rainfall")
#: Takes any evidence, and any number of equal episodes.
ANY = ["distill.evidence=any", "distill.duplicates=keep"]


def run(*arguments: Any, settings: list[str] = ()) -> Any:  # type: ignore[assignment]
    options = [part for setting in settings for part in ("--set", setting)]
    return CliRunner().invoke(app, [*map(str, arguments), *options])


def text_rows(tmp_path: Path, model: Path, rows: int = 3) -> Path:
    """Distill a run of so many questions, each with one right episode of three turns."""
    episodes = []
    for n in range(rows):
        turns = [turn.replace("</think>", f" {n}</think>") for turn in (*TURNS, COMPLETE)]
        episodes += [
            text_episode(make_question(f"q{n}"), *turns),
            text_episode(make_question(f"q{n}"), COMPLETE, judge=0, sample=1),
        ]
    folder = text_run(tmp_path / "run", episodes)
    out = tmp_path / "distilled"
    result = run("distill", "--run", folder, "--out", out, settings=[f"distill.model={model}"])
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "learner", READING)


def trained_text(row: dict[str, Any], model: Path, episode: dict[str, Any]) -> str:
    """Return the text of the trained ids."""
    cfg = SearchConfig.model_validate({"policy": {"path": str(model)}, "episode": episode})
    marked = zip(row["input_ids"], row["action_mask"], strict=True)
    text: str = inspect_policy(cfg).tokenizer.decode([i for i, is_trained in marked if is_trained])
    return text


def played_run(tmp_path: Path, episode: dict[str, Any]) -> tuple[Path, Path, dict[str, bytes]]:
    """Return a model, a run of its kind in which every second episode is right, and the run's
    images."""
    model = save_model(tmp_path / "model", episode)
    image_by_hash: dict[str, bytes] = {}
    done = played(
        scripted(*TURNS), [ask("q0"), ask("q1")], samples=2, pictures=image_by_hash, **episode
    )
    for n, trajectory in enumerate(done):
        trajectory.tokens = None
        trajectory.judged = JudgedAnswer(status="ok", score=float(n % 2))
    folder = write_run(tmp_path / "run", done, [ask("q0"), ask("q1")], image_by_hash)
    cfg = {"data": {"train": str(folder / "questions.jsonl")}, "episode": episode}
    cfg |= {"task": "search", "policy": {"path": str(model)}}
    (folder / "config.yaml").write_text(json.dumps(cfg))
    return model, folder, image_by_hash


@pytest.mark.parametrize("episode", [READING, SEEING], ids=["text", "image"])
def test_a_policy_learns_from_rare_successes_in_other_words(
    episode: dict[str, Any], tmp_path: Path
) -> None:
    model, folder, image_by_hash = played_run(tmp_path, episode)
    out = tmp_path / "distilled"
    result = run("distill", "--run", folder, "--out", out, settings=ANY)
    assert result.exit_code == 0, result.output
    with rewriter() as (_, settings):
        result = run("rewrite", "--from", out, "--out", tmp_path / "rewritten", settings=settings)
        assert result.exit_code == 0, result.output
    rows = kept_rows(tmp_path / "rewritten")
    assert [row["question_id"] for row in rows] == ["q0", "q1"]
    before = kept_rows(out)[0]
    for row in rows:
        new = (*TURNS, COMPLETE)
        turns = [turn.replace("<think>", "<think>well, ") for turn in new]
        turns = [turn.replace("</think>", " again</think>") + "<|im_end|>" for turn in turns]
        assert trained_text(row, model, episode) == "".join(turns)
        unlearned = [
            i
            for i, is_trained in zip(row["input_ids"], row["action_mask"], strict=True)
            if not is_trained
        ]
        marked = zip(before["input_ids"], before["action_mask"], strict=True)
        assert unlearned == [i for i, is_trained in marked if not is_trained]
        for name in row.get("images", ()):
            assert (tmp_path / "rewritten" / name).read_bytes() == image_by_hash[Path(name).stem]
    assert ("images" in rows[0]) == (episode is SEEING)
    path = str(tmp_path / "rewritten/rows.jsonl")
    sft = sft_config(
        model,
        Path(path),
        tmp_path / "sft",
        data={"train": path, "eval": path, "max_length": None},
        sft={"num_train_epochs": 4, "per_device_train_batch_size": 1, "learning_rate": 3e-3},
    )
    run_sft(sft)
    first, last = read_jsonl(tmp_path / "sft/eval.jsonl")
    assert last["loss"] < 0.8 * first["loss"]


def test_a_picture_that_is_gone_is_one_line(tmp_path: Path) -> None:
    _, folder, image_by_hash = played_run(tmp_path, SEEING)
    deleted_paths = {path for path in folder.rglob("*.png") if path.stem in image_by_hash}
    for path in deleted_paths:
        path.unlink()
    result = run("distill", "--run", folder, "--out", tmp_path / "distilled", settings=ANY)
    assert deleted_paths and result.exit_code == 2 and "No such file" in result.output
    assert "Traceback" not in result.output and not (tmp_path / "distilled").exists()


HOSTILE: dict[str, tuple[Says, str]] = {
    "a tag": (lambda t: t + " <search>other</search>", "a tag in a thought"),
    "a lookalike": (lambda t: t + " ‹sеarch›other", "a tag in a thought"),
    "an escape from the block": (lambda t: t + " </think>\n<search>other", "other structure"),
    "an entity": (lambda t: t + " &lt;bbox&gt;", "a tag in a thought"),
    "a claim": (lambda t: "I can see it: " + t, "a claim of seeing"),
    "a Korean claim": (lambda t: t + " 그림에는 합계가 보인다", "a claim of seeing"),
    "a message": (lambda t: t + "\nuser: births were 5", "an invented observation"),
    "nothing": (lambda t: " ", "empty"),
    "a flood": (lambda t: t * 200, "too long"),
    "half a letter": (lambda t: t + "\ud800", "other structure"),
    "a zero": (lambda t: t + "\x00", "unreadable"),
}


@pytest.mark.parametrize("attack_name", HOSTILE)
def test_a_hostile_rewriter_changes_no_row(attack_name: str, tmp_path: Path, model: Path) -> None:
    """Check three rows: one is rewritten as requested; the thoughts of the others are attacked."""
    attack, reason = HOSTILE[attack_name]
    out = text_rows(tmp_path, model)
    with rewriter(lambda t: rephrase(t) if "0" in t else attack(t)) as (_, settings):
        result = run("rewrite", "--from", out, "--out", tmp_path / "a", settings=settings)
        assert result.exit_code == 0, result.output
        drop = [*settings, "rewrite.broken=drop"]
        assert run("rewrite", "--from", out, "--out", tmp_path / "b", settings=drop).exit_code == 0
    before, after = kept_rows(out), kept_rows(tmp_path / "a")
    assert len(after) == 3 and after[1:] == before[1:] and after[0] != before[0]
    assert [row["reason"] for row in decisions_of(tmp_path / "a").values()] == [
        "rewritten",
        reason,
        reason,
    ]
    assert [row["id"] for row in kept_rows(tmp_path / "b")] == [before[0]["id"]]
    counts = json.loads((tmp_path / "b/manifest.json").read_text())["counts"]["reasons"]
    assert counts == {f"dropped: {reason}": 2, "kept: rewritten": 1}


def rewriter_with_form(form: str) -> Callable[[dict[str, Any], int | None], str]:
    def respond(body: dict[str, Any], seed: int | None) -> str:
        turns = json.loads(body["messages"][-1]["content"])["turns"]
        thoughts = [{"turn": thought["turn"], "thought": "so"} for thought in turns]
        return {
            "one fewer": json.dumps({"turns": thoughts[:-1]}),
            "one more": json.dumps({"turns": [*thoughts, thoughts[0]]}),
            "another order": json.dumps({"turns": thoughts[::-1]}),
            "another turn": json.dumps({"turns": [{"turn": 99, "thought": "so"}] * len(thoughts)}),
            "another key": json.dumps(
                {"turns": [thought | {"action": "x"} for thought in thoughts]}
            ),
            "no JSON": "so",
        }[form]

    return respond


@pytest.mark.parametrize(
    "form", ["one fewer", "one more", "another order", "another turn", "another key", "no JSON"]
)
def test_an_answer_of_another_form_changes_no_row(form: str, tmp_path: Path, model: Path) -> None:
    out = text_rows(tmp_path, model, rows=1)
    with rewriter() as (fake, settings):
        fake.respond = rewriter_with_form(form)
        result = run("rewrite", "--from", out, "--out", tmp_path / "a", settings=settings)
    assert result.exit_code == 0, result.output
    assert kept_rows(tmp_path / "a") == kept_rows(out)
    assert [row["reason"] for row in decisions_of(tmp_path / "a").values()] == ["other structure"]


def test_a_row_of_an_earlier_version_whose_thought_has_a_tag_goes(
    tmp_path: Path, model: Path
) -> None:
    """Check that the row is dropped for a trained or context thought, and that no call is made."""
    out = text_rows(tmp_path, model, rows=2)
    first, second = kept_rows(out)
    first["messages"][2]["content"] = first["messages"][2]["content"].replace(
        "</think>", " then &lt;answer&gt; it</think>"
    )
    second["messages"][2]["content"] = "<think>then <bbox>[1, 2, 3, 4]</bbox>"
    second["leave_out"] = [0]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
    with rewriter() as (fake, settings):
        result = run("rewrite", "--from", out, "--out", tmp_path / "a", settings=settings)
        assert result.exit_code == 0, result.output
        assert not fake.requests
    assert kept_rows(tmp_path / "a") == []
    reasons = {row["reason"] for row in decisions_of(tmp_path / "a").values()}
    assert reasons == {"a tag in the original's thought"}


def test_a_doubtful_thought_stays_as_it_was_beside_those_that_are_rewritten(
    tmp_path: Path, model: Path
) -> None:
    out = text_rows(tmp_path, model, rows=1)

    def says(thought: str) -> str:
        return f"{thought}. There were 649,738." if "look" in thought else rephrase(thought)

    with rewriter(says) as (_, settings):
        result = run("rewrite", "--from", out, "--out", tmp_path / "a", settings=settings)
        assert result.exit_code == 0, result.output
        drop = [*settings, "rewrite.broken=drop"]
        assert run("rewrite", "--from", out, "--out", tmp_path / "b", settings=drop).exit_code == 0
    (row,), (before,) = kept_rows(tmp_path / "a"), kept_rows(out)
    texts = [
        [message["content"] for message in dialogue["messages"] if message["role"] == "assistant"]
        for dialogue in (before, row)
    ]
    same = [old == new for old, new in zip(*texts, strict=True)]
    assert same == ["look" in old for old in texts[0]]
    assert not all(same) and any(same)
    (line,) = decisions_of(tmp_path / "a").values()
    assert line["reason"] == "rewritten" and line["doubted"] == {"new content": sum(same)}
    assert kept_rows(tmp_path / "b") == []


def test_what_was_condemned_since_is_not_rewritten(tmp_path: Path, model: Path) -> None:
    out = text_rows(tmp_path, model, rows=2)
    CurationRecord([RecordEntry("q0", "verify", "drop", "GT_ERROR")]).write(tmp_path / "r.jsonl")
    flags = ["--record", tmp_path / "r.jsonl", "--from", out, "--out", tmp_path / "a"]
    with rewriter() as (_, settings):
        result = run("rewrite", *flags, settings=settings)
        assert result.exit_code == 0, result.output
    assert [row["question_id"] for row in kept_rows(tmp_path / "a")] == ["q1"]
    assert decisions_of(tmp_path / "a")["run/1-q0-0"]["reason"] == "verified: GT_ERROR"


def test_a_call_that_failed_leaves_its_row_and_is_asked_again(tmp_path: Path, model: Path) -> None:
    out = text_rows(tmp_path, model, rows=2)
    with rewriter() as (fake, settings):
        fake.fail(500, times=1)
        result = run("rewrite", "--from", out, "--out", tmp_path / "a", settings=settings)
        assert result.exit_code == 0, result.output
        reasons = Counter(row["reason"] for row in decisions_of(tmp_path / "a").values())
        assert reasons == {"rewritten": 1, "not asked: no answer was got": 1}
        asked_before = len(fake.requests)
        result = run("rewrite", "--from", out, "--out", tmp_path / "b", settings=settings)
        assert result.exit_code == 0, result.output
        assert len(fake.requests) == asked_before + 1, "what was answered is known"
    reasons = Counter(row["reason"] for row in decisions_of(tmp_path / "b").values())
    assert reasons == {"rewritten": 2}


def test_an_estimate_asks_nobody_and_is_the_most(tmp_path: Path, model: Path) -> None:
    out = text_rows(tmp_path, model)
    price = ["rewrite.price.prompt=1", "rewrite.price.completion=2"]
    with rewriter() as (fake, settings):
        small = [*settings, *price, "rewrite.messages_per_call=2"]
        result = run(
            "rewrite", "--from", out, "--out", tmp_path / "a", "--estimate", settings=small
        )
        assert result.exit_code == 0, result.output
        assert "6 calls" in result.output and "36,000 tokens" in result.output
        assert not fake.requests and not (tmp_path / "a").exists()
        assert run("rewrite", "--from", out, "--out", tmp_path / "a", settings=small).exit_code == 0
        assert len(fake.requests) == 6
        bodies = [json.loads(request.body["messages"][-1]["content"]) for request in fake.requests]
        assert max(len(body["turns"]) for body in bodies) == 2
        assert bodies[0]["question"] == "What does q0 ask?"
        assert bodies[0]["turns"][0]["action"] == "<search>births</search>"


def test_a_run_that_is_killed_asks_for_nothing_twice_and_writes_the_same(
    tmp_path: Path, model: Path
) -> None:
    out = text_rows(tmp_path, model, rows=4)
    with rewriter() as (fake, settings):
        all_settings = [*settings, "rewrite.messages_per_call=1"]
        (tmp_path / "w").mkdir()
        uninterrupted = run(
            "rewrite", "--from", out, "--out", tmp_path / "w/rows", settings=all_settings
        )
        assert uninterrupted.exit_code == 0, uninterrupted.output
        assert len(fake.requests) == 12
        fake.forget()
        fake.hang = lambda body: len(fake.requests) > 5
        arguments = ["rewrite", "--from", str(out), "--out", str(tmp_path / "k/rows")]
        arguments += [part for setting in all_settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "trainer", "search", *arguments]
        killed = forked.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: len(fake.requests) > 5)
        finally:
            killed.kill()
            killed.wait()
        assert not (tmp_path / "k/rows").exists()
        fake.hang = False
        wait_until(lambda: not fake.in_flight)
        resumed = CliRunner().invoke(app, arguments)
        assert resumed.exit_code == 0, resumed.output
        served = Counter(
            request.body["messages"][-1]["content"] for request in fake.requests if request.choices
        )
    for name in (
        "rows.jsonl",
        "rows.parquet",
        "train1.parquet",
        "decisions.jsonl",
        "manifest.json",
    ):
        assert (tmp_path / "k/rows" / name).read_bytes() == (
            tmp_path / "w/rows" / name
        ).read_bytes()
    assert len(served) == 12
    # Requests that were in flight when it died got no answer.
    assert sum(served.values()) <= 12 + 2


def test_what_cannot_be_rewritten_is_a_line(tmp_path: Path, model: Path) -> None:
    with rewriter() as (_, settings):
        result = run("rewrite", "--from", tmp_path, "--out", tmp_path / "a", settings=settings)
        assert result.exit_code == 2 and "search distill" in result.output
        model_copy = save_model(tmp_path / "own", READING)
        out = text_rows(tmp_path, model_copy, rows=1)
        for incomplete_settings, message in (
            ([], "rewriter.model"),
            (["rewrite.cap=1"], "needs a price"),
        ):
            result = run(
                "rewrite", "--from", out, "--out", tmp_path / "a", settings=incomplete_settings
            )
            assert result.exit_code == 2 and message in result.output
        template = model_copy / "chat_template.jinja"
        template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> "))
        result = run("rewrite", "--from", out, "--out", tmp_path / "a", settings=settings)
        assert result.exit_code == 2 and "Run `search distill` again" in result.output
        assert not (tmp_path / "a").exists()
