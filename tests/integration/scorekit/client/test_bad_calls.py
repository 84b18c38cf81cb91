"""Check that wrong calls of the clients are refused in one line, before anything is asked.

Each case here gave a wrong result without a word, failed after its answers had come, or is the
right call beside such a case.
"""

from __future__ import annotations

import asyncio
import datetime
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict

from scorekit.client import (
    Embeddings,
    RemoteScorer,
    ScoringClient,
    SyncScoringClient,
    raise_for_failures,
)
from scorekit.client.deduplication import UniqueSamples
from scorekit.client.tables import as_sample_list
from scorekit.errors import SampleError, UserError
from scorekit.retrieval.client import Retriever
from scorekit.rewards import SyncCompositeReward
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.server.fake import FakeBackend
from scorekit.server.local import LocalScorer
from testing.servers import free_port, running_service

SAMPLE = {"src": "a", "mt": "b"}
PAIR = [SAMPLE, {"src": "c", "mt": "d", "ref": None, "id": "second"}]


@pytest.fixture(scope="module")
def url() -> Any:
    with running_service(FakeBackend()) as address:
        yield address


@pytest.fixture
def unused_url() -> str:
    """Return a URL that nothing answers at: what is refused must not get there."""
    return f"http://127.0.0.1:{free_port()}"


def test_a_list_of_samples_may_be_any_container(url: str) -> None:
    with SyncScoringClient(url) as client:
        expected = client.score(PAIR)
        for samples in (tuple(PAIR), iter(PAIR), np.array(PAIR)):
            scores = [result.score for result in client.score(samples)]
            assert scores == [result.score for result in expected]
        assert client.score(np.array([])) == client.score(iter(())) == []
        assert len(client.score(iter(PAIR), progress=True)) == 2


def test_a_field_may_be_a_tuple() -> None:
    of_list, of_tuple = ([{**SAMPLE, "images": kind(["x", "y"])}] for kind in (list, tuple))
    assert UniqueSamples(of_tuple, 1000).bodies == UniqueSamples(of_list, 1000).bodies


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (SAMPLE, "samples: a dict. Give a list"),
        ("ab", "samples: a str. Give a list"),
        (None, "samples: a NoneType. Give a list"),
        (["ab"], "samples.0: a str. Give a dict"),
        ([SAMPLE, ("a", "b")], "samples.1: a tuple. Give a dict with src and mt"),
        (iter([SAMPLE, None]), "samples.1: a NoneType. Give a dict"),
        (pd.DataFrame([SAMPLE]), r"samples: a DataFrame. Use score_frame\(frame\)"),
        (DatasetDict(train=Dataset.from_list(PAIR)), "samples: a DatasetDict. Choose a split"),
        (Dataset.from_list([{"src": "a", "x": "b"}]), "dataset has no column 'mt'; it has: src, x"),
    ],
)
def test_what_is_no_list_of_samples_is_refused_unasked(
    unused_url: str, samples: Any, message: str
) -> None:
    async def stream() -> None:
        async with ScoringClient(unused_url) as client:
            async for _ in client.stream(samples):
                pass

    with SyncScoringClient(unused_url) as client, pytest.raises(UserError, match=message):
        client.score(samples)
    if not isinstance(samples, Iterator):  # of which an element is gone
        with pytest.raises(UserError, match=message):
            asyncio.run(stream())


def test_a_field_that_json_has_as_another_text_is_refused(url: str) -> None:
    with SyncScoringClient(url) as client:
        with pytest.raises(UserError, match=r"samples\.0: the field name 1 is no text"):
            client.score([{1: "a", "mt": "b"}])  # type: ignore[dict-item]
        with pytest.raises(UserError, match=r"samples\.0\.x: a PosixPath. Give a text"):
            client.score([{**SAMPLE, "x": pathlib.Path("b.txt")}])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"mt": datetime.date(2020, 1, 1)}, "mt: datetime.date(2020, 1, 1) (date) is not text"),
        ({"mt": b"b"}, "mt: b'b' (bytes) is not text"),
        ({"mt": 3}, "mt: 3 (int) is not text"),
        ({"src": None}, "src: None is not text"),
        ({"ref": 1.5}, "ref: 1.5 (float) is not text"),
        ({"src_lang": float("nan")}, "src_lang: nan (float) is not text"),
        ({"task": "mqm", "answer": None}, "answer: None is not text"),
    ],
)
def test_a_sample_whose_text_is_none_fails_alone(
    url: str, fields: dict[str, Any], error: str
) -> None:
    bad = {**SAMPLE, "id": "bad", **fields}
    with SyncScoringClient(url) as client:
        first, failed, last = client.score([SAMPLE, bad, PAIR[1]])
    assert first.ok and last.ok and not failed.ok
    assert (failed.id, failed.error.type, failed.error.message) == ("bad", "invalid_input", error)


