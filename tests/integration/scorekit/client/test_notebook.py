"""Test the client as a notebook uses it: in a running loop, with a bar, on data frames."""

from __future__ import annotations

import asyncio
import math
import signal
import threading

import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

from scorekit.client import SyncScoringClient
from scorekit.errors import UserError
from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import free_port, running_service, wait_until


@pytest.fixture(scope="module")
def url():
    with running_service(FakeBackend("xcomet")) as url:
        yield url


@pytest.fixture
def client(url):
    with SyncScoringClient(url, batch_size=10) as client:
        yield client


FRAME = pd.DataFrame(
    {
        "src": ["하나", "둘", "셋", "넷"],
        "mt": ["wrong", "", "nan", "ok"],
        "ref": ["r", None, math.nan, ""],
        "system": ["a", "a", "b", "b"],
    },
    index=[7, 7, "x", 9],
)


def _score_of(src, mt, ref=None):
    return fake_score(TranslationSample(src=src, mt=mt, ref=ref), 1.0)


def test_a_frame_gets_its_columns_in_order_and_keeps_index_and_columns(client):
    scored = client.score_frame(FRAME)
    assert list(scored.index) == [7, 7, "x", 9]
    assert list(scored.columns) == [*FRAME.columns, "score", "ok", "error", "error_spans"]
    assert scored["score"].dtype == "float64" and scored["ok"].dtype == "bool"
    first, second, third, fourth = scored.itertuples()
    assert first.score == _score_of("하나", "wrong", "r")
    assert second.score == _score_of("둘", "") and fourth.score == _score_of("넷", "ok")
    assert math.isnan(third.score) and not third.ok and third.error.startswith("non_finite: ")
    assert first.ok and first.error is None
    assert first.error_spans[0]["text"] == "wrong" and third.error_spans is None
    assert list(FRAME.columns) == ["src", "mt", "ref", "system"]  # the passed frame is unchanged


def test_a_frame_of_strings_with_blanks_of_pandas_own_kind(client):
    frame = pd.DataFrame({"src": ["a"], "mt": ["b"], "ref": [pd.NA]}, dtype="string")
    assert client.score_frame(frame)["score"].tolist() == [_score_of("a", "b")]


def test_metricx_frames_have_no_spans_and_an_empty_frame_stays_empty(client):
    assert "error_spans" not in client.score_frame(FRAME[2:3])  # no good result, no spans
    empty = client.score_frame(FRAME[:0])
    assert len(empty) == 0 and {"score", "ok", "error"} <= set(empty.columns)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pd.DataFrame({"src": ["a"], "text": ["b"]}), "no column 'mt'; it has: src, text"),
        (pd.DataFrame({"src": ["a", None], "mt": [5, "d"]}), r"row 0, column 'mt': 5 \(int\)"),
        (pd.DataFrame({"src": [None], "mt": ["c"]}), "no row .* row 0, column 'src': None"),
        (pd.DataFrame({"src": ["a"], "mt": ["c"], "ref": [1.5]}), "row 0, column 'ref': 1.5"),
        (pd.DataFrame([["a", "b", "c"]], columns=["src", "mt", "mt"]), "several columns 'mt'"),
        (FRAME.assign(score=1.0), "has a column 'score' already. Rename or drop it"),
        (FRAME.assign(windows=0), "has a column 'windows' already"),
    ],
)
def test_what_is_wrong_with_a_frame_is_said_before_anything_is_asked(frame, message):
    with SyncScoringClient(f"http://127.0.0.1:{free_port()}") as nobody:
        with pytest.raises(UserError, match=message):
            nobody.score_frame(frame)


def test_a_row_without_a_text_fails_alone(client):
    frame = pd.DataFrame(
        {"src": ["a", None, "b", "c", pd.NA], "mt": ["x", "y", math.nan, "z", "w"]},
        index=[3, 1, 1, 2, 0],
        dtype=object,
    )
    frame["ref"] = [None, None, None, 1.5, None]
    scored = client.score_frame(frame)
    assert scored["ok"].tolist() == [True, False, False, False, False]
    assert scored["score"].iloc[0] == _score_of("a", "x") and scored["score"].isna().sum() == 4
    _, two, three, four, five = scored["error"]
    assert two == "invalid_input: column 'src': None is not text"
    assert three == "invalid_input: column 'mt': nan (float) is not text"
    assert "column 'ref': 1.5 (float)" in four and "column 'src': " in five


