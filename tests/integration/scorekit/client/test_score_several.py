"""Test `scorekit score --metric NAME=URL ...` as a user runs it, against fake services."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from scorekit.__main__ import app
from scorekit.errors import SampleError
from scorekit.server.fake import FakeBackend
from testing.judge import running_judge, saying
from testing.servers import Held, free_port, running_service, wait_until
from tests.kits import forked


@pytest.fixture(scope="module")
def metricx() -> Iterator[str]:
    with running_service(FakeBackend("metricx")) as url:
        yield url


@pytest.fixture(scope="module")
def xcomet() -> Iterator[str]:
    with running_service(FakeBackend("xcomet")) as url:
        yield url


ROWS = [
    {"id": f"n{i}", "src": f"원문 {i}", "mt": "nan" if i % 17 == 3 else f"번역 bad{i}", "kind": [i]}
    | ({"ref": f"r{i}"} if i % 2 else {})
    for i in range(100)
]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["score", *map(str, arguments)])


def metrics(**urls: str) -> list[str]:
    return [part for name, url in urls.items() for part in ("--metric", f"{name}={url}")]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


AWKWARD = '\ufeff ID\tSRC\tmt\tref\n1\t"a ""b"""\tx\t\n\t\t\t\n\nzwei\tc\t\tr\nd\te\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [("in.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)), ("in.tsv", AWKWARD)],
)
def test_a_line_has_what_each_url_alone_would_write(
    metricx: str, xcomet: str, tmp_path: Path, name: str, content: str
) -> None:
    source, out = tmp_path / name, tmp_path / "out.jsonl"
    source.write_text(content, encoding="utf-8")
    flags = ("--bad-rows", "skip", "--batch-size", 7)
    result = run(source, out, *metrics(m=metricx, x=xcomet), *flags)
    assert result.exit_code == 0, result.output
    rows = read(out)
    for metric, url in (("m", metricx), ("x", xcomet)):
        alone = tmp_path / f"{metric}.jsonl"
        assert run(source, alone, "--url", url, *flags).exit_code == 0
        assert [row[metric] for row in rows] == [without(r, "line", "id") for r in read(alone)]
        assert [row["line"] for row in rows] == [r["line"] for r in read(alone)]
        assert [row.get("id") for row in rows] == [r["id"] for r in read(alone)]
        part = Path(f"{out}.parts") / f"{metric}.jsonl"
        assert part.read_bytes() == alone.read_bytes()
    assert all(next(iter(row)) == "line" and list(row)[-2:] == ["m", "x"] for row in rows)


def test_the_fields_to_keep_have_one_name_whatever_the_columns_are_called(
    metricx: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(
        source, [{"원문": "a", "hyp": "b", "kind": [1, None], "n": float("nan"), "x": 1}, {"y": 2}]
    )
    names = ("--src-field", "원문", "--mt-field", "hyp", "--bad-rows", "skip")
    assert run(source, out, *metrics(m=metricx), *names).exit_code == 0
    assert [without(row, "m") for row in read(out)] == [
        {"line": 1, "src": "a", "mt": "b"},
        {"line": 2},
    ]
    assert read(out)[1]["m"]["error"]["type"] == "invalid_input"
    rejoined = run(source, out, *metrics(m=metricx), *names, "--keep", "kind", "--keep", "n")
    assert (
        rejoined.exit_code == 0 and "0 scores" in rejoined.output
    )  # it is joined anew, not scored
    assert [without(row, "m") for row in read(out)] == [
        {"line": 1, "kind": [1, None], "n": None},
        {"line": 2},
    ]
    meta = json.loads(Path(f"{out}.meta.json").read_text(encoding="utf-8"))
    assert meta["keep"] == ["kind", "n"]
    assert meta["metrics"]["m"] == {
        "service": "metricx",
        "model": "fake-metricx",
        "revision": "fake",
        "dtype": "float64",
        "task": None,
        "higher_is_better": False,
        "options": {},
    }


def test_a_metric_that_is_added_costs_only_its_own_scores(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    first, second = FakeBackend("metricx"), FakeBackend("xcomet")
    with running_service(first) as m, running_service(second) as x:
        assert run(source, out, *metrics(m=m)).exit_code == 0
        num_scored = sum(first.batches)
        result = run(source, out, *metrics(m=m, x=x))
        assert result.exit_code == 0 and "100 scores" in result.output
        assert sum(first.batches) == num_scored and sum(second.batches) == 100
        assert {"m", "x"} <= read(out)[0].keys()
        before = out.read_bytes()
        fewer = run(source, out, *metrics(x=x))
        assert fewer.exit_code == 2 and out.read_bytes() == before
        assert f"error: {out} has scores of m, which would go" in fewer.stderr
        (Path(f"{out}.parts") / "m.jsonl").unlink()
        paid_twice = run(source, out, *metrics(m=m, x=x))
        assert paid_twice.exit_code == 2 and "m.jsonl does not exist any more" in paid_twice.stderr
        assert sum(first.batches) == num_scored


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_at_any_time_the_file_is_that_of_a_run_without_interruption(
    metricx: str, xcomet: str, tmp_path: Path
) -> None:
    rows = [{**row, "id": i, "src": f"s{i}"} for i, row in enumerate(ROWS * 6)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    expected_path = tmp_path / "whole.jsonl"
    assert run(source, expected_path, *metrics(m=metricx, x=xcomet)).exit_code == 0
    slow = FakeBackend("metricx", seconds_per_pair=0.001), FakeBackend("xcomet")
    slow[1].seconds_per_pair = 0.002
    parts = [Path(f"{out}.parts") / f"{name}.jsonl" for name in "mx"]
    with running_service(slow[0]) as m, running_service(slow[1]) as x:
        command = [sys.executable, "-m", "scorekit", "score", str(source), str(out)]
        command += [*metrics(m=m, x=x), "--batch-size", "20", "--max-in-flight", "2"]
        for _ in range(2):
            before = list(map(lines, parts))
            child = forked.Popen(command, stderr=subprocess.DEVNULL)
            wait_until(
                lambda before=before: all(
                    now >= earlier + 60
                    for now, earlier in zip(map(lines, parts), before, strict=True)
                )
            )
            child.kill()
            child.wait()
            for part in parts:
                with part.open("ab") as file:  # as if killed in the middle of a write
                    file.write(b'{"line": 99999, "ok": tr')
        assert not out.exists() and all(120 <= lines(part) < 600 for part in parts)
        sent = [sum(backend.batches) for backend in slow]
    result = run(source, out, *metrics(m=metricx, x=xcomet))
    assert result.exit_code == 0, result.output
    assert out.read_bytes() == expected_path.read_bytes()
    assert all(count < 600 + 2 * 80 for count in sent)  # only what was in flight was repeated
    failed = sum(row["mt"] == "nan" for row in rows)
    assert f"failed, and in no mean of x: non_finite {failed}" in result.output


class Moody(FakeBackend):
    """Fail samples with `bad` and a 1 with a transient error while it is `out_of_sorts`."""

    out_of_sorts = True

    def encode(self, samples: Any, options: Any) -> Any:
        encoded = super().encode(samples, options)
        for index, sample in enumerate(samples):
            if "bad1" in sample.mt and self.out_of_sorts:
                encoded[index] = SampleError("timeout", "not now")
        return encoded


@pytest.mark.usefixtures("no_second_try")
def test_what_failed_for_the_moment_is_in_out_and_scored_by_the_next_run(
    metricx: str, xcomet: str, tmp_path: Path
) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    moody = Moody("xcomet")
    with running_service(moody) as url:
        first = run(source, out, *metrics(m=metricx, x=url))
        assert first.exit_code == 3, first.output
        failed = [row["line"] for row in read(out) if row["x"].get("error", {}).get("retryable")]
        assert f"x: {len(failed)} samples had transient errors; the same" in first.stderr
        assert all(read(out)[line - 1]["m"]["ok"] for line in failed)
        moody.out_of_sorts = False
        moody.batches.clear()
        second = run(source, out, *metrics(m=metricx, x=url))
        assert second.exit_code == 0 and sum(moody.batches) == len(failed) == 11
    expected_path = tmp_path / "whole.jsonl"
    assert run(source, expected_path, *metrics(m=metricx, x=xcomet)).exit_code == 0
    assert out.read_bytes() == expected_path.read_bytes()


def test_every_service_answers_before_anything_is_scored(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    backend = FakeBackend("metricx")
    with running_service(backend) as url:
        for wrong, code, message in (
            (f"http://127.0.0.1:{free_port()}", 1, "cannot be reached"),
            (f"{url}/v9", 2, "not_found"),
            (f"{url}#mqm", 2, "--metric x: the service is metricx: leave out #mqm"),
        ):
            result = run(source, out, *metrics(m=url, x=wrong))
            assert result.exit_code == code and message in result.stderr
            assert result.stderr.count("\n") == 1
            assert not backend.batches and list(tmp_path.iterdir()) == [source]


class NeedsReferences(FakeBackend):
    """A metric that requires references."""

    def load(self) -> Any:
        description = super().load()
        description.inputs = {"src": "ignored", "mt": "required", "ref": "required"}
        return description


def test_references_that_are_missing_are_counted_before_anything_is_scored(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [*ROWS, []]), tmp_path / "out.jsonl"
    backend = NeedsReferences()
    with running_service(backend) as url:
        result = run(source, out, *metrics(m=url), "--bad-rows", "skip")
    assert result.exit_code == 2 and not backend.batches and not out.exists()
    assert "requires references, but 50 of 101 translations have none" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "out", "--metric", "m={m}", "--metric", "m={x}"], "m: two metrics have this name"),
        (["in", "out", "--metric", "m={m}", "--url", "{x}"], "--url and --metric: name the"),
        (["in", "out"], "name the service: --metric NAME=URL, or --url URL"),
        (["in", "out", "--metric", "m"], "--metric m: write NAME=URL or NAME=URL#task"),
        (["in", "out", "--metric", "m=localhost:1"], "--metric m: localhost:1 is no http URL"),
        (["in", "out", "--metric", "a/b={m}"], "a name is part of a file's name"),
        (["in", "out", "--metric", "ab" * 99 + "={m}"], "a name is part of a file's name"),
        (["in", "out", "--metric", "src={m}"], "--metric src: a field of OUT has this name"),
        (["in", "out", "--metric", "ok={m}"], "--metric ok: a field of OUT has this name"),
        (["in", "out", "--metric", "k={m}", "--keep", "k"], "--metric k: a field of OUT has"),
        (["in", "out", "--metric", "m={m}", "--keep", "knd"], "--keep knd: no row of"),
        (["in", "out", "--metric", "m={m}", "--keep", "line"], "--keep line: `line` is the"),
        (["in", "out", "--metric", "m={m}", "--task", "mqm"], "write --metric NAME=URL#TASK"),
        (["in", "out", "--metric", "m={m}", "--set", "a=b"], "--variable and --set are a judge's"),
        (["in", "out", "--metric", "m={m}", "--votes", "3"], "--votes: none of the metrics has"),
        (["in", "out", "--metric", "m={m}", "--span-offsets", "exact"], "--span-offsets: none"),
        (["in", "in", "--metric", "m={m}"], "the input cannot be the output"),
        (["in", "folder", "--metric", "m={m}"], "it is a folder: name a file"),
        (["in", "out.tsv", "--metric", "m={m}"], "results are JSON lines. Name it .jsonl"),
        (["in", "no/out", "--metric", "m={m}"], "No such file or directory"),
        (["--metric", "m={m}"], "IN is missing"),
        (["in", "--url", "{m}"], "OUT is missing: scorekit score IN OUT --url URL"),
        (["in", "-", "--url", "{m}", "--worst", "3"], "--worst: no results stay"),
        (["in", "out", "--url", "{m}", "--keep", "id"], "--keep: only with --metric"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    metricx: str, xcomet: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    source = write(tmp_path / "in.jsonl", ROWS)
    (tmp_path / "folder").mkdir()
    paths = {"in": source, "out": tmp_path / "out.jsonl"}
    paths |= {name: tmp_path / name for name in ("folder", "out.tsv", "no/out")}
    words = [str(paths.get(word, word)).format(m=metricx, x=xcomet) for word in arguments]
    result = run(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert set(tmp_path.iterdir()) == {source, tmp_path / "folder"}


def test_another_job_does_not_go_on_with_an_output(
    metricx: str, xcomet: str, tmp_path: Path
) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    both = metrics(m=metricx, x=xcomet)
    assert run(source, out, *both).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def refused(*arguments: Any) -> str:
        result = run(*arguments)
        assert result.exit_code == 2
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        return result.stderr

    assert "m.jsonl was made from something else (options)" in refused(
        source, out, *both, "--overlong", "error"
    )
    assert "m.jsonl was made from something else (model)" in refused(
        source, out, *metrics(m=xcomet, x=xcomet)
    )
    assert f"{out} was made from something else (options, model, keep, metrics)" in refused(
        source, out, "--url", metricx
    )
    other = write(tmp_path / "other.jsonl", ROWS[:60])
    before[other] = other.read_bytes()
    assert f"{out} was made from something else (input)" in refused(other, out, *both)
    alone = tmp_path / "alone.jsonl"
    assert run(source, alone, "--url", metricx).exit_code == 0
    before |= {path: path.read_bytes() for path in tmp_path.glob("alone*")}
    assert f"{alone} has the scores of one --url" in refused(source, alone, *both)
    meta = Path(f"{out}.meta.json")
    meta.write_text("{}")
    before[meta] = b"{}"
    assert "was made from something else" in refused(source, out, *both)
    meta.unlink()
    del before[meta]
    assert "out.jsonl.meta.json does not say what it was made from" in refused(source, out, *both)
    assert run(other, out, *both, "--overwrite").exit_code == 0 and len(read(out)) == 60
    assert run(other, out, *both).exit_code == 0


def test_what_is_there_stays_until_a_service_has_answered_and_goes_on_after_a_kill(
    tmp_path: Path,
) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    other_rows = [{**row, "src": f"other {row['src']}"} for row in ROWS[:60]]
    other = write(tmp_path / "other.jsonl", other_rows)
    backend = Held("metricx")
    with running_service(backend) as url:
        assert run(source, out, *metrics(m=url)).exit_code == 0
        before = out.read_bytes()
        backend.hold()
        command = [sys.executable, "-m", "scorekit", "score", str(other), str(out)]
        command += [*metrics(m=url), "--overwrite", "--batch-size", "8", "--max-in-flight", "1"]
        child = forked.Popen(command, stderr=subprocess.DEVNULL)
        assert backend.entered.wait(180)
        assert out.read_bytes() == before
        backend.seconds_per_batch = 0.1
        backend.go.set()
        part = Path(f"{out}.parts") / "m.jsonl"
        wait_until(lambda: not out.exists() and 8 <= lines(part) < 60)
        child.kill()
        child.wait()
        backend.seconds_per_batch = 0.0
        backend.batches.clear()
        result = run(other, out, *metrics(m=url))  # without --overwrite
        assert result.exit_code == 0, result.output
        assert len(read(out)) == 60 and sum(backend.batches) < 60


def test_two_processes_do_not_write_one_output(tmp_path: Path, xcomet: str) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    backend = Held("metricx")
    with running_service(backend) as url:
        backend.hold()
        command = [sys.executable, "-m", "scorekit", "score", str(source), str(out)]
        first = forked.Popen([*command, *metrics(m=url)], stderr=subprocess.DEVNULL)
        assert backend.entered.wait(180)
        second = run(source, out, *metrics(x=xcomet))  # another part, the same OUT
        assert second.exit_code == 2 and f"{out}: another process writes it" in second.stderr
        backend.go.set()
        assert first.wait() == 0
    assert len(read(out)) == 100


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, xcomet: str) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    backend = Held("metricx")
    with running_service(backend) as url:
        backend.hold()
        command = [sys.executable, "-m", "scorekit", "score", str(source), str(out)]
        child = forked.Popen(
            [*command, *metrics(x=xcomet, m=url)], stderr=subprocess.PIPE, text=True
        )
        assert backend.entered.wait(180)
        wait_until(lambda: lines(Path(f"{out}.parts") / "x.jsonl") == 100)
        child.send_signal(signal.SIGINT)
        complaint = child.communicate()[1]
        backend.go.set()
    assert child.returncode == 130
    assert "stopped after 100 scores; the same command goes on from there" in complaint
    assert "Traceback" not in complaint and not out.exists()


def test_stdin_is_read_by_every_metric_and_stdout_has_the_joined_lines(
    metricx: str, xcomet: str, tmp_path: Path
) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    assert run(source, out, *metrics(m=metricx, x=xcomet)).exit_code == 0
    command = [sys.executable, "-m", "scorekit", "score", "-", "-", "--batch-size", "3"]
    with source.open("rb") as stdin:
        done = forked.run(
            [*command, *metrics(m=metricx, x=xcomet)], stdin=stdin, capture_output=True
        )
    assert done.returncode == 0 and done.stdout == out.read_bytes()
    assert b"mean" in done.stderr


def test_a_judge_has_its_task_its_variables_and_its_options(metricx: str, tmp_path: Path) -> None:
    rows = [{**row, "src_lang": "en"} for row in ROWS[:5]]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    llm = saying({"errors": []})
    with llm.running() as upstream, running_judge(upstream=upstream, key="k") as judge:
        urls = metrics(m=metricx, j=f"{judge}#mqm")
        result = run(
            source, out, *urls, "--set", "tgt_lang=ko", "--votes", 3, "--overlong", "error"
        )
    assert result.exit_code == 0, result.output
    assert len(llm.requests) == 15 and "Korean" in str(llm.requests[0].body)
    assert all(row["j"]["ok"] for row in read(out))
    meta = json.loads(Path(f"{out}.meta.json").read_text())["metrics"]
    assert (meta["j"]["task"], meta["j"]["options"]) == ("mqm", {"votes": 3})
    assert meta["m"]["options"] == {"overlong": "error"}
    assert meta["j"]["higher_is_better"] is False


def test_a_judge_of_other_texts_gets_the_columns_that_are_named(tmp_path: Path) -> None:
    rows = [{"q": "When?", "a": "In 1889.", "key": f"It was 18{i}."} for i in range(3)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    columns = [
        part for pair in ("query=q", "answer=a", "reference=key") for part in ("--variable", pair)
    ]
    with running_judge() as judge:
        urls = metrics(j=f"{judge}#answer_correctness")
        result = run(source, out, *urls, *columns, "--worst", 1)
        assert result.exit_code == 0, result.output
        assert [without(row, "j") for row in read(out)] == [{"line": i} for i in (1, 2, 3)]
        assert "In 1889." in result.stdout and "passed by j: " in result.stdout
        same = [{"query": row["q"], "answer": row["a"], "reference": row["key"]} for row in rows]
        write(source, same)
        assert run(source, tmp_path / "b.jsonl", *urls).exit_code == 0  # all fields
    assert [row["j"] for row in read(tmp_path / "b.jsonl")] == [row["j"] for row in read(out)]


def test_a_service_that_leaves_in_mid_run_is_named_and_the_scores_of_both_stay(
    tmp_path: Path,
) -> None:
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "scorekit", "score", str(source), str(out), "--deadline", "6"]
    backend = FakeBackend("metricx")
    with running_service(backend) as m:
        with running_service(FakeBackend("xcomet", seconds_per_pair=0.02)) as x:
            flags = ["--batch-size", "4", "--max-in-flight", "1"]
            child = forked.Popen(
                [*command, *metrics(m=m, x=x), *flags], stderr=subprocess.PIPE, text=True
            )
            wait_until(lambda: lines(Path(f"{out}.parts") / "x.jsonl") >= 8)
        complaint = child.communicate(timeout=180)[1]
        assert child.returncode == 1 and f"{x} " in complaint and "Traceback" not in complaint
        assert not out.exists() and lines(Path(f"{out}.parts") / "x.jsonl") >= 8
        with running_service(FakeBackend("xcomet")) as again_url:
            assert run(source, out, *metrics(m=m, x=again_url)).exit_code == 0
        assert sum(backend.batches) == len(read(out)) == 100


def test_one_cache_on_this_side_serves_several_metrics(tmp_path: Path) -> None:
    source, db = write(tmp_path / "in.jsonl", ROWS), tmp_path / "scores.db"
    outs = tmp_path / "out0.jsonl", tmp_path / "out1.jsonl"
    for out, expected in zip(outs, (100, sum(row["mt"] == "nan" for row in ROWS)), strict=True):
        backends = FakeBackend("metricx"), FakeBackend("xcomet")
        with running_service(backends[0]) as m, running_service(backends[1]) as x:
            assert run(source, out, *metrics(m=m, x=x), "--cache-db", db).exit_code == 0
        assert [sum(backend.batches) for backend in backends] == [expected, expected]
    assert outs[0].read_bytes() == outs[1].read_bytes()


LONG = "이것은 터미널의 너비보다 훨씬 긴 문장입니다. 这个句子比终端的宽度长得多。" * 3


@pytest.mark.parametrize("form", ["--metric", "--url"])
def test_the_worst_rows_have_their_texts_and_failed_ones_stand_apart(
    metricx: str, xcomet: str, tmp_path: Path, form: str
) -> None:
    """MetricX: higher is worse; xCOMET: lower is worse."""
    rows = [{**row, "src": LONG + str(i)} for i, row in enumerate(ROWS)]
    source = write(tmp_path / "in.jsonl", rows)
    for name, url, sign in (("m", metricx, -1), ("x", xcomet, 1)):
        out = tmp_path / f"{name}.jsonl"
        service = metrics(**{name: url}) if form == "--metric" else ["--url", url]
        result = run(source, out, *service, "--worst", 3)
        assert result.exit_code == 0, result.output
        results = [row.get(name, row) | {"line": row["line"]} for row in read(out)]
        good = sorted((r for r in results if r["ok"]), key=lambda r: sign * r["score"])
        listed = [line for line in result.stdout.splitlines() if line.startswith("line ")]
        assert [int(line.split()[1]) for line in listed] == [r["line"] for r in good[:3]]
        for line, expected in zip(listed, good, strict=False):
            assert f"id n{expected['line'] - 1}" in line and f"{expected['score']:.4f}" in line
        failed = [str(i + 1) for i, row in enumerate(ROWS) if row["mt"] == "nan"]
        assert f"not among them: {len(failed)}" in result.stdout
        assert all(f"\n  line {number} (" in result.stdout for number in failed)
        worst = rows[good[0]["line"] - 1]
        assert worst["src"].replace(" ", "") in "".join(result.stdout.split())
        assert worst["mt"] in result.stdout
        report = result.stdout.partition("worst of")[2]
        assert all(cell_len(line) <= 80 for line in report.splitlines())
