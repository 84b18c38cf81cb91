"""Check which episodes become rows and the recorded decision about each."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from scorekit.files import temporary_of
from tests.kits.trainer.searching.cold import READING, save_model, text_episode, text_run
from tests.kits.trainer.searching.curated import (
    decisions_of,
    everything,
    kept_rows,
    make_question,
    outcome_of,
)
from tests.kits.trainer.searching.episodes import COMPLETE, crop, search
from tests.kits.trainer.searching.finished import page, sha256_of
from trainer.search.cli import app
from trainer.search.config import SearchConfig
from trainer.search.records import GeneratedAnswer, Trajectory
from trainer.search.rollout.sampled import inspect_policy
from trainer.search.steps.config import CurationConfig
from trainer.sft.curation_record import CurationRecord, RecordEntry

SUCCESS_ONLY = Path(__file__).parents[5] / "configs/search/distill_success_only.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "learner", READING)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["distill", *map(str, arguments)])


def distilled(tmp_path: Path, model: Path, episodes: list[Trajectory], *more: Any) -> Path:
    """Run the command on one run and return its output folder."""
    folder = text_run(tmp_path / "run", episodes)
    out = tmp_path / "out"
    done = run("--run", folder, "--out", out, "--set", f"distill.model={model}", *more)
    assert done.exit_code == 0, done.output
    return out


def group(id: str, right: int, wrong: int, **more: Any) -> list[Trajectory]:
    """Return right and wrong episodes of one question."""
    question = make_question(id)
    turns = search("births"), search("rainfall"), COMPLETE
    scores = [1.0] * right + [0.0] * wrong
    return [text_episode(question, *turns, sample=n, judge=s, **more) for n, s in enumerate(scores)]


def reasons(out: Path) -> dict[str, str]:
    return {id: row["reason"] for id, row in decisions_of(out).items()}


def test_prompts_that_mostly_fail_give_their_right_episodes(tmp_path: Path, model: Path) -> None:
    half = group("half", 2, 2)
    half[1].judged = None  # never scored: neither right nor wrong
    unseen = [text_episode(make_question("unscored"), search("a"), COMPLETE, judge=None)]
    episodes = [*half, *group("never", 0, 3), *group("often", 2, 1), *group("all", 2, 0), *unseen]
    out = distilled(tmp_path, model, episodes)
    assert reasons(out) == {
        "run/1-half-0": "rare success",
        "run/1-half-1": "not judged",
        "run/1-half-2": "not right",
        "run/1-half-3": "not right",
        "never": "none is right",
        "often": "more than 0.5 of them are right",
        "all": "more than 0.5 of them are right",
        "unscored": "none is judged",
    }
    assert decisions_of(out)["run/1-half-0"]["rate"] == pytest.approx(1 / 3)
    assert decisions_of(out)["often"]["episodes"] == [f"run/1-often-{n}" for n in range(3)]
    assert [row["id"] for row in kept_rows(out)] == ["run/1-half-0"]


def test_of_many_the_best_are_taken_and_the_next_where_one_is_no_row(
    tmp_path: Path, model: Path
) -> None:
    question, end = make_question("q"), COMPLETE
    short, long = (search("births"), end), (search("births"), crop(1, 2, 3, 4), end)
    two = search("births"), search("rainfall"), end
    special = f"<think>{'births ' * 900}</think>\n<search>rainfall</search>"
    episodes = [
        text_episode(question, *two, sample=0, ndcg=0.5),
        text_episode(question, *long, sample=1, ndcg=0.5),
        text_episode(question, *short, sample=2, ndcg=0.5),
        text_episode(question, *two, sample=3, ndcg=1.0),
        text_episode(question, special, end, sample=4, ndcg=1.0),
        text_episode(question, *short, sample=5, ndcg=None),
        text_episode(question, search("a"), search("a"), end, sample=6, ndcg=1.0),
        text_episode(question, *short, sample=7, ndcg=1.0, end="declined"),
        *[text_episode(question, *two, sample=n, judge=0.9) for n in range(8, 20)],
    ]
    flags = ["--set", "distill.per_prompt=3", "--set", "distill.duplicates=keep"]
    out = distilled(tmp_path, model, episodes, *flags)
    assert [row["id"] for row in kept_rows(out)] == ["run/1-q-3", "run/1-q-2", "run/1-q-1"]
    reason_by_id = reasons(out)
    assert reason_by_id["run/1-q-0"] == reason_by_id["run/1-q-5"] == "behind the best 3"
    assert reason_by_id["run/1-q-4"] == "more than the 4096 ids that the model reads"
    assert reason_by_id["run/1-q-6"] == "a query repeated"
    assert reason_by_id["run/1-q-7"] == "ended as declined"
    assert reason_by_id["run/1-q-8"] == "not right"
    assert len(reason_by_id) == 20


def test_success_alone_is_a_rule_of_its_own(tmp_path: Path, model: Path) -> None:
    """Check any success rate, at most eight successes, gold evidence and fewest searches first."""
    question = make_question("q")
    short_turns, long_turns = (
        (search("births"), COMPLETE),
        (search("births"), search("rainfall"), COMPLETE),
    )
    cut = search("births"), crop(1, 2, 3, 4), COMPLETE
    episodes = [
        *group("many", 9, 20),
        text_episode(question, *long_turns, sample=0),
        text_episode(question, *cut, sample=1),
        text_episode(question, *short_turns, sample=2),
        text_episode(question, *short_turns, sample=3, ndcg=0.0),
        text_episode(question, *short_turns, sample=4, ndcg=None),
        text_episode(question, *short_turns, sample=5, ndcg=0.9),
    ]
    flags = ["--config", SUCCESS_ONLY, "--set", "distill.duplicates=keep"]
    out = distilled(tmp_path, model, episodes, *flags)
    assert [row["id"][-1] for row in kept_rows(out)] == ["5", "2", "1", "0"]
    reason_by_id = reasons(out)
    assert reason_by_id["many"] == "more than 8 of them are right"
    assert (
        reason_by_id["run/1-q-3"] == "an NDCG of 0 at most"
        and reason_by_id["run/1-q-4"] == "no NDCG"
    )


def test_forced_and_invalid_turns_are_never_targets(tmp_path: Path, model: Path) -> None:
    question = make_question("q")
    invalid = text_episode(question, "garbage", search("births"), COMPLETE, sample=0)
    forced = text_episode(question, search("births"), COMPLETE, sample=1, end="forced")
    forced.turns[-1].forced = True
    wrong = [text_episode(question, COMPLETE, sample=n, judge=0) for n in (2, 3)]
    episodes = [invalid, forced, *wrong]
    out = distilled(tmp_path, model, episodes, "--set", "distill.ended=any")
    rows = {row["id"][-1]: row for row in kept_rows(out)}
    assert rows["0"]["leave_out"] == [0] and rows["0"]["messages"][2]["weight"] == 0
    assert COMPLETE not in json.dumps(rows["1"]["messages"])
    chats = pyarrow.parquet.read_table(out / "train1.parquet").to_pylist()
    assert [row["uid"] for row in chats] == ["q__s0__run"], "its readers learn every turn"
    strict = ["--set", "distill.invalid=drop", "--overwrite"]
    out = distilled(tmp_path / "b", model, episodes, *strict)
    assert reasons(out)["run/1-q-0"] == "an invalid turn"
    assert reasons(out)["run/1-q-1"] == "ended as forced"


def test_a_repeated_query_may_be_read_and_not_learned(tmp_path: Path, model: Path) -> None:
    turns = search("births"), search("births"), COMPLETE
    episodes = [
        text_episode(make_question("q"), *turns),
        text_episode(make_question("q"), COMPLETE, sample=1, judge=0),
    ]
    out = distilled(tmp_path, model, episodes, "--set", "distill.repeats=mask")
    (row,) = kept_rows(out)
    assert row["leave_out"] == [1]
    assert pyarrow.parquet.read_table(out / "train1.parquet").num_rows == 0


def test_only_the_episodes_that_count_are_taken(tmp_path: Path, model: Path) -> None:
    question, turns = make_question("q"), (search("births"), COMPLETE)
    early = [text_episode(question, *turns, step=1, sample=n) for n in range(2)]
    late = [text_episode(question, *turns, step=2, sample=n, judge=1.0 - n) for n in range(2)]
    out = distilled(tmp_path, model, early + late)
    assert reasons(out) == {"q": "more than 0.5 of them are right"}
    last = ["--set", "distill.combine=last_step"]
    out = distilled(tmp_path / "b", model, early + late, *last)
    assert [row["id"] for row in kept_rows(out)] == ["run/2-q-0"]
    assert reasons(out)["run/1-q-0"] == "of another step or run than those that count"


def test_rows_are_what_a_trainer_reads(tmp_path: Path, model: Path) -> None:
    out = distilled(tmp_path, model, group("q", 1, 1))
    (row,) = kept_rows(out)
    cfg = SearchConfig.model_validate({"policy": {"path": str(model)}, "episode": READING})
    tokenizer = inspect_policy(cfg).tokenizer
    token_masks = zip(row["input_ids"], row["action_mask"], strict=True)
    turns = (search("births"), search("rainfall"), COMPLETE)
    assert tokenizer.decode([i for i, is_learned in token_masks if is_learned]) == "".join(
        f"{turn}<|im_end|>" for turn in turns
    )
    (table,) = pyarrow.parquet.read_table(out / "rows.parquet").to_pylist()
    assert table["input_ids"] == row["input_ids"] and table["action_mask"] == row["action_mask"]
    assert json.loads(table["messages"]) == row["messages"]
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["longest_row"] == len(row["input_ids"])
    chats = pyarrow.parquet.read_table(out / "train1.parquet")
    assert chats.column_names == ["uid", "format_version", "messages"]
    (chat,) = chats.to_pylist()
    assert (chat["uid"], chat["format_version"]) == ("q__s0__run", "v1")
    assert [m["role"] for m in json.loads(chat["messages"])][:3] == ["system", "user", "assistant"]
    assert json.loads(chat["messages"])[1]["content"] == "Question: What does q ask?"


def test_the_same_runs_give_the_same_bytes(tmp_path: Path, model: Path) -> None:
    folder = text_run(tmp_path / "run", [*group("a", 2, 3), *group("b", 1, 1)])
    before = (folder / "trajectories/step-000001.jsonl.gz").read_bytes()
    left = temporary_of(tmp_path / "two")
    (left / "images").mkdir(parents=True)  # left by a killed command
    for name in ("one", "two"):
        command = "--run", folder, "--out", tmp_path / name, "--set", f"distill.model={model}"
        assert run(*command).exit_code == 0
    assert everything(tmp_path / "one") == everything(tmp_path / "two")
    assert (folder / "trajectories/step-000001.jsonl.gz").read_bytes() == before
    assert not left.exists()


def test_a_lucky_answer_is_no_row(tmp_path: Path, model: Path) -> None:
    """Check right answers without a gold page, with half of them, or with an unsent page.

    `hallucinations` accepts an episode whose pages contain the same fact.
    """
    turns = search("births"), COMPLETE  # they display deck_1
    seen, lucky, half = (
        make_question("seen", 1),
        make_question("lucky", 2),
        make_question("half", 1, 2),
    )
    twin = make_question("twin", 2, alternatives={"deck_2": ("deck_1",)})
    episodes = [text_episode(template, *turns) for template in (seen, lucky, half, twin)]
    unsent = text_episode(make_question("unsent", 2), search("rain"), *turns)
    unsent.turns[0].views = [page("deck_2")]
    unsent.answer = GeneratedAnswer(status="ok", text="said", evidence=[sha256_of("deck_1")])
    same = text_episode(make_question("same", 2), *turns)
    episodes += [unsent, same]
    episodes += [
        text_episode(template.question, COMPLETE, judge=0, sample=1) for template in list(episodes)
    ]
    record = tmp_path / "record.jsonl"
    entry = RecordEntry("same", "hallucinations", "keep", "same_document", "run/1-same-0")
    CurationRecord([entry]).write(record)
    out = distilled(tmp_path, model, episodes, "--record", record)
    assert [row["question_id"] for row in kept_rows(out)] == ["seen", "twin", "same"]
    reason_by_id = reasons(out)
    for name in ("lucky", "half", "unsent"):
        assert reason_by_id[f"run/1-{name}-0"] == "no evidence shown"
    out = distilled(tmp_path / "b", model, episodes, "--set", "distill.evidence=any")
    assert len(kept_rows(out)) == 6


def test_what_was_condemned_is_not_learned(tmp_path: Path, model: Path) -> None:
    names = ("good", "wrong", "suspected", "cleared", "memory", "guessed", "by-hand", "unanswered")
    episodes = [sample for name in names for sample in group(name, 1, 1)]
    entries = [
        RecordEntry("good", "verify", "keep", "OK"),
        RecordEntry("wrong", "verify", "drop", "GT_ERROR"),
        RecordEntry("suspected", "diagnose", "doubt", "reference_suspected"),
        RecordEntry("cleared", "diagnose", "doubt", "reference_suspected"),
        RecordEntry("cleared", "verify", "keep", "GEN_ERROR"),
        RecordEntry("memory", "hallucinations", "drop", "own_knowledge"),
        RecordEntry("guessed", "hallucinations", "drop", "luck", "run/1-guessed-0"),
        RecordEntry("unanswered", "verify", "open", "no verdict: the judge did not answer"),
    ]
    CurationRecord(entries).write(tmp_path / "record.jsonl")
    (tmp_path / "bad.txt").write_text("by-hand\tits page is another\n")
    flags = ["--record", tmp_path / "record.jsonl", "--exclude", tmp_path / "bad.txt"]
    out = distilled(tmp_path, model, episodes, *flags)
    assert [row["question_id"] for row in kept_rows(out)] == ["good", "cleared"]
    reason_by_id = reasons(out)
    assert reason_by_id["wrong"] == "verified: GT_ERROR"
    assert reason_by_id["suspected"] == "diagnosed: reference_suspected"
    assert reason_by_id["memory"] == "hallucinations: own_knowledge"
    assert reason_by_id["run/1-guessed-0"] == "hallucinations: luck"
    assert reason_by_id["by-hand"] == "excluded by hand"
    assert reason_by_id["unanswered"] == "verified: no verdict: the judge did not answer"
    inputs = json.loads((out / "manifest.json").read_text())["inputs"]
    assert set(inputs) == {str(tmp_path / "record.jsonl"), str(tmp_path / "bad.txt")}
    assert len(kept_rows(distilled(tmp_path / "b", model, episodes))) == len(names)


def test_what_is_written_twice_is_one_row(tmp_path: Path, model: Path) -> None:
    turns = search("births"), COMPLETE
    other = [turn.replace("think>", "think> ", 1) for turn in turns]  # differs only in spaces
    same = make_question("q"), make_question("again", question=make_question("q").question)
    episodes = [text_episode(same[0], *turns, sample=0), text_episode(same[0], *other, sample=1)]
    episodes += [
        text_episode(same[0], search("rain"), COMPLETE, sample=2),
        text_episode(same[1], *turns),
    ]
    episodes += [text_episode(same[0], COMPLETE, judge=0, sample=n) for n in (3, 4, 5)]
    episodes += [text_episode(same[1], COMPLETE, judge=0, sample=1)]
    out = distilled(tmp_path, model, episodes)
    assert [row["id"] for row in kept_rows(out)] == ["run/1-q-0", "run/1-q-2"]
    for name in ("run/1-q-1", "run/1-again-0"):
        line = decisions_of(out)[name]
        assert (line["reason"], line["duplicate_of"]) == ("a duplicate", "run/1-q-0")


def test_a_success_with_a_tag_in_a_thought_is_no_row(tmp_path: Path, model: Path) -> None:
    """Check tags within a think block, also in a turn that is not trained."""
    boxes = {
        "plain": "<think>then <bbox>[1, 2, 3, 4]</bbox></think>\n<search>births</search>",
        "entities": "<think>then &lt;bbox&gt;</think>\n<search>births</search>",
        "unclosed": "<think>then <BBOX>[1, 2, 3, 4]</BBOX>",
        "none": "<think>then a box</think>\n<search>births</search>",
    }
    episodes = [
        text_episode(make_question(name), text, search("a"), COMPLETE)
        for name, text in boxes.items()
    ]
    episodes += [text_episode(make_question(name), COMPLETE, judge=0, sample=1) for name in boxes]
    out = distilled(tmp_path, model, episodes)
    assert [row["question_id"] for row in kept_rows(out)] == ["none"]
    for name in ("plain", "entities", "unclosed"):
        assert reasons(out)[f"run/1-{name}-0"] == "a tag in a thought"


def test_what_cannot_be_distilled_is_a_line(tmp_path: Path, model: Path) -> None:
    folder = text_run(tmp_path / "run", group("a", 1, 1))
    done = run("--run", folder, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "distill.model: not set" in done.output
    wrong = "--set", "distill.order=[judge, judge]"
    done = run("--run", folder, "--out", tmp_path / "out", *wrong)
    assert done.exit_code == 2 and "name each once" in done.output
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_what_episodes_say(tmp_path: Path, model: Path) -> None:
    """Check 60 episodes with 200,000 letters of observations: memory holds a few at a time."""
    episodes = group("q", 20, 40)
    for sample in episodes:
        sample.turns[-1].observation = "births " * 30_000
    folder = text_run(tmp_path / "run", episodes)
    del episodes
    cfg = CurationConfig.model_validate({"distill": {"model": str(model), "duplicates": "keep"}})
    tracemalloc.start()
    result = outcome_of("distill", folder, cfg=cfg)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(sample.is_kept for sample in result.decisions) == 4
    assert peak < 60 * 210_000 / 3
