"""Test `python -m scorekit meta-eval` as a user runs it, against fake services."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from scipy.stats import kendalltau
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import PATIENCE_S, Held, free_port, running_service, wait_until
from tests.kits import forked


@pytest.fixture(scope="module")
def url():
    with running_service(FakeBackend("xcomet")) as url:
        yield url


@pytest.fixture(scope="module")
def metricx():
    with running_service(FakeBackend("metricx")) as url:
        yield url


@pytest.fixture
def no_charts(monkeypatch):
    """Draw no charts in a test that does not check the page: they take most of its time."""
    monkeypatch.setattr("scorekit.metaeval.page._charts", lambda *_: [])


@pytest.fixture
def judged(tmp_path):
    return _write(tmp_path / "judged.jsonl", list(_rows()))


def _rows(segments=12, systems="ABC"):
    rng = random.Random(1)
    for segment in range(segments):
        for system in systems:
            mt = f"집 house{rng.randint(0, 9)} {system} <b>红色</b>"
            worst = [{"start": 2, "end": 7, "severity": "MAJOR", "category": "Accuracy"}]
            spans = worst if rng.random() < 0.4 else []
            row = {"src": f"s{segment}", "mt": mt, "system": system, "seg_id": segment}
            yield row | {"spans": spans}


def _write(path, rows):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def _run(judged, out, *metrics, more=()):
    named = [part for metric in metrics for part in ("--metric", metric)]
    arguments = ["meta-eval", str(judged), str(out), *named, "--draws", "40", *map(str, more)]
    return CliRunner().invoke(app, arguments)


def _read_stats(out):
    stats = json.loads((out / "figures.json").read_text(encoding="utf-8"))
    return stats, {metric["name"]: metric for metric in stats["metrics"]}


def test_services_are_scored_told_and_gone_on_with(url, metricx, judged, tmp_path):
    out = tmp_path / "out"
    result = _run(judged, out, f"x={url}", f"m={metricx}")
    assert result.exit_code == 0, result.stderr
    stats, metrics = _read_stats(out)
    assert stats["rows"] == 36 and stats["segments"] == 12 and stats["systems"] == 3
    assert list(metrics) == ["constant", "length only", "all marked", "x", "m"]
    assert metrics["x"]["scored"] == 36 and metrics["x"]["values"]["mpp_recall"] > 0
    assert "mpp_recall" not in metrics["m"]["values"]
    assert metrics["x"]["intervals"]["kendall"]["systems"] is not None
    row = next(_rows())
    lines = (out / "m.jsonl").read_text(encoding="utf-8").splitlines()
    expected = fake_score(TranslationSample(src=row["src"], mt=row["mt"]), 25.0)
    assert json.loads(lines[0])["score"] == expected
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<b>红色" not in page and "&lt;b&gt;" in page and "<script" not in page
    assert "house" in result.stdout or "tau-b" in result.stdout
    # After an interruption the second half is requested again, and the stats are the same.
    (out / "m.jsonl").write_text("\n".join(lines[:10]) + "\n" + lines[10][:20], encoding="utf-8")
    resumed = _run(judged, out, f"x={url}", f"m={metricx}")
    assert resumed.exit_code == 0, resumed.stderr
    assert _read_stats(out)[0] == stats


def test_names_and_numbers_of_a_report_stand_apart_from_texts_of_either_direction(judged, tmp_path):
    """Check the bidi marks: without them a browser shows -1.00 after Arabic as 1.00-.

    Long names must not run out of a chart, either."""
    long = "a-system-of-a-very-long-name"
    rows = [{**row, "mt": "لم يأتِ " + row["mt"]} for row in _rows(systems=("<i>", long))]
    scores = [
        {"src": r["src"], "mt": r["mt"], "score": -k, "error_spans": []} for k, r in enumerate(rows)
    ]
    judged, scores = _write(judged, rows), _write(tmp_path / "scores.jsonl", scores)
    result = _run(judged, tmp_path / "out", f"x={scores}")
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    pairs = page.partition("differ most")[2]
    assert pairs.count('dir="ltr"') == 3 * pairs.count("<dl") > 0
    assert "<bdi>&lt;i&gt;</bdi>" in pairs and f"<bdi>{long}</bdi>" in pairs
    assert "a-system-of-a-ver…" in page and "<i>" not in page


def test_a_name_may_have_any_letters(judged, tmp_path):
    """After everything is scored, no name of a metric or a system may end the report."""
    names = ["a$b_{$", "%s{}", "지표", "两\nlines", "_x"]
    rows = list(_rows(segments=4, systems=names))
    scores = [{"src": r["src"], "mt": r["mt"], "score": k % 7} for k, r in enumerate(rows)]
    judged, scores = _write(judged, rows), _write(tmp_path / "scores.jsonl", scores)
    result = _run(judged, tmp_path / "out", *(f"{name}={scores}" for name in names))
    assert result.exit_code == 0, result.stderr
    assert set(names) <= _read_stats(tmp_path / "out")[1].keys()
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    # One bar of each chart, and a point of each metric's chart of systems.
    assert all(page.count(f">{name}</text>") >= 5 for name in ("a$b_{$", "%s{}", "지표", "_x"))


def test_lower_is_better_of_a_service_is_turned(metricx, judged, tmp_path, no_charts):
    """Check that the same scores from a file, marked as inverted, give the service's agreement."""
    result = _run(judged, tmp_path / "one", f"m={metricx}")
    assert result.exit_code == 0, result.stderr
    rows = [
        {"src": r["src"], "mt": r["mt"]}
        | {"score": fake_score(TranslationSample(src=r["src"], mt=r["mt"]), 25.0)}
        for r in _rows()
    ]
    path = _write(tmp_path / "scores.jsonl", rows)
    more = ("--lower-is-better", "m")
    assert _run(judged, tmp_path / "two", f"m={path}", more=more).exit_code == 0
    service_values, file_values = (
        _read_stats(tmp_path / name)[1]["m"]["values"] for name in ("one", "two")
    )
    human = [-5 * len(row["spans"]) for row in _rows()]
    expected = kendalltau(human, [-row["score"] for row in rows]).statistic
    assert service_values == file_values and service_values["kendall"] == pytest.approx(expected)