def test_two_metrics_stand_side_by_side(client):
    by_one = client.score_frame(FRAME, prefix="one_")
    both = client.score_frame(by_one, prefix="two_")
    assert list(both.columns) == [
        *FRAME.columns,
        *(f"{p}_{n}" for p in ("one", "two") for n in ("score", "ok", "error", "error_spans")),
    ]
    assert both["one_score"].equals(both["two_score"].rename("one_score"))
    with pytest.raises(UserError, match="has a column 'two_score' already"):
        client.score_frame(both, prefix="two_")


def test_a_dataset_gets_the_columns_of_a_frame(client):
    dataset = Dataset.from_pandas(FRAME.reset_index(drop=True))
    scored = client.score_dataset(dataset, prefix="x_", progress=True)
    frame = client.score_frame(FRAME.reset_index(drop=True), prefix="x_")
    assert scored.column_names == list(frame.columns)
    for name in ("x_score", "x_ok", "x_error"):
        values = frame[name].astype(object).where(frame[name].notna(), None)
        assert list(scored[name]) == values.tolist()
    assert scored["x_error_spans"][0][0]["text"] == "wrong" and scored["x_error_spans"][2] is None
    assert dataset.column_names == ["src", "mt", "ref", "system"]
    assert scored.features["x_error"].dtype == "string"
    both = client.score_dataset(scored)
    assert list(both["score"]) == list(scored["x_score"])
    assert client.score_dataset(dataset.select([])).num_rows == 0


def test_a_row_of_a_dataset_without_a_text_fails_alone(client):
    dataset = Dataset.from_dict({"src": ["a", None], "mt": ["x", "y"], "ref": [None, "r"]})
    scored = client.score_dataset(dataset.with_format("numpy"))
    assert list(scored.with_format(None)["score"]) == [_score_of("a", "x"), None]
    assert scored["error"][1] == "invalid_input: column 'src': None is not text"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (Dataset.from_dict({"src": ["a"]}), "the dataset has no column 'mt'; it has: src"),
        (Dataset.from_dict({"src": [None], "mt": ["a"]}), "no row of the dataset can be scored"),
        (Dataset.from_dict({"src": ["a"], "mt": ["b"], "ok": [1]}), "has a column 'ok' already"),
        (DatasetDict(), "score_dataset: a DatasetDict. Give a datasets.Dataset"),
        (FRAME, "score_dataset: a DataFrame. Give a datasets.Dataset"),
    ],
)
def test_what_is_wrong_with_a_dataset_is_said_before_anything_is_asked(table, message):
    with SyncScoringClient(f"http://127.0.0.1:{free_port()}") as nobody:
        with pytest.raises(UserError, match=message):
            nobody.score_dataset(table)
        with pytest.raises(UserError, match=r"score_frame: a Dataset\. Give a pandas data frame"):
            nobody.score_frame(Dataset.from_dict({"src": ["a"], "mt": ["b"]}))


def test_inside_a_running_loop_with_a_bar(client, capsys):
    async def cell():
        asyncio.get_running_loop()  # as in a notebook
        samples = [{"src": f"s{i}", "mt": "m"} for i in range(50)]
        return client.score(samples, progress=True), client.score_frame(FRAME, progress=True)

    results, frame = asyncio.run(cell())
    assert [r.score for r in results] == [_score_of(f"s{i}", "m") for i in range(50)]
    assert len(frame) == 4
    out, err = capsys.readouterr()
    assert "50/50" in err and "4/4" in err and "50/50" not in out


def test_without_progress_nothing_is_printed(client, capsys):
    client.score([{"src": "a", "mt": "b"}])
    assert not capsys.readouterr().err


def test_an_interrupt_gives_up_what_is_in_flight():
    """Check a notebook's stop button: the service does not work for nothing."""
    backend = FakeBackend(seconds_per_batch=0.2)
    samples = [{"src": f"s{i}", "mt": "m"} for i in range(200)]

    def stop():
        wait_until(lambda: backend.batches)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with running_service(backend) as url:
        with SyncScoringClient(url, batch_size=1, max_in_flight=1) as client:
            threading.Thread(target=stop).start()
            with pytest.raises(KeyboardInterrupt):
                client.score(samples)
            (result,) = client.score([{"src": "after", "mt": "m"}])  # the client still works
    assert result.ok and sum(backend.batches) < 200
