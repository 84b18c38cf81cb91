"""Test `search verify` with its servers on real ports."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.kits import forked
from tests.kits.trainer.searching.curated import (
    decisions_of,
    everything,
    kept_rows,
    make_question,
    searched,
    write_rows,
    write_run,
)
from tests.kits.trainer.searching.verifying import CLASSES, SAID, questions, verifying
from trainer.search.cli import app
from trainer.sft.curation_record import CurationRecord, RecordEntry, read_record

K, IN_FLIGHT = 3, 2


@pytest.fixture(scope="module")
def served():
    with verifying() as running:
        yield running


@pytest.fixture
def servers(served):
    served.forget()
    served.pages.fetched.clear()
    return served


def run(*flags):
    return CliRunner().invoke(app, ["verify", *map(str, flags)])


def flags(servers, folder, *more):
    data = folder / "data.jsonl"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(data, questions())
    options = ["--set", f"data.train={data}", "--out", folder / "out"]
    return [*servers.flags, *options, *more]


def calls(servers) -> int:
    return sum(
        sum(servers.counted(server).values()) for server in (servers.verifier, servers.generator)
    )


def test_each_row_has_the_class_of_its_answers_and_says_why(servers, tmp_path):
    result = run(*flags(servers, tmp_path))
    assert result.exit_code == 0, result.output
    rows = decisions_of(tmp_path / "out")
    assert {name: row["class"] for name, row in rows.items()} == CLASSES
    dropped = {name for name, row in rows.items() if not row["kept"]}
    assert dropped == {"gt", "both", "unsure", "differs"}
    assert [row["id"] for row in kept_rows(tmp_path / "out")] == [
        n for n in SAID if n not in dropped
    ]
    gt, hostile = rows["gt"], rows["hostile"]
    assert (gt["verifier"], gt["reference"]) == ("15", "12 euros")
    assert gt["verifier_answers"] == gt["generator_answers"] == ["15"] * K
    assert gt["evidence"] == ["deck_2: =sum of 15"] and gt["by"] == "verifier"
    agree = ("stance", "verifier_reference", "generator_reference", "generator_verifier")
    assert [gt[name] for name in agree] == ["sure", "no", "no", "yes"]
    assert hostile["reason"] == "no verdict: the verifier's answers are none"
    assert rows["silent"]["reason"] == "no verdict: the generator's answers are none"
    assert rows["unsure"]["verifier_answers"] == ["(unsure) 15"] * K


def test_it_shows_the_gold_page_and_neither_reference_nor_the_others_answer(servers, tmp_path):
    assert run(*flags(servers, tmp_path)).exit_code == 0
    assert set(servers.pages.fetched) == {"deck_1", "deck_2", "deck_3"}
    for request in servers.verifier.requests:
        assert "euros" not in str(request.body) and len(request.body["messages"][1]["content"]) == 2
        assert request.body["response_format"]["json_schema"]["strict"]


def test_nothing_is_paid_twice_and_the_bytes_are_the_same(servers, tmp_path):
    assert run(*flags(servers, tmp_path)).exit_code == 0
    first, asked_for = everything(tmp_path / "out"), calls(servers)
    assert asked_for == 2 * K * len(SAID)
    assert run(*flags(servers, tmp_path, "--overwrite")).exit_code == 0
    assert everything(tmp_path / "out") == first and calls(servers) == asked_for


def test_more_answers_ask_for_those_alone(servers, tmp_path):
    assert run(*flags(servers, tmp_path, "--set", "verify.k=1")).exit_code == 0
    assert calls(servers) == 2 * len(SAID)
    assert run(*flags(servers, tmp_path, "--overwrite")).exit_code == 0
    assert calls(servers) == 2 * K * len(SAID)


def test_greedy_models_are_asked_once(servers, tmp_path):
    greedy = ("verify.verifier.temperature=0", "answering.generator.temperature=0")
    options = [part for key in greedy for part in ("--set", key)]
    assert run(*flags(servers, tmp_path, *options)).exit_code == 0
    assert calls(servers) == 2 * len(SAID)


def test_a_killed_command_goes_on_with_what_it_had(servers, tmp_path):
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    data = write_rows(tmp_path / "data.jsonl", questions())
    (uninterrupted, killed) = (folder / "out" for folder in (uninterrupted, killed))
    options = [*servers.flags, "--set", f"data.train={data}"]
    assert run(*options, "--out", uninterrupted).exit_code == 0
    servers.forget()
    command = [sys.executable, "-m", "trainer", "search", "verify", *options, "--out", str(killed)]
    process = forked.Popen(command, stderr=subprocess.PIPE)
    while calls(servers) < 10 and process.poll() is None:
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not killed.exists()
    assert run(*options, "--out", killed).exit_code == 0
    assert everything(killed) == everything(uninterrupted)
    for fake in (servers.verifier, servers.generator):
        counted = servers.counted(fake)
        assert len(counted) == K * len(SAID)
        assert sum(counted.values()) - len(counted) <= IN_FLIGHT  # in flight when it was killed


@pytest.mark.parametrize("which", ["verifier", "generator"])
def test_a_server_that_fails_gives_no_class_and_the_next_run_asks_again(servers, tmp_path, which):
    getattr(servers, which).fail(500, times=None)
    assert run(*flags(servers, tmp_path)).exit_code == 0
    rows = decisions_of(tmp_path / "out").values()
    assert all(row["class"] is None and row["kept"] for row in rows)
    assert {row["reason"] for row in rows} == {f"no verdict: the {which} did not answer"}
    getattr(servers, which).well()
    assert run(*flags(servers, tmp_path, "--overwrite")).exit_code == 0
    assert {name: row["class"] for name, row in decisions_of(tmp_path / "out").items()} == CLASSES


def test_cut_answers_give_no_class(servers, tmp_path):
    servers.verifier.cut = True
    assert run(*flags(servers, tmp_path)).exit_code == 0
    rows = decisions_of(tmp_path / "out")
    assert {row["reason"] for row in rows.values()} == {
        "no verdict: the verifier's answers are none"
    }


def test_an_estimate_asks_nobody_and_writes_nothing(servers, tmp_path):
    price = [
        "verify.price={prompt: 1, completion: 10}",
        "answering.money.generator={prompt: 1, completion: 10}",
    ]
    options = [part for key in price for part in ("--set", key)]
    result = run(*flags(servers, tmp_path, "--estimate", *options))
    assert result.exit_code == 0, result.output
    assert f"{len(SAID)} rows are verified" in result.output
    assert f"verifier {K * len(SAID)} calls" in result.output
    assert f"generator {K * len(SAID)} calls" in result.output
    assert (
        f"judge {(3 + 1 + 6) * len(SAID)} calls" in result.output
        and "in all: at most" in result.output
    )
    assert not servers.verifier.requests and not servers.pages.fetched
    assert not (tmp_path / "out").exists()


def test_only_prompts_that_score_low_with_gold_seen_are_verified(servers, tmp_path):
    episodes = {
        "gt": (0.0, 1.0),
        "gen": (0.3, 0.5),
        "ok": (1.0, 1.0),
        "both": (0.0, 0.0),
        "differs": (0.0, 0.2),
        "unsure": (None, None),
    }
    question_by_id = {question_row.id: question_row for question_row in questions()}
    question_by_id["unsure"] = make_question("unsure", 1, question="What is unsure, exactly?")
    trajectories = [
        searched(question_by_id[name], judge=judge, ndcg=ndcg)
        for name, (judge, ndcg) in episodes.items()
    ]
    more = [make_question("no-gold"), make_question("no-page", 9)]
    played_questions = [question_by_id[name] for name in episodes]
    folder = write_run(tmp_path / "run", trajectories, played_questions)
    low = ["--run", folder, "--set", "verify.prompts=low", "--out", tmp_path / "low"]
    assert run(*servers.flags, *low).exit_code == 0
    assert {name: row["reason"] for name, row in decisions_of(tmp_path / "low").items()} == {
        "gt": "GT_ERROR",
        "gen": "GEN_ERROR",
        "ok": "not verified: scores above max_score",
        "both": "not verified: gold not seen",
        "differs": "UNCERTAIN",  # its page was seen, though late
        "unsure": "not verified: never scored",
    }
    assert decisions_of(tmp_path / "low")["gt"]["episodes"] == ["run/1-gt-0"]
    data = write_rows(tmp_path / "more.jsonl", more)
    options = ["--set", f"data.train={data}", "--out", tmp_path / "all"]
    assert run(*servers.flags, *options).exit_code == 0
    assert {name: row["reason"] for name, row in decisions_of(tmp_path / "all").items()} == {
        "no-gold": "not verified: no gold page",
        "no-page": "no verdict: a gold page is not in the index",
    }


def test_what_distill_would_take_and_what_is_in_doubt_is_verified(servers, tmp_path):
    """Check that scores and seen pages do not matter for this choice."""
    question_by_id = {question_row.id: question_row for question_row in questions()}
    episodes = [searched(question_by_id["gt"], n, judge=1.0 - n % 2, ndcg=0.0) for n in range(4)]
    episodes += [
        searched(question_by_id["both"], judge=0.9, ndcg=1.0),
        searched(question_by_id["ok"], judge=0.9, ndcg=1.0),
    ]
    folder = write_run(
        tmp_path / "run", episodes, [question_by_id[name] for name in ("gt", "both", "ok")]
    )
    record = tmp_path / "record.jsonl"
    CurationRecord([RecordEntry("both", "diagnose", "doubt", "reference_suspected")]).write(record)
    low = ["--run", folder, "--set", "verify.prompts=low", "--out", tmp_path / "out"]
    assert run(*servers.flags, *low, "--record", record).exit_code == 0
    assert {name: row["reason"] for name, row in decisions_of(tmp_path / "out").items()} == {
        "gt": "GT_ERROR",
        "both": "BOTH_WRONG",
        "ok": "not verified: scores above max_score",
    }
    full_record = read_record(tmp_path / "out")
    assert full_record.dropped("gt").text == "verified: GT_ERROR"
    assert {entry.step for entry in full_record} == {"diagnose", "verify"}


def test_quotes_are_looked_for_in_the_pages_text(servers, tmp_path):
    """Check three pages: one contains the quote, one does not, and one has no text layer."""
    servers.pages.pages |= {"deck_1": "= Sum of\n15 euros", "deck_2": "Sum of 12", "deck_3": ""}
    try:
        for name, mode in (("checked", "checked"), ("noted", "noted")):
            options = ["--set", f"verify.quotes={mode}", "--set", f"data.train={tmp_path}/q.jsonl"]
            gold = {"gt": 1, "both": 2, "gen": 2, "unsure": 2, "ok": 3}
            question_by_id = {question_row.id: question_row for question_row in questions()}
            rows = [
                make_question(
                    n, p, question=question_by_id[n].question, reference_answer="12 euros"
                )
                for n, p in gold.items()
            ]
            write_rows(tmp_path / "q.jsonl", rows)
            assert run(*servers.flags, *options, "--out", tmp_path / name).exit_code == 0
        rows = decisions_of(tmp_path / "checked")
        assert {name: row["reason"] for name, row in rows.items()} == {
            "gt": "GT_ERROR",
            "both": "no verdict: the verifier's quotes are not on the pages",
            "gen": "GEN_ERROR",
            "unsure": "UNCERTAIN",
            "ok": "OK",
        }
        assert rows["gt"]["quotes"] == ["on the page"] * K
        assert rows["both"]["quotes"] == ["not on the page"] * K
        assert rows["ok"]["quotes"] == ["no text layer"] * K
        options = json.loads((tmp_path / "checked/manifest.json").read_text())["quotes"]
        assert options == {"no text layer": 3, "not on the page": 3, "on the page": 6}
        assert decisions_of(tmp_path / "noted")["both"]["reason"] == "BOTH_WRONG"
        record = read_record(tmp_path / "checked")
        assert record.doubted("both") and not record.dropped("both")
    finally:
        servers.pages.pages |= dict.fromkeys(("deck_1", "deck_2", "deck_3"), "")


def test_people_overrule_and_their_agreement_is_told(servers, tmp_path):
    assert run(*flags(servers, tmp_path)).exit_code == 0
    sheet = (tmp_path / "out/worksheet.csv").read_bytes().decode("utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(sheet, newline="")))
    assert {row["id"] for row in rows} == set(SAID)
    assert [row["kept"] for row in rows[:4]] == ["no"] * 4  # rows that would be dropped come first
    people = {"gt": "OK", "gen": "GEN_ERROR", "both": "BOTH_WRONG", "hostile": "GT_ERROR"}
    for row in rows:
        row["person"] = people.get(row["id"], "")
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    decisions = tmp_path / "decided.csv"
    decisions.write_text(buffer.getvalue(), encoding="utf-8-sig")
    before = calls(servers)
    result = run(*flags(servers, tmp_path, "--overwrite", "--decisions", decisions))
    assert result.exit_code == 0 and calls(servers) == before
    decisions_by_id = decisions_of(tmp_path / "out")
    assert (
        decisions_by_id["gt"]["class"],
        decisions_by_id["gt"]["by"],
        decisions_by_id["gt"]["kept"],
    ) == ("OK", "person", True)
    assert decisions_by_id["gt"]["verifier_class"] == "GT_ERROR"
    assert (decisions_by_id["hostile"]["class"], decisions_by_id["hostile"]["kept"]) == (
        "GT_ERROR",
        False,
    )
    assert decisions_by_id["ok"]["by"] == "verifier"
    # Three rows have both: 2 of 3 agree; p_e = 2/9.
    assert "give the same class: 2 of 3 (66.7 %), Cohen's kappa 0.571" in result.output
    assert "keep and drop the same rows: 2 of 3 (66.7 %), Cohen's kappa 0.400" in result.output


def test_a_row_of_a_worksheet_that_cannot_be_used_is_one_line(servers, tmp_path):
    (tmp_path / "bad.csv").write_text("id,person\nnobody,OK\nok,maybe\n", encoding="utf-8")
    result = run(*flags(servers, tmp_path, "--decisions", tmp_path / "bad.csv"))
    assert result.exit_code == 2 and not servers.verifier.requests
    assert "2 rows cannot be used" in result.output
    assert "line 2: no row of the data has the id 'nobody'" in result.output
    assert "line 3: 'MAYBE' is not a class" in result.output


def test_the_worksheet_stands_alone_and_shows_pages_answers_and_quotes(servers, tmp_path):
    assert run(*flags(servers, tmp_path)).exit_code == 0
    page = (tmp_path / "out/worksheet.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") == 3  # each page once, for any number of rows
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page
    for text in ("What is gt, exactly?", "12 euros", "deck_2: =sum of 15", "GT_ERROR"):
        assert text in page
    few_rows = flags(servers, tmp_path, "--overwrite", "--set", "verify.worksheet_rows=2")
    assert run(*few_rows).exit_code == 0
    assert (tmp_path / "out/worksheet.html").read_text("utf-8").count('class="row"') == 2


def test_the_generator_may_not_verify_itself(servers, tmp_path):
    arguments = servers.flags
    generator = next(flag for flag in arguments if flag.startswith("answering.generator.base_url="))
    same = [
        *("--set", generator.replace("answering.generator", "verify.verifier")),
        *("--set", "verify.verifier.model=generator"),
    ]
    result = run(*flags(servers, tmp_path, *same))
    assert result.exit_code == 2 and "would confirm its own mistakes" in result.output
    assert not servers.generator.requests


def test_without_runs_or_questions_it_says_what_to_name(servers, tmp_path):
    result = run(*servers.flags, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "Name a run (--run FOLDER)" in result.output


def test_a_reference_counts_if_any_of_the_right_answers_does(servers, tmp_path):
    """Check that a verifier's 15 confirms a question whose right answers are 12 euros or 15."""
    (question,) = (question for question in questions() if question.id == "gt")
    data = write_rows(
        tmp_path / "data.jsonl", [question.model_copy(update={"other_answers": ("fifteen", "15")})]
    )
    result = run(*servers.flags, "--set", f"data.train={data}", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    row = decisions_of(tmp_path / "out")["gt"]
    assert (row["class"], row["reference"]) == ("OK", "12 euros | fifteen | 15")
    (kept_row,) = kept_rows(tmp_path / "out")
    assert kept_row["reference_answers"] == ["12 euros", "fifteen", "15"]
    for page in ("worksheet.html", "worksheet.csv", "report.html"):
        assert "12 euros | fifteen | 15" in (tmp_path / "out" / page).read_text("utf-8"), page