@pytest.mark.parametrize(
    "ref", [None, "", float("nan"), np.float32("nan"), pd.NA, pd.NaT, np.nan], ids=repr
)
def test_a_reference_that_a_table_leaves_blank_is_none(ref: Any) -> None:
    samples = [{**SAMPLE, "ref": ref}, SampleForScoring("a", "b", ref=ref), SAMPLE]
    assert UniqueSamples(samples, 1000).bodies == UniqueSamples([SAMPLE], 1000).bodies


def test_of_a_dataset_the_columns_of_a_translation_are_taken(url: str) -> None:
    rows = [{**SAMPLE, "ref": "r", "n": k, "id": k, "tgt_lang": "ko"} for k in range(3)]
    dataset = Dataset.from_list(rows)
    with SyncScoringClient(url) as client:
        expected = [result.score for result in client.score([{**SAMPLE, "ref": "r"}] * 3)]
        for samples in (
            dataset,
            dataset.with_format("numpy"),
            dataset.to_iterable_dataset(),
            dataset.to_iterable_dataset().map(lambda row: row),  # its columns are not known
        ):
            assert [result.score for result in client.score(samples)] == expected


def test_of_a_judges_dataset_all_columns_are_taken() -> None:
    rows = [{"task": "t", "candidate": "c", "id": "i"}]
    assert as_sample_list(Dataset.from_list(rows)) == rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: 0. Give"),
        ({"batch_size": -3}, "batch_size: -3. Give"),
        ({"batch_size": 2.5}, "batch_size: 2.5. Give"),
        ({"deadline_s": 0}, "deadline_s: 0. Give"),
        ({"deadline_s": float("nan")}, "deadline_s: nan. Give"),
        ({"deadline_s": "3"}, "deadline_s: '3'. Give"),
    ],
)
def test_limits_that_limit_nothing_are_refused(
    unused_url: str, options: dict[str, Any], message: str
) -> None:
    with SyncScoringClient(unused_url) as client, pytest.raises(UserError, match=message):
        client.score([SAMPLE], **options)
    with (
        pytest.raises(UserError, match=message),
        SyncScoringClient(unused_url, **options) as client,
    ):
        client.score([SAMPLE])


def test_results_are_checked_to_be_results(url: str) -> None:
    for wrong, message in (
        ([{"ok": False}], "results.0: a dict"),
        (None, "results: a NoneType"),
    ):
        with pytest.raises(UserError, match=message):
            raise_for_failures(wrong)  # type: ignore[arg-type]
    with RemoteScorer(url) as scorer:
        output = scorer.score_batch([SAMPLE, {"src": "a", "mt": "nan", "id": "bad"}])
    with pytest.raises(SampleError, match="bad"):
        raise_for_failures(output.metadata)


