"""Test `python -m scorekit score` on every kind of input, from stdin to stdout, and with a
judge."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import Secrets
from testing.judge import GOOD, running_judge
from testing.servers import free_port, running_service
from tests.kits import forked

ROWS = [
    {"id": "a", "src": "one", "mt": 'say "하나",\nand more', "ref": "r"},
    {"id": "b", "src": "둘", "mt": "", "ref": ""},
    {"id": "c", "src": "three", "mt": "셋", "ref": "q"},
]


@pytest.fixture(scope="module")
def url():
    with running_service(FakeBackend()) as url:
        yield url


@pytest.fixture(scope="module")
def judge():
    with running_judge() as url:
        yield url


def _run(url, *arguments, **settings):
    return CliRunner().invoke(app, ["score", "--url", url, *map(str, arguments)], **settings)


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def _score_of(row):
    sample = TranslationSample(src=row["src"], mt=row["mt"], ref=row["ref"])
    return fake_score(sample, 25.0)


def _jsonl():
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def _csv(dialect="excel"):
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(ROWS[0]), dialect=dialect)
    writer.writeheader()
    writer.writerows(ROWS)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def _parquet():
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    table = pyarrow.Table.from_pylist([row | {"ref": row["ref"] or None} for row in ROWS])
    parquet.write_table(table.append_column("other", [[b"\xff"] * 3]), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("in.jsonl.gz", lambda: gzip.compress(_jsonl()), [1, 2, 3]),
        ("in.csv", _csv, [2, 4, 5]),
        ("in.tsv", lambda: _csv("excel-tab"), [2, 4, 5]),
        ("in.CSV.gz", lambda: gzip.compress(_csv()), [2, 4, 5]),
        ("in.parquet", _parquet, [1, 2, 3]),
    ],
)
def test_every_format_gives_the_same_scores(url, tmp_path, name, content, lines):
    (tmp_path / name).write_bytes(content())
    out = tmp_path / "out.jsonl"
    for _ in range(2):  # the second run continues
        result = _run(url, tmp_path / name, out)
        assert result.exit_code == 0, result.stderr
        results = _read(out)
        assert [r["line"] for r in results] == lines
        assert [(r["id"], r["score"]) for r in results] == [(r["id"], _score_of(r)) for r in ROWS]
    assert "0 samples" in result.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            b'src,mt\na,"b\n',
            "line 2: a quote opens a cell in this row, and none closes",
        ),
        ("a.csv", b'src,mt\n"a\nb",c\nd\n', "line 4: 1 columns, the header has 2"),
        ("a.csv", b"src,mt,src\na,b,c\n", "line 1: the header has 2 columns 'src'. Rename"),
        ("a.csv", b"src,mt\na,\xff\n", "line 2: not UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(b'{"src": "a"}\n' * 9, mtime=0)[:-9], "gzip is damaged"),
        ("a.parquet", b"PAR1 and nothing else", "not Parquet"),
        ("a.parquet", b"", "not Parquet"),
        ("a.jsonl", b'{"src": "a", "mt": "b"}\n{"src": 3}\n', "line 2: field 'src' is not text"),
    ],
)
def test_a_faulty_input_is_told_before_anything_is_asked(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    result = _run(f"http://127.0.0.1:{free_port()}", tmp_path / name, tmp_path / "out.jsonl")
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert result.stderr.startswith(f"error: {tmp_path / name}") and result.stderr.count("\n") == 1


def test_an_output_of_a_quoted_tsv_is_gone_on_with(url, tmp_path):
    """Cut it before, within and after rows that span several lines."""
    out = tmp_path / "out.jsonl"
    (tmp_path / "in.tsv").write_bytes(_csv("excel-tab"))
    assert _run(url, tmp_path / "in.tsv", out).exit_code == 0
    complete_output = out.read_bytes()
    for keep in range(0, len(complete_output), 37):
        out.write_bytes(complete_output[:keep])
        result = _run(url, tmp_path / "in.tsv", out)
        assert result.exit_code == 0 and out.read_bytes() == complete_output, result.stderr


def test_an_output_from_when_quotes_were_text_is_not_gone_on_with(url, tmp_path):
    out, meta = tmp_path / "out.jsonl", tmp_path / "out.jsonl.meta.json"
    (tmp_path / "in.tsv").write_bytes(_csv("excel-tab"))
    assert _run(url, tmp_path / "in.tsv", out).exit_code == 0
    about = json.loads(meta.read_text())
    meta.write_text(json.dumps(about | {"format": "tsv"}))
    second_run = _run(url, tmp_path / "in.tsv", out)
    assert second_run.exit_code == 2 and "made from something else (format)" in second_run.stderr


def test_every_quote_is_text_where_the_user_says_so(url, tmp_path):
    (tmp_path / "in.tsv").write_text('src\tmt\n"Why?"\t"Warum?"\n')
    out = tmp_path / "out.jsonl"
    for flags, quote in ((), ""), (("--format", "tsv-unquoted"), '"'):
        assert _run(url, tmp_path / "in.tsv", out, "--overwrite", *flags).exit_code == 0
        row = {"src": f"{quote}Why?{quote}", "mt": f"{quote}Warum?{quote}", "ref": ""}
        assert [r["score"] for r in _read(out)] == [_score_of(row)]


def test_no_score_at_all_is_a_mistake_to_mend(url, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"src": "s", "mt": "nan"}\n' * 3 + '{"src": "s", "mt": "m"}\n'
    )
    out = tmp_path / "out.jsonl"
    some_scored = _run(url, tmp_path / "in.jsonl", out)
    assert some_scored.exit_code == 0 and "failed: non_finite" in some_scored.stdout
    (tmp_path / "in.jsonl").write_text('{"src": "s", "mt": "nan"}\n' * 3)
    for flags in ("--overwrite",), ():  # the second time no request remains
        none = _run(url, tmp_path / "in.jsonl", out, *flags)
        message = (
            f"error: {out}: none of 3 samples was scored (non_finite: 3): each line has its error\n"
        )
        assert none.exit_code == 2 and none.stderr.endswith(message)
    to_stdout = _run(url, tmp_path / "in.jsonl", "-")
    assert to_stdout.exit_code == 2 and "stdout: none of 3 samples was scored" in to_stdout.stderr
    (tmp_path / "empty.jsonl").write_text("")
    assert _run(url, tmp_path / "empty.jsonl", tmp_path / "empty_out.jsonl").exit_code == 0


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.csv", "out.parquet"])
def test_an_output_is_json_lines_and_says_so(url, tmp_path, name):
    (tmp_path / "in.jsonl").write_bytes(_jsonl())
    result = _run(url, tmp_path / "in.jsonl", tmp_path / name)
    assert result.exit_code == 2 and "results are JSON lines. Name it .jsonl" in result.stderr


@pytest.mark.parametrize(
    ("content", "flags"),
    [
        (_jsonl, ()),
        (lambda: gzip.compress(_csv()), ("--format", "csv")),
        (_parquet, ("--format", "parquet")),
    ],
)
def test_from_stdin_to_stdout(url, content, flags):
    command = [sys.executable, "-m", "scorekit", "score", "--url", url, "-", "-", *flags]
    result = forked.run(command, input=content(), capture_output=True)
    assert result.returncode == 0, result.stderr
    results = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(r["id"], r["score"]) for r in results] == [(r["id"], _score_of(r)) for r in ROWS]
    assert b"mean score" in result.stderr


def test_a_table_on_stdin_is_told_the_option_that_names_its_format(url):
    for content, is_table in ((b"src\tmt\na\tb\n", True), (b'{"src": "a"}\n{"src": "b"}\n', False)):
        result = _run(url, "-", "-", input=content)
        assert result.exit_code == 2 and ("say --format tsv" in result.stderr) == is_table


def test_stdin_again_goes_on_with_its_output(url, tmp_path):
    out = tmp_path / "out.jsonl"
    assert _run(url, "-", out, input=_jsonl()).exit_code == 0
    complete_output = out.read_bytes()
    out.write_bytes(complete_output[: complete_output.index(b"\n") + 5])
    result = _run(url, "-", out, input=_jsonl())
    assert (
        result.exit_code == 0
        and "2 samples" in result.stdout
        and out.read_bytes() == complete_output
    )
    other = _run(url, "-", out, input=_jsonl() * 2)
    assert other.exit_code == 2 and "something else (input)" in other.stderr


def test_a_reader_of_stdout_that_leaves_is_no_traceback(url):
    lines = b'{"src": "s", "mt": "m", "id": "' + b"x" * 50_000 + b'"}\n'
    command = [sys.executable, "-m", "scorekit", "score", "--url", url, "-", "-"]
    child = forked.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdout.close()
    child.stdin.write(lines * 20)
    child.stdin.close()
    complaint = child.stderr.read().decode()
    assert child.wait(60) == 141  # as of a command that SIGPIPE ends
    assert "Traceback" not in complaint and "Exception ignored" not in complaint


# -- the judge ------------------------------------------------------------------------------------


def test_a_file_is_judged(judge, tmp_path):
    out = tmp_path / "out.jsonl"
    rows = [
        GOOD | {"id": 1},
        GOOD | {"id": 2, "candidate": "번역: 그 집은 빨간색이다."},
        GOOD | {"id": 3, "source_lang": "no language at all"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):
        result = _run(judge, tmp_path / "in.jsonl", out, "--task", "translation_filter")
        assert result.exit_code == 0, result.stderr
    first, second, third = _read(out)
    assert (
        first["verdict"] == {"pass": True, "reason_code": "ok", "notes": ""} and first["score"] == 1
    )
    assert (second["verdict"]["pass"], second["verdict"]["reason_code"]) == (False, "meta_phrase")
    assert third["error"]["type"] == "invalid_input" and "verdict" not in third
    assert "passed" in result.stdout and "0 samples" in result.stdout


def test_a_file_of_translations_is_judged_by_naming_fields_and_constants(judge, tmp_path):
    source, out = tmp_path / "in.tsv", tmp_path / "out.jsonl"
    source.write_text("id\tsrc\tmt\tother\nx\tThe house is red.\t그 집은 빨간색이다.\t7\n")
    flags = [
        "--task",
        "translation_filter",
        "--variable",
        "source_text=src",
        "--variable",
        "candidate=mt",
        "--set",
        "source_lang=en",
        "--set",
        "target_lang=ko",
    ]
    result = _run(judge, source, out, *flags)
    assert result.exit_code == 0, result.stderr
    assert _read(out)[0]["verdict"]["pass"] and _read(out)[0]["id"] == "x"
    other = _run(judge, source, out, *flags[:-1], "target_lang=de")
    assert other.exit_code == 2 and "something else (fields)" in other.stderr


@pytest.mark.parametrize(
    ("service", "flags", "message"),
    [
        ("judge", [], "the service is a judge: name its rubric by --task"),
        ("url", ["--task", "t", "--variable", "src"], "no judge: leave out --task"),
        ("judge", ["--set", "a=b"], "a judge's: name its rubric by --task"),
        ("judge", ["--task", "t", "--set", "a"], "write NAME=VALUE"),
        ("judge", ["--task", "t", "--set", "a=b", "--variable", "a=src"], "both name 'a'"),
        ("judge", ["--task", "t", "--variable", "a=nothing"], "no field 'nothing'"),
        (
            "judge",
            ["--task", "t", "--variable", "a=src", "--overlong", "error"],
            "options: 'overlong' is not a known field",
        ),
    ],
)
def test_what_does_not_fit_the_service_is_told(request, tmp_path, service, flags, message):
    (tmp_path / "in.jsonl").write_text('{"src": "a", "mt": "b"}\n')
    url = request.getfixturevalue(service)
    result = _run(url, tmp_path / "in.jsonl", tmp_path / "out.jsonl", *flags)
    assert result.exit_code == 2 and message in result.stderr, result.stderr


# -- keys -----------------------------------------------------------------------------------------


def test_a_refused_key_names_the_variable_to_set(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(_jsonl())
    with running_service(FakeBackend(), Secrets(api_keys=SecretStr("k"))) as url:
        none = _run(url, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        env = {"SCOREKIT_API_KEY": "wrong"}
        wrong = _run(url, tmp_path / "in.jsonl", tmp_path / "out.jsonl", env=env)
    assert none.exit_code == 2 and "no key was sent: set SCOREKIT_API_KEY" in none.stderr
    assert wrong.exit_code == 2 and "check SCOREKIT_API_KEY" in wrong.stderr
