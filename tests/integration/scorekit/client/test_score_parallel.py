"""Test `scorekit score -s ... -t ... --metric ...`, and the means of the systems of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from scorekit.__main__ import app
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import free_port, running_service
from tests.kits import forked


@pytest.fixture(scope="module")
def metric() -> Iterator[list[str]]:
    with running_service(FakeBackend("xcomet")) as url:
        yield ["--metric", f"x={url}"]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["score", *map(str, arguments)])


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        "s": write(tmp_path / "src.txt", "하나", "둘", "", "넷"),
        "a": write(tmp_path / "a.txt", "one", "nan", "", ""),
        "b": write(tmp_path / "b.txt", "uno", "dos", "x", "cuatro"),
        "r": write(tmp_path / "ref.txt", "1", "2", "", "4"),
    }


def score_of(src: str, mt: str, ref: str | None = None) -> float:
    return fake_score(TranslationSample(src=src, mt=mt, ref=ref), 1.0)


def cells(output: str) -> list[list[str]]:
    """Return the rows of the table."""
    rows = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_systems_have_their_means_and_out_a_line_for_each_translation(
    metric: list[str], files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ["-s", files["s"], "-t", files["a"], "-t", files["b"], "-r", files["r"], *metric]
    result = run(*arguments, out)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["line"], row["id"], row["system"], row["mt"]) for row in rows] == [
        (1, 1, "a", "one"),
        (2, 2, "a", "nan"),
        (4, 4, "a", ""),
        (5, 1, "b", "uno"),
        (6, 2, "b", "dos"),
        (7, 3, "b", "x"),
        (8, 4, "b", "cuatro"),
    ]
    a = [score_of("하나", "one", "1"), score_of("넷", "", "4")]
    b = [score_of(*row) for row in (("하나", "uno", "1"), ("둘", "dos", "2"), ("", "x"))]
    b.append(score_of("넷", "cuatro", "4"))
    assert [row["x"].get("score") for row in rows] == [a[0], None, a[1], *b]
    assert cells(result.stdout) == [
        ["x (higher is better)", "a", f"{mean(a):.4f}", "2", "1", "1"],
        ["", "b", f"{mean(b):.4f}", "4", "0", "0"],
    ]
    assert "failed, and in no mean of x: non_finite 1" in result.stdout
    assert "empty translations, which are scored: 1" in result.stdout
    meta = json.loads(Path(f"{out}.meta.json").read_text())
    assert meta["format"] == "parallel text" and meta["blank_rows"] == "skipped"
    files["b"].rename(tmp_path / "c.txt")  # another system
    files["b"] = tmp_path / "c.txt"
    renamed = run(*arguments[:5], files["b"], *arguments[6:], out)
    assert renamed.exit_code == 2 and "something else (input)" in renamed.stderr


def test_without_out_the_means_alone_are_printed_and_nothing_is_written(
    metric: list[str], files: dict[str, Path], tmp_path: Path
) -> None:
    """Programs get tabs and all digits; no terminal is here."""
    before = set(tmp_path.iterdir())
    command = [sys.executable, "-m", "scorekit", "score", "-s", files["s"], *metric, "--worst", "1"]
    command += ["-t", files["a"], "-t", files["b"]]
    done = forked.run([*map(str, command)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    header, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert header == ["metric", "system", "mean", "scored", "failed", "blank"]
    assert rows == [
        ["x", "a", repr(mean([score_of("하나", "one"), score_of("넷", "")])), "2", "1", "1"],
        ["x", "b", rows[1][2], "4", "0", "0"],
    ]
    assert "without OUT the means alone are printed" in done.stderr and "1 worst" in done.stderr
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-s", "s"], "parallel files: -t FILE (translations) is missing"),
        (["-t", "a"], "parallel files: -s FILE (the sources) is missing"),
        (["-r", "r"], "parallel files: -s FILE (the sources) is missing"),
        (["-s", "s", "-t", "a", "b"], "b.txt: results are JSON lines. Name it .jsonl; if it is a"),
        (["-s", "s", "-t", "a", "b", "c.jsonl"], "b.txt: parallel files stand in place of IN"),
        (["-s", "s", "-t", "a", "-t", "a"], "-t {folder}/a.txt: this file is named twice"),
        (["-s", "s", "-t", "short"], "src.txt has 4 lines, {folder}/short.txt 1: line n of"),
        (["-s", "s", "-t", "a", "--src-field", "x"], "parallel files have no columns"),
        (["-s", "s", "-t", "a", "--format", "csv"], "parallel files have no columns"),
        (["-s", "s", "-t", "a", "--url", "{url}"], "name the service by --metric NAME=URL"),
        (["-s", "s", "-t", "a", "s"], "src.txt: the input cannot be the output"),
        (["-s", "s", "-t", "none"], "none.txt: No such file"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_asked(
    files: dict[str, Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    files |= {"short": write(tmp_path / "short.txt", "1"), "none": tmp_path / "none.txt"}
    words = [str(files.get(word, word)).format(url=url) for word in arguments]
    result = run(*words, *([] if "--url" in words else ["--metric", f"x={url}"]))
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ") and message.format(folder=tmp_path) in line


def test_a_column_of_systems_makes_means_and_too_many_values_are_none(
    metric: list[str], tmp_path: Path
) -> None:
    source, out = tmp_path / "in.tsv", tmp_path / "out.jsonl"
    rows = [(f"s{i}", f"m{i}", "ab"[i % 2]) for i in range(9)]
    text = "src\tmt\tsystem\n" + "".join("\t".join(row) + "\n" for row in rows)
    source.write_text(text + "\t\t\n")
    result = run(source, out, *metric, "--keep", "mt")
    assert result.exit_code == 0, result.output
    by_system = {k: [score_of(s, m) for s, m, system in rows if system == k] for k in "ab"}
    assert [row[1:] for row in cells(result.stdout)] == [
        [k, f"{mean(scores):.4f}", str(len(scores)), "0", "-"] for k, scores in by_system.items()
    ]
    assert "blank rows, skipped: 1" in result.stdout
    assert json.loads(out.read_text().splitlines()[0]).keys() == {"line", "mt", "x"}
    many = "src\tmt\tsystem\n" + "".join(f"s\tm{i}\tprompt {i}\n" for i in range(101))
    source.write_text(many + "\t\t\n")
    result = run(source, out, *metric, "--overwrite")
    total = mean(score_of("s", f"m{i}") for i in range(101))
    assert cells(result.stdout) == [["x (higher is better)", f"{total:.4f}", "101", "0", "1"]]
    assert "101 values of `system`: one mean of all is shown" in result.stdout


def test_a_metric_that_has_scored_nothing_ends_with_2(metric: list[str], tmp_path: Path) -> None:
    source = write(tmp_path / "src.txt", "a", "b")
    (tmp_path / "nan.txt").write_text("nan\nnan\n")
    result = run("-s", source, "-t", tmp_path / "nan.txt", *metric)
    assert result.exit_code == 2
    assert "x: none of 2 samples was scored (non_finite: 2)" in result.stderr
    assert result.stdout.splitlines()[-1].split("\t") == ["x", "nan", "", "0", "2", "0"]


def test_names_in_any_script_fit_a_terminal(metric: list[str], tmp_path: Path) -> None:
    source = write(tmp_path / "src.txt", "a")
    long = write(tmp_path / f"{'번역기' * 20}.txt", "b")
    short = write(tmp_path / "[b]机器.txt", "c")
    result = run("-s", source, "-t", long, "-t", short, *metric, tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    assert "[b]机器" in result.stdout
    assert "번역기" * 20 in "".join(row[1] for row in cells(result.stdout)[:-1])