def test_scorers_take_dicts_as_they_take_samples(url: str) -> None:
    """Compare a remote scorer and one in this process, with objects and with dicts."""
    objects = [SampleForScoring("a", "b"), SampleForScoring("c", "d", id="second")]
    with RemoteScorer(url) as remote:
        expected = remote.score_batch(objects, ScoringConfig(batch_size=1))
        for scorer in (remote, LocalScorer(FakeBackend())):
            for samples in (objects, PAIR, iter(PAIR)):
                output = scorer.score_batch(samples, {"batch_size": 1})
                assert output.sequence_scores == expected.sequence_scores
                assert [result.id for result in output.metadata] == [None, "second"]
        assert remote.submit_batch(PAIR, {}).result().sequence_scores == expected.sequence_scores


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (SAMPLE, "samples: a dict. Give a list"),
        (SampleForScoring("a", "b"), "samples: a SampleForScoring. Give a list"),
        ([SAMPLE, {"src": "a"}], "samples.1: mt is missing"),
        ([{**SAMPLE, "source": "x"}], "samples.0: unknown field 'source'. Choose from src, mt"),
        ([{**SAMPLE, "ref": float("nan")}], "samples.0.ref: a float. Give a text"),
        ([SampleForScoring("a", None)], "samples.0.mt: a NoneType"),  # type: ignore[arg-type]
        ([("a", "b")], "samples.0: a tuple. Give a dict"),
    ],
)
def test_scorers_name_the_wrong_sample(unused_url: str, samples: Any, message: str) -> None:
    with RemoteScorer(unused_url) as remote:
        for scorer in (remote, LocalScorer(FakeBackend())):
            with pytest.raises(UserError, match=message):
                scorer.score_batch(samples)


def test_scorers_name_the_wrong_option(unused_url: str) -> None:
    with RemoteScorer(unused_url) as remote:
        for scorer in (remote, LocalScorer(FakeBackend())):
            with pytest.raises(UserError, match=r"cfg: batch_sise: .*did you mean batch_size"):
                scorer.score_batch([SAMPLE], {"batch_sise": 2})


def test_a_single_text_is_no_list_of_texts(unused_url: str) -> None:
    with Embeddings(unused_url) as embedder, pytest.raises(UserError, match="texts: a str"):
        embedder.embed("Hello.")
    with Retriever(unused_url) as retriever:
        with pytest.raises(UserError, match="queries: a str"):
            retriever.search("sales")
        with pytest.raises(UserError, match=r"exclude\.0: a str"):
            retriever.search(["sales"], exclude=["page-1"])
        with pytest.raises(UserError, match="exclude: 1 lists for 2 queries"):
            retriever.search(["sales", "costs"], exclude=[["page-1"]])


def group_sizes(samples: list[Any]) -> list[float]:
    """Return for each sample of a group how many it has: a rule of groups."""
    return [float(len(samples))] * len(samples)


def test_groups_of_a_tensor_are_groups() -> None:
    """Check that equal numbers of a tensor are one group: its elements equal none."""
    rule = {"rule": f"{__name__}:group_sizes", "group": True, "weight": 1.0}
    with SyncCompositeReward({"components": {"size": rule}}) as reward:
        numbers = [7, 7, 9]
        element_lists = [[torch.tensor(n) for n in numbers], [np.int64(n) for n in numbers]]
        forms = [numbers, torch.tensor(numbers), np.array(numbers), iter(numbers), *element_lists]
        for groups in forms:
            results = reward.score([SAMPLE] * 3, groups=groups)
            assert [result.reward for result in results] == [2.0, 2.0, 1.0]
        assert [r.reward for r in reward.score_group(iter([SAMPLE] * 3))] == [3.0] * 3
        with pytest.raises(UserError, match=r"groups\.0: nan"):
            reward.score([SAMPLE] * 2, groups=[float("nan")] * 2)
        with pytest.raises(UserError, match="deadline_s: True"):
            reward.score_group([SAMPLE], deadline_s=True)
        with pytest.raises(UserError, match="samples: a dict"):
            reward.score_group(SAMPLE)  # type: ignore[arg-type]


def test_options_of_the_constructor_hold_where_a_call_says_nothing() -> None:
    backend = FakeBackend()
    scorer = LocalScorer(backend, batch_size=2, max_input_length=16, overlong="error")
    samples = [{"src": f"{n}", "mt": "b"} for n in range(5)] + [{"src": "w " * 20, "mt": "b"}]
    output = scorer.score_batch(samples)
    assert [score is None for score in output.sequence_scores] == [False] * 5 + [True]
    assert sorted(backend.batches) == [1, 2, 2]
    backend.batches.clear()
    output = scorer.score_batch(samples, {"max_input_length": 64, "batch_size": 64})
    assert None not in output.sequence_scores and backend.batches == [6]
    with pytest.raises(UserError, match="cfg: batch_size: "):
        LocalScorer(backend, batch_size=0)
