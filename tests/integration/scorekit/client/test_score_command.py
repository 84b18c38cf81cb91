"""Test `python -m scorekit score` as a user runs it, against a fake service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend, fake_score
from scorekit.server.settings import Secrets, ServiceSettings
from testing.servers import free_port, running_app, running_service, wait_until
from tests.kits import forked
from tests.kits.recording import Recorder
from tests.kits.unwritable import Pipeline, full_device, pipe_without_reader


@pytest.fixture(scope="module")
def url():
    with running_service(FakeBackend("xcomet")) as url:
        yield url


def _command(url, *arguments):
    """Start the command in its own process, to be killed."""
    return [sys.executable, "-m", "scorekit", "score", "--url", url, *map(str, arguments)]


def _run(url, *arguments, env=None):
    """Run the command in this process, which saves a second each time."""
    return CliRunner().invoke(app, ["score", "--url", url, *map(str, arguments)], env=env)


def _write(path, samples):
    lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _score_of(src, mt, ref=None, top=1.0):
    return fake_score(TranslationSample(src=src, mt=mt, ref=ref), top)


def test_a_file_is_scored_in_order_with_line_numbers_and_ids(url, tmp_path):
    samples = [
        {"id": i, "src": f"s{i}", "mt": f"wrong {i}", "ref": "r" * (i % 2)} for i in range(300)
    ]
    samples[7] = {"id": {"doc": 7}, "src": "s", "mt": "nan", "ref": None, "other": [1]}
    source, out = _write(tmp_path / "in.jsonl", samples), tmp_path / "out.jsonl"
    result = _run(url, source, out, "--batch-size", 16)
    assert result.exit_code == 0, result.stderr
    results = _read(out)
    assert [r["line"] for r in results] == list(range(1, 301))
    assert [r["id"] for r in results] == [sample["id"] for sample in samples]
    failed = results.pop(7)
    assert not failed["ok"] and failed["error"]["type"] == "non_finite" and "score" not in failed
    expected = [_score_of(s["src"], s["mt"], s["ref"]) for i, s in enumerate(samples) if i != 7]
    assert [r["score"] for r in results] == expected
    assert results[0]["error_spans"][0]["text"] == "wrong" and "cached" not in results[0]
    assert "299" in result.stdout and "failed: non_finite" in result.stdout
    assert "300/300" in result.stderr


def test_a_tsv_with_other_names_windows_line_ends_and_a_mark_in_front(url, tmp_path):
    source = tmp_path / "in.tsv"
    rows = 'seg\tsource\thyp\tgold\r\n1\t"하나\tone\tref\r\n\r\n2\t둘\t\t\r\n'
    source.write_bytes(b"\xef\xbb\xbf" + rows.encode())
    names = ("--src-field", "source", "--mt-field", "hyp", "--ref-field", "gold")
    result = _run(url, source, tmp_path / "out.jsonl", *names, "--id-field", "seg")
    assert result.exit_code == 0, result.stderr
    first, second = _read(tmp_path / "out.jsonl")
    assert (first["line"], first["id"], first["score"]) == (
        2,
        "1",
        _score_of('"하나', "one", "ref"),
    )
    assert (second["line"], second["id"], second["score"]) == (4, "2", _score_of("둘", ""))


def test_options_priority_and_key_reach_the_service(tmp_path):
    secrets = Secrets(api_keys=SecretStr("k"))
    service = create_app(FakeBackend("xcomet"), ServiceSettings(cache="memory"), secrets)
    recorder = Recorder(service)
    source = _write(tmp_path / "in.jsonl", [{"src": "word " * 30, "mt": "b"}])
    flags = ("--overlong", "error", "--max-input-length", 16, "--span-offsets", "upstream")
    with running_app(recorder) as url:
        refused = _run(url, source, tmp_path / "out.jsonl")
        assert refused.exit_code == 2 and "unauthorized" in refused.stderr
        result = _run(url, source, tmp_path / "out.jsonl", *flags, env={"SCOREKIT_API_KEY": "k"})
    assert result.exit_code == 2 and "none of 1 samples was scored" in result.stderr
    (request,) = recorder.requests
    assert request["priority"] == "bulk"
    assert request["options"] == {
        "overlong": "error",
        "max_input_length": 16,
        "span_offsets": "upstream",
    }
    assert _read(tmp_path / "out.jsonl")[0]["error"]["type"] == "overlong"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"src": "a", "mt": "b"}\n{"src": "a"}\n', "line 2: no field 'mt'"),
        ("a.jsonl", b'{"src": "a", "mt": "b"}\n{"src": \n', "line 2: not JSON"),
        ("a.jsonl", b'{"src": "a", "mt": 3}\n', "line 1: field 'mt' is not text"),
        ("a.jsonl", b'["a", "b"]\n', "line 1: not a JSON object"),
        ("a.jsonl", b'{"src": "\\ud800", "mt": "b"}\n', "line 1: not JSON"),
        ("a.tsv", b"src\tmt\na\tb\tc\n", "line 2: 3 columns, the header has 2"),
        (
            "a.tsv",
            b"source\tmt\na\tb\n",
            "line 1: the header has no column 'src', but 'source'",
        ),
        ("a.tsv", b"src\tmt\n\xe4\tb\n", "line 2: not UTF-8 text"),
        (
            "a.dat",
            b"src\tmt\n",
            "its ending is none of .jsonl, .json, .tsv, .csv, .txt, .parquet: say --format",
        ),
        ("a.xls", b"src\tmt\n", "a workbook. Save its sheet as CSV"),
        ("a.csv", b"PK\x03\x04", "not csv, but a workbook, or another zip. Save its sheet"),
        ("a.tsv", "src\tmt\n".encode("utf-16-le"), "NUL characters. If it is UTF-16"),
        ("a.txt", b"src\tmt\n", "no columns. Name a table .tsv or .csv; parallel texts: "),
        ("none.jsonl", None, "No such file"),
    ],
)
def test_a_faulty_input_ends_with_one_line_before_anything_is_asked(
    tmp_path, name, content, message
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    nobody = f"http://127.0.0.1:{free_port()}"
    result = _run(nobody, tmp_path / name, tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / name}") and message in result.stderr
    assert result.stderr.count("\n") == 1 and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("localhost:8001", 2, "is not the URL of a service"),
        ("http://127.0.0.1:{port}", 1, "cannot be reached"),
        ("{service}/v2", 2, "not_found"),
    ],
)
def test_a_service_that_is_not_there_is_told_at_once(url, tmp_path, target, code, message):
    source = _write(tmp_path / "in.jsonl", [{"src": "a", "mt": "b"}])
    target = target.format(port=free_port(), service=url)
    result = _run(target, source, tmp_path / "out.jsonl")
    assert result.exit_code == code and message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


SAMPLES = [
    {"id": f"n{i}", "src": f"s{i}", "mt": "nan" if i % 97 == 3 else f"m{i}"} for i in range(2000)
]


def _lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_at_any_time_the_file_is_that_of_a_run_without_interruption(url, tmp_path):
    source, out = _write(tmp_path / "in.jsonl", SAMPLES), tmp_path / "out.jsonl"
    assert _run(url, source, tmp_path / "whole.jsonl").exit_code == 0
    slow = FakeBackend("xcomet", seconds_per_pair=0.001)
    with running_service(slow) as slow_url:
        flags = ("--batch-size", 20, "--max-in-flight", 2)
        for kill in range(3):
            before = _lines(out)
            child = forked.Popen(_command(slow_url, source, out, *flags), stderr=subprocess.DEVNULL)
            wait_until(lambda before=before: _lines(out) >= before + 100)
            child.kill()
            child.wait()
            with out.open("ab") as file:  # as if killed in the middle of a write
                file.write(b'{"line": 99999, "ok": tr'[: 8 * (kill + 1)])
        assert 300 <= _lines(out) < 2000
        sent = sum(slow.batches)
    result = _run(url, source, out)
    assert result.exit_code == 0, result.stderr
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert "1,979" in result.stdout and f"{len(SAMPLES):,} samples" not in result.stdout
    assert sent < 2000 + 3 * 80  # only the samples in flight were repeated


def test_an_interrupt_says_how_to_go_on(tmp_path):
    source, out = _write(tmp_path / "in.jsonl", SAMPLES), tmp_path / "out.jsonl"
    with running_service(FakeBackend("xcomet", seconds_per_pair=0.002)) as url:
        child = forked.Popen(
            _command(url, source, out, "--batch-size", "20"), stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: _lines(out) >= 100)
        child.send_signal(signal.SIGINT)
        complaint = child.communicate(timeout=180)[1]
    assert child.returncode == 130
    saved = _lines(out) + _lines(tmp_path / "out.jsonl.early")
    assert f"stopped after {saved} samples; the same command goes on" in complaint
    assert "Traceback" not in complaint


def test_ctrl_c_behind_tee_keeps_what_is_scored(tmp_path):
    source, out = _write(tmp_path / "in.jsonl", SAMPLES), tmp_path / "out.jsonl"
    with (
        running_service(FakeBackend("xcomet", seconds_per_pair=0.002)) as url,
        Pipeline(_command(url, source, out, "--batch-size", "20"), tmp_path) as pipeline,
    ):
        wait_until(lambda: pipeline.has_ended or _lines(out) >= 100)
        assert pipeline.interrupt() == 130
    assert 100 <= _lines(out) < len(SAMPLES)


@pytest.mark.parametrize("unwritable", [pipe_without_reader, full_device])
def test_a_file_is_scored_whatever_becomes_of_the_terminal(url, tmp_path, unwritable):
    source, out = _write(tmp_path / "in.jsonl", SAMPLES[:50]), tmp_path / "out.jsonl"
    with unwritable() as stream:
        done = forked.run(_command(url, source, out), stdout=stream, stderr=stream)
    assert done.returncode == 0
    assert [result["line"] for result in _read(out)] == list(range(1, 51))


@pytest.mark.parametrize(
    ("unwritable", "code", "message"),
    [
        (pipe_without_reader, 128 + signal.SIGPIPE, ""),
        (full_device, 2, "error: No space left on device\n"),
    ],
)
def test_rows_that_cannot_be_written_end_the_command(url, tmp_path, unwritable, code, message):
    source = _write(tmp_path / "in.jsonl", SAMPLES[:50])
    with unwritable() as stream:
        done = forked.run(
            _command(url, source, "-"), stdout=stream, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == code
    assert done.stderr.endswith(message) and "Traceback" not in done.stderr
    assert ("error" in done.stderr) == bool(message)


def test_rows_to_a_closed_stdout_are_refused_before_anything_is_scored(tmp_path):
    source = _write(tmp_path / "in.jsonl", SAMPLES[:5])
    command = _command(f"http://127.0.0.1:{free_port()}", source, "-")
    closed = ["bash", "-c", 'exec "$@" >&-', "-", *command]
    done = subprocess.run(closed, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: OUT -: stdout is closed. Name a file\n")


def test_another_job_does_not_go_on_with_an_output(url, tmp_path):
    source, out = _write(tmp_path / "in.jsonl", SAMPLES[:50]), tmp_path / "out.jsonl"
    assert _run(url, source, out).exit_code == 0
    before = out.read_bytes()

    def refused(url, source, *flags):
        result = _run(url, source, out, *flags)
        assert result.exit_code == 2 and out.read_bytes() == before
        return result.stderr

    assert "something else (options)" in refused(url, source, "--overlong", "error")
    other = _write(tmp_path / "other.jsonl", SAMPLES[:60])
    assert "something else (input)" in refused(url, other)
    with running_service(FakeBackend("metricx")) as metricx:
        assert "something else (model)" in refused(metricx, source)
    assert _run(url, source, out).exit_code == 0 and out.read_bytes() == before
    assert _run(url, other, out, "--overwrite").exit_code == 0 and len(_read(out)) == 60
    before = out.read_bytes()
    Path(f"{out}.meta.json").unlink()
    assert "out.jsonl.meta.json does not say what it was made from" in refused(url, source)


def test_what_is_there_stays_until_the_service_has_answered_once(tmp_path):
    source, out = _write(tmp_path / "in.jsonl", SAMPLES[:5]), tmp_path / "out.jsonl"
    meta = Path(f"{out}.meta.json")
    with running_service(FakeBackend("metricx")) as url:
        assert _run(url, source, out).exit_code == 0
        before = out.read_bytes(), meta.read_bytes()
        # An option of xCOMET.
        refused = _run(url, source, out, "--overwrite", "--span-offsets", "exact")
        assert refused.exit_code != 0 and "'span_offsets' is not a known field" in refused.stderr
        assert (out.read_bytes(), meta.read_bytes()) == before
        assert _run(url, source, out, "--overwrite", "--overlong", "truncate").exit_code == 0
    assert len(_read(out)) == 5 and meta.read_bytes() != before[1]


def test_the_input_is_not_overwritten(url, tmp_path):
    source = _write(tmp_path / "in.jsonl", SAMPLES[:5])
    before = source.read_bytes()
    result = _run(url, source, source, "--overwrite")
    assert result.exit_code == 2 and "the input cannot be the output" in result.stderr
    assert source.read_bytes() == before


def test_two_processes_do_not_write_one_output(tmp_path):
    source, out = _write(tmp_path / "in.jsonl", SAMPLES), tmp_path / "out.jsonl"
    with running_service(FakeBackend("xcomet", seconds_per_pair=0.002)) as url:
        first = forked.Popen(
            _command(url, source, out, "--batch-size", "20"), stderr=subprocess.DEVNULL
        )
        wait_until(lambda: _lines(out) >= 20)
        second = _run(url, source, out, "--batch-size", 20)
        first.kill()
        first.wait()
    assert second.exit_code == 2 and "another process writes it" in second.stderr


def test_a_service_that_leaves_in_mid_run_is_a_fault_of_its_own(tmp_path):
    source, out = _write(tmp_path / "in.jsonl", SAMPLES), tmp_path / "out.jsonl"
    flags = ("--batch-size", "20", "--max-in-flight", "1", "--deadline", "6")
    with running_service(FakeBackend("xcomet", seconds_per_pair=0.002)) as url:
        child = forked.Popen(_command(url, source, out, *flags), stderr=subprocess.PIPE, text=True)
        wait_until(lambda: _lines(out) >= 100)
    complaint = child.communicate(timeout=180)[1]
    assert child.returncode == 1 and f"{url} " in complaint and "Traceback" not in complaint
    assert [r["line"] for r in _read(out)] == list(range(1, _lines(out) + 1))