def test_a_failed_score_is_no_number_and_the_rows_are_the_common_ones(url, tmp_path, no_charts):
    rows = list(_rows())
    rows[4]["mt"] = rows[4]["mt"] + " nan"
    judged = _write(tmp_path / "judged.jsonl", rows)
    scores = [{"src": r["src"], "mt": r["mt"], "score": i} for i, r in enumerate(rows)]
    scores[7]["score"] = None
    path = _write(tmp_path / "scores.jsonl", scores[:-1])
    result = _run(judged, tmp_path / "out", f"x={url}", f"file={path}")
    assert result.exit_code == 0, result.stderr
    stats, metrics = _read_stats(tmp_path / "out")
    assert stats["rows"] == 33
    assert metrics["x"]["failed"] == {"non_finite": 1} and metrics["x"]["scored"] == 35
    assert metrics["file"]["failed"] == {"absent": 1, "failed": 1}
    assert "non_finite 1" in result.stdout


def test_references_of_a_system_and_systems_left_out(url, judged, tmp_path, no_charts):
    more = ("--ref-system", "C", "--exclude", "B")
    result = _run(judged, tmp_path / "out", f"x={url}", more=more)
    assert result.exit_code == 0, result.stderr
    stats, _ = _read_stats(tmp_path / "out")
    assert stats["systems"] == 1 and "one system only" in result.stdout
    sample = json.loads((tmp_path / "out" / "x.samples.jsonl").read_text("utf-8").splitlines()[0])
    first, _, third = list(_rows())[:3]
    assert (sample["mt"], sample["ref"]) == (first["mt"], third["mt"])


def test_some_segments_are_whole_ones_and_the_seeds(judged, tmp_path, no_charts):
    rows = list(_rows())
    scores = [{"src": r["src"], "mt": r["mt"], "score": k} for k, r in enumerate(rows)]
    path = _write(tmp_path / "scores.jsonl", scores)

    def stats_of(seed):
        out = tmp_path / str(seed)
        result = _run(judged, out, f"f={path}", more=("--segments", 4, "--seed", seed))
        assert result.exit_code == 0, result.stderr
        return _read_stats(out)[0]

    first, other = stats_of(0), stats_of(1)
    assert (first["segments"], first["rows"], first["judged"]) == (4, 12, 12)
    chosen_ids = random.Random(0).sample([str(k) for k in range(12)], 4)
    means = [
        -5 * len(r["spans"]) for r in rows if r["system"] == "A" and str(r["seg_id"]) in chosen_ids
    ]
    assert first["human"]["A"] == pytest.approx(sum(means) / 4)
    assert first == stats_of(0) and first["human"] != other["human"]


