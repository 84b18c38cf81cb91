"""Test the cache on the caller's side: right answers without requests, and no failed request."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys

import pytest

from scorekit.client import SyncScoringClient
from scorekit.errors import UserError
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.servers import running_app, running_service
from tests.kits import forked
from tests.kits.recording import Recorder

SAMPLES = [{"id": f"n{i}", "src": f"s{i}", "mt": f"wrong {i}"} for i in range(1200)]


class Revision(FakeBackend):
    def __init__(self, revision, service="xcomet"):
        super().__init__(service)
        self.revision = revision

    def load(self):
        description = super().load()
        description.revision = self.revision
        return description


def _recorder(backend=None):
    return Recorder(create_app(backend or FakeBackend("xcomet"), ServiceSettings(cache="memory")))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some" / "scores.sqlite"


def test_what_was_scored_once_is_not_sent_again(path):
    recorder = _recorder()
    with running_app(recorder) as url:
        with SyncScoringClient(url, cache_db=path) as client:
            first = client.score(SAMPLES)
        recorder.requests.clear()
        with SyncScoringClient(url, cache_db=path) as client:
            second = client.score([*SAMPLES, {"id": "new", "src": "a", "mt": "b"}])
    assert [s["src"] for s in recorder.samples] == ["a"]
    assert second.pop().id == "new"
    assert all(r.cached for r in second)
    assert [r.model_copy(update={"cached": False}) for r in second] == first
    assert second[0].error_spans and [r.id for r in second] == [s["id"] for s in SAMPLES]


@pytest.mark.parametrize(
    "change",
    [{"ref": "r"}, {"src": "s0 "}, {"mt": "Wrong 0"}],
    ids=["reference", "source", "translation"],
)
def test_another_text_is_another_score(path, change):
    recorder = _recorder()
    with running_app(recorder) as url, SyncScoringClient(url, cache_db=path) as client:
        (result,) = client.score(SAMPLES[:1])
        (other,) = client.score([SAMPLES[0] | change])
    assert len(recorder.samples) == 2 and result.score != other.score


def test_options_and_the_model_are_part_of_the_key(path):
    recorder = _recorder()
    with running_app(recorder) as url, SyncScoringClient(url, cache_db=path) as client:
        client.score(SAMPLES[:5])
        client.score(SAMPLES[:5], {"overlong": "error"})
        client.score(SAMPLES[:5], {"cache": True})  # this call bypasses the client's cache
        assert len(recorder.samples) == 10
    for backend in (Revision("other"), Revision("fake", "metricx")):
        other = _recorder(backend)
        with running_app(other) as url, SyncScoringClient(url, cache_db=path) as client:
            client.score(SAMPLES[:5])
        assert len(other.samples) == 5


def test_scores_of_a_model_that_was_exchanged_meanwhile_are_not_stored_under_the_old_name(path):
    old, new = _recorder(Revision("old")), _recorder(Revision("new"))
    behind = [old]

    async def switch(scope, receive, send):
        await (old if scope["type"] == "lifespan" else behind[0])(scope, receive, send)

    with running_app(new), running_app(switch) as url:
        with SyncScoringClient(url, cache_db=path, pin_model=False) as client:
            client.limits()
            behind[0] = new
            client.score(SAMPLES[:3])
            assert client.limits().revision == "new"
        behind[0] = old
        with SyncScoringClient(url, cache_db=path) as client:
            client.score(SAMPLES[:3])
    assert len(old.samples) == 3  # nothing was stored for the old revision


def test_failures_are_not_stored_and_cache_false_goes_past_it(path):
    recorder = _recorder()
    bad = [{"src": "s", "mt": "nan"}]
    with running_app(recorder) as url, SyncScoringClient(url, cache_db=path) as client:
        assert not client.score(bad)[0].ok and not client.score(bad)[0].ok
        client.score(SAMPLES[:2], {"cache": False})
        client.score(SAMPLES[:2])
        client.score(SAMPLES[:2], {"cache": False})
    assert len(recorder.samples) == 8


def test_a_damaged_value_is_scored_anew(path):
    recorder = _recorder()
    with running_app(recorder) as url:
        with SyncScoringClient(url, cache_db=path) as client:
            first = client.score(SAMPLES[:3])
        with sqlite3.connect(path) as db:
            (good,) = db.execute("SELECT value FROM scores LIMIT 1").fetchone()
            db.execute("UPDATE scores SET value = ?", (good.replace(b"score", b"SCORE"),))
        db.close()
        with SyncScoringClient(url, cache_db=path) as client:
            repeated = client.score(SAMPLES[:3])
    assert [r.score for r in repeated] == [r.score for r in first]
    assert len(recorder.samples) == 6


def test_a_value_that_stands_under_another_key_is_a_miss(path):
    with running_service(FakeBackend()) as url:
        with SyncScoringClient(url, cache_db=path) as client:
            first = client.score(SAMPLES[:2])
        with sqlite3.connect(path) as db:
            (first_key, _), (_, second_value) = db.execute(
                "SELECT key, value FROM scores"
            ).fetchall()
            db.execute("UPDATE scores SET value = ? WHERE key = ?", (second_value, first_key))
        db.close()
        with SyncScoringClient(url, cache_db=path) as client:
            assert [r.score for r in client.score(SAMPLES[:2])] == [r.score for r in first]


def test_a_file_that_another_process_holds_fails_no_request(path, caplog, monkeypatch):
    monkeypatch.setattr("scorekit.client.cache._BUSY_S", 0.05)
    recorder = _recorder()
    with running_app(recorder) as url, SyncScoringClient(url, cache_db=path) as client:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        with caplog.at_level(logging.WARNING):
            assert all(r.ok for r in client.score(SAMPLES[:3]))
            assert all(r.ok for r in client.score(SAMPLES[:3]))
        holder.close()
    assert len(recorder.samples) == 6
    assert caplog.text.count("database is locked") == 1  # further attempts pause


def test_a_file_that_is_no_database_is_told_at_once(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes\n" * 100)
    with pytest.raises(UserError, match=r"notes\.txt: file is not a database; name another"):
        SyncScoringClient("http://127.0.0.1:1", cache_db=path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"\0" * 4096 + content[4096:],  # a first page that was never written
        lambda content: content[:4096] + b"\xff" * (len(content) - 4096),
        lambda content: content[: len(content) // 3],
    ],
    ids=["no header", "pages", "cut"],
)
def test_a_damaged_file_is_put_aside_and_begun_anew(path, damage, caplog):
    recorder = _recorder()
    with running_app(recorder) as url:
        with SyncScoringClient(url, cache_db=path) as client:
            first = client.score(SAMPLES)
        damaged = damage(path.read_bytes())
        path.write_bytes(damaged)
        with caplog.at_level(logging.WARNING), SyncScoringClient(url, cache_db=path) as client:
            repeated = client.score(SAMPLES)
            num_sent = len(recorder.samples)
            assert all(result.cached for result in client.score(SAMPLES))
    assert [r.score for r in repeated] == [r.score for r in first]
    assert num_sent == len(recorder.samples) == 2 * len(SAMPLES)
    (aside,) = path.parent.glob("scores.sqlite.damaged-*")
    assert aside.read_bytes() == damaged and "is damaged: renamed to" in caplog.text


@pytest.mark.parametrize("harm", ["damaged", "deleted"])
def test_a_file_that_is_harmed_in_mid_run_is_begun_anew(path, harm, caplog, monkeypatch):
    monkeypatch.setattr("scorekit.client.cache._REST_S", 0.0)
    samples = [
        sample | {"mt": sample["mt"] * 100} for sample in SAMPLES[:500]
    ]  # beyond SQLite's memory
    recorder = _recorder()
    with running_app(recorder) as url, SyncScoringClient(url, cache_db=path) as client:
        first = client.score(samples)
        if harm == "damaged":
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.seek(4096)
                file.write(b"\xff" * (size - 4096))
        else:
            path.unlink()
        with caplog.at_level(logging.WARNING):
            repeated = client.score(samples)
        client.score(samples)
        recorder.requests.clear()
        assert all(result.cached for result in client.score(samples))
    assert [r.score for r in repeated] == [r.score for r in first] and not recorder.samples
    assert ("is damaged: renamed to" in caplog.text) == (harm == "damaged")


def test_a_file_that_another_process_holds_at_the_start_stops_nothing(path, monkeypatch):
    monkeypatch.setattr("scorekit.client.cache._BUSY_S", 0.05)
    monkeypatch.setattr("scorekit.client.cache._REST_S", 0.0)
    path.parent.mkdir()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    recorder = _recorder()
    with running_app(recorder) as url, SyncScoringClient(url, cache_db=path) as client:
        assert all(r.ok for r in client.score(SAMPLES[:3]))
        holder.close()
        for _ in range(3):  # the first time the file is empty
            assert all(r.ok for r in client.score(SAMPLES[:3]))
    assert len(recorder.samples) == 6


def test_several_processes_share_a_file(path):
    code = (
        "import sys\nfrom scorekit.client import SyncScoringClient\n"
        "with SyncScoringClient(sys.argv[1], cache_db=sys.argv[2], batch_size=20) as client:\n"
        "    own = [{'src': f's{i}', 'mt': 'm'} for i in range(400)]\n"
        "    assert all(r.ok for r in client.score(own))\n"
    )
    with running_service(FakeBackend()) as url:
        command = [sys.executable, "-c", code, url, str(path)]
        children = [forked.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
        complaints = [child.communicate(timeout=180)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0] and not any(complaints)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM scores").fetchone() == (400,)
    db.close()
