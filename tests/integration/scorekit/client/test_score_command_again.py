"""Test `python -m scorekit score`: the next run retries transient failures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.errors import SampleError
from scorekit.files import temporary_of
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.judge import GOOD, running_judge
from testing.openai_server import FakeOpenAI
from testing.servers import running_service, wait_until
from tests.kits import forked

SAMPLES = [
    {"id": f"n{i}", "src": f"s{i}", "mt": "later" if i % 50 == 7 else f"m{i}"} for i in range(400)
]
LATER = [i + 1 for i in range(400) if i % 50 == 7]


class Moody(FakeBackend):
    """Fail samples with `later` with a transient error while it is `out_of_sorts`."""

    def __init__(self, **settings):
        super().__init__("metricx", **settings)
        self.out_of_sorts = True
        self.num_samples = 0

    def encode(self, samples, options):
        encoded = super().encode(samples, options)
        self.num_samples += len(samples)
        for index, sample in enumerate(samples):
            if "later" in sample.mt and self.out_of_sorts:
                encoded[index] = SampleError("timeout", "not now")
        return encoded


def _run(url, *arguments):
    return CliRunner().invoke(app, ["score", "--url", url, *arguments])


def _input(path):
    path.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    return str(path)


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("no_second_try")
def test_what_failed_for_the_moment_is_told_and_asked_for_again(tmp_path):
    source, out = _input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    moody = Moody()
    with running_service(moody) as url:
        first = _run(url, source, str(out))
        assert first.exit_code == 3, first.output
        assert "8 samples had transient errors; the same command retries them" in first.stderr
        assert [r["line"] for r in _read(out) if not r["ok"]] == LATER
        second_run = _run(url, source, str(out))
        assert second_run.exit_code == 3 and "failed: timeout" in second_run.stdout
        moody.out_of_sorts, moody.num_samples = False, 0
        last = _run(url, source, str(out), "--batch-size", "3")
        assert last.exit_code == 0 and "400" in last.stdout and "failed" not in last.stdout
        assert "8 samples" in last.stdout and moody.num_samples == len(LATER)
        results = _read(out)
        assert [r["line"] for r in results] == list(range(1, 401))
        assert [r["id"] for r in results] == [sample["id"] for sample in SAMPLES]
        assert [r["score"] for r in results] == [
            fake_score(TranslationSample(src=s["src"], mt=s["mt"]), 25.0) for s in SAMPLES
        ]
        expected_path = tmp_path / "whole.jsonl"
        assert _run(url, source, str(expected_path)).exit_code == 0
    assert expected_path.read_bytes() == out.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.meta.json",
        "whole.jsonl",
        "whole.jsonl.meta.json",
    }


@pytest.mark.usefixtures("no_second_try")
def test_killed_while_it_asks_again_it_goes_on_and_the_output_stays_whole(tmp_path):
    source, out = _input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    moody = Moody()
    with running_service(moody) as url:
        assert _run(url, source, str(out)).exit_code == 3
        before = out.read_bytes()
        moody.out_of_sorts = False
        moody.seconds_per_pair = 0.2
        command = [sys.executable, "-m", "scorekit", "score", "--url", url, source, str(out)]
        retry_path = tmp_path / "out.jsonl.again"
        child = forked.Popen(
            [*command, "--batch-size", "1", "--max-in-flight", "1"], stderr=subprocess.DEVNULL
        )
        wait_until(lambda: retry_path.exists() and retry_path.stat().st_size > len(before) // 4)
        child.kill()
        child.wait()
        assert out.read_bytes() == before
        with retry_path.open("ab") as file:
            file.write(b'{"line": 99, "ok": tr')  # as if killed in the middle of a write
        num_retried = retry_path.read_bytes().count(b"\n")
        assert 0 < num_retried < 400
        moody.seconds_per_pair, moody.num_samples = 0.0, 0
        assert _run(url, source, str(out)).exit_code == 0
        assert moody.num_samples <= sum(line > num_retried for line in LATER)
        expected_path = tmp_path / "whole.jsonl"
        assert _run(url, source, str(expected_path)).exit_code == 0
    assert out.read_bytes() == expected_path.read_bytes() and not retry_path.exists()


def test_a_refused_key_is_told_at_once_and_asked_for_again_when_it_is_mended(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = "source_lang", "target_lang", "source_text", "candidate"
    rows = [{n: GOOD[n] for n in names} | {"candidate": f"그 집은 {i}."} for i in range(20)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = json.dumps({"pass": True, "reason_code": "ok", "notes": ""})
    fake = FakeOpenAI(api_key="right", respond=lambda body, seed: verdict)
    with fake.running() as upstream, running_judge(upstream=upstream, key="old") as url:
        arguments = ["--task", "translation_filter", "--deadline", "600", str(source), str(out)]
        first = CliRunner().invoke(app, ["score", "--url", url, *arguments])
        assert first.exit_code == 3 and "failed: upstream" in first.stdout, first.output
        assert len(fake.requests) == 20  # each once, not until the deadline
        fake.api_key = "old"
        assert CliRunner().invoke(app, ["score", "--url", url, *arguments]).exit_code == 0
    assert [result["ok"] for result in _read(out)] == [True] * 20


@pytest.mark.usefixtures("no_second_try")
def test_an_output_that_is_begun_anew_forgets_what_was_asked_again(tmp_path):
    source, out = _input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    stale = tmp_path / "out.jsonl.again"
    half = temporary_of(tmp_path / "out.jsonl.meta.json")
    half.write_text("{")
    stale.write_text('{"line": 1, "id": "other", "ok": true, "score": 99.0}\n')
    with running_service(Moody()) as url:
        assert _run(url, source, str(out), "--overwrite").exit_code == 3
        assert not stale.exists() and not half.exists()
        assert _run(url, source, str(out)).exit_code == 3
    assert _read(out)[0]["id"] == "n0"