@pytest.mark.parametrize(
    ("metric", "more", "message"),
    [
        ("x", (), "--metric x: write NAME=URL"),
        ("x=nowhere.jsonl", (), "neither an http URL nor a file"),
        ("x={url}#mqm", (), "leave out #mqm"),
        ("x={url}", ("--exclude", "Z"), "--exclude Z: the systems are A, B, C"),
        ("x={url}", ("--ref-system", "Z"), "--ref-system Z: the systems are"),
        ("x={url}", ("--lower-is-better", "x"), "its service says itself"),
        ("x={url}", ("--lower-is-better", "y"), "no --metric has that name"),
        ("constant={url}", (), "that name is taken"),
        ("../x={url}", (), "a name is part of a file's name"),
        ("x={other}", (), "none of its 1 rows is one of the translations"),
        ("x={broken}", (), "line 1: span 0 to 999 is not in a translation"),
        ("x={odd}", (), "line 1: field 'error_spans' is not a list of objects"),
    ],
)
def test_wrong_uses_are_one_line_and_2(url, judged, tmp_path, metric, more, message):
    other = _write(tmp_path / "other.jsonl", [{"src": "?", "mt": "?", "score": 1}])
    span = {"start": 0, "end": 999, "severity": "MINOR"}
    first = next(_rows())
    row = {"src": first["src"], "mt": first["mt"], "score": 1, "error_spans": [span]}
    broken = _write(tmp_path / "broken.jsonl", [row])
    odd = _write(tmp_path / "odd.jsonl", [row | {"error_spans": 5}])
    metric = metric.format(url=url, other=other, broken=broken, odd=odd)
    result = _run(judged, tmp_path / "out", metric, more=more)
    assert result.exit_code == 2, result.output
    assert message in result.stderr.splitlines()[-1].replace(str(broken), "")


def _requests(url, status):
    """Count the score requests that ended so, streamed or not."""
    text = httpx.get(f"{url}/metrics").text
    counts = [
        text.partition(f'scorekit_requests_total{{route="{route}",status="{status}"}} ')[2]
        for route in ("/v1/score", "/v1/score/stream")
    ]
    return sum(float(count.partition("\n")[0] or 0) for count in counts)


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (signal.SIGINT, 128 + signal.SIGINT, "stopped; resume with: the same command"),
    ],
)
def test_what_was_scored_before_an_end_is_not_asked_again(
    judged, tmp_path, no_charts, end, code, message
):
    """Check an end after the first metric and during the second."""
    first, second = FakeBackend("metricx"), Held("xcomet")
    with running_service(first) as m, running_service(second) as x:
        metrics = (f"m={m}", f"x={x}")
        command = [
            sys.executable,
            "-m",
            "scorekit",
            "meta-eval",
            str(judged),
            str(tmp_path / "out"),
        ]
        command += [part for metric in metrics for part in ("--metric", metric)]
        second.hold()
        process = forked.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert second.entered.wait(PATIENCE_S)
        process.send_signal(end)
        _, stderr = process.communicate()
        assert process.returncode == code and message in stderr and "Traceback" not in stderr
        assert _requests(m, 200) == 1
        second.go.set()
        result = _run(judged, tmp_path / "out", *metrics)
        assert result.exit_code == 0, result.stderr
        assert _requests(m, 200) == 1 and _requests(x, 200) > 0
    assert [
        metric_stats["scored"] for metric_stats in _read_stats(tmp_path / "out")[0]["metrics"][-2:]
    ] == [36, 36]


def test_a_service_that_is_full_is_asked_again(tmp_path, no_charts):
    """Check 429, which is sent if more than 256 wait: no translation fails by it."""
    judged = _write(tmp_path / "judged.jsonl", list(_rows(segments=200)))
    backend = Held("xcomet")
    with running_service(backend, max_queue_items=256) as url, ThreadPoolExecutor() as pool:
        backend.hold()
        running = pool.submit(_run, judged, tmp_path / "out", f"x={url}")
        wait_until(lambda: _requests(url, 429))
        backend.go.set()
        assert running.result().exit_code == 0, running.result().stderr
    assert _read_stats(tmp_path / "out")[1]["x"]["scored"] == 600


def test_overlong_texts_are_scored_as_is_asked_and_told(url, tmp_path, no_charts):
    """Check a text of more than 512 words, without windows: it fails or is cut."""
    rows = list(_rows())
    rows[5]["src"] = "word " * 600
    judged = _write(tmp_path / "judged.jsonl", rows)
    result = _run(judged, tmp_path / "cut", f"x={url}")
    assert "x: 1 texts were not read to their end" in result.stdout
    result = _run(judged, tmp_path / "failed", f"x={url}", more=("--overlong", "error"))
    assert result.exit_code == 0 and "x: no score of 1 (overlong 1)" in result.stdout
    changed = _run(judged, tmp_path / "cut", f"x={url}", more=("--overlong", "error"))
    assert changed.exit_code == 2
    assert "from something else (options): name another OUT" in changed.stderr


def test_people_who_make_no_difference_are_told(url, tmp_path):
    judged = _write(tmp_path / "same.jsonl", [row | {"spans": []} for row in _rows()])
    result = _run(judged, tmp_path / "out", f"x={url}")
    assert result.exit_code == 2 and "the same score: nothing to agree with" in result.stderr
    assert not (tmp_path / "out").exists()  # no request was sent


def test_a_service_that_is_down_is_told_at_once(judged, tmp_path):
    result = _run(judged, tmp_path / "out", f"x=http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1 and "cannot be reached" in result.stderr
    assert not list((tmp_path / "out").iterdir())
