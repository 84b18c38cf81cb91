"""Test `python -m scorekit score` with several URLs, one of another service or model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from scorekit.__main__ import app
from scorekit.server.fake import FakeBackend
from testing.servers import free_port, running_service


class OtherModel(FakeBackend):
    """A fake model that describes itself with other values."""

    def __init__(self, **values):
        super().__init__()
        self._values = values

    def load(self):
        description = super().load()
        for name, value in self._values.items():
            setattr(description, name, value)
        return description


def run(urls, folder, num_rows):
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    rows = (json.dumps({"src": f"s{i}", "mt": f"m{i}"}) + "\n" for i in range(num_rows))
    source.write_text("".join(rows), encoding="utf-8")
    options = [part for url in urls for part in ("--url", url)]
    result = CliRunner().invoke(
        app, ["score", *options, str(source), str(out), "--batch-size", "8"]
    )
    return result, out


@pytest.mark.parametrize("num_rows", [3, 400])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (FakeBackend("xcomet"), "has service 'metricx'"),
        (OtherModel(model="other"), "has model 'fake-metricx'"),
        (OtherModel(revision="other"), "has revision 'fake'"),
        (OtherModel(dtype="float16"), "has dtype "),
        (OtherModel(tokenizer="other"), "has tokenizer "),
    ],
    ids=["service", "model", "revision", "dtype", "tokenizer"],
)
def test_urls_of_two_models_are_refused_before_the_first_row(tmp_path, other, words, num_rows):
    backend = FakeBackend()
    with running_service(backend) as first, running_service(other) as second:
        result, out = run([first, second], tmp_path, num_rows)
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: --url: {first} {words}") and second in line
    assert not out.exists() and not backend.batches and not other.batches


def test_a_replica_that_is_away_is_named_and_the_others_score(tmp_path, caplog):
    dead = f"http://127.0.0.1:{free_port()}"
    with running_service(FakeBackend()) as first:
        result, out = run([dead, first], tmp_path, 20)
    assert result.exit_code == 0, result.stderr
    assert len(out.read_text(encoding="utf-8").splitlines()) == 20
    assert f"{dead} does not answer. The other URLs are used" in caplog.text
