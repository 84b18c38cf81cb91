"""Scores, raw spans and ids of every class against those of unbabel-comet, which stand in files
(`recompute_comet.py`); in float64, or a label next to another would turn with the processor."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bench.kit.xcomet_checkpoints import in_float64, score
from scorekit.schemas import Scored, TranslationSample, XCometOptions
from scorekit.server.backend import Encoded
from services.xcomet.model import XCometBackend
from tests.kits.comet import golden as comet_golden
from tests.kits.float64 import float64

#: What was asked for; in float64 it is met by far. Upstream's own sum of the spans' severities is
#: in float32, whatever the model is in.
CLOSE = 1e-6


@pytest.fixture(scope="module", autouse=True)
def exact_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with float64():
        yield
    torch.set_num_threads(before)


@dataclass
class Case:
    """rows: samples. golden: what upstream says of each."""

    name: str
    folder: Path
    backend: XCometBackend
    rows: list[dict[str, str]]
    golden: dict[str, Any]


@pytest.fixture(scope="module", params=[*comet_golden.CHECKPOINTS, "demo"])
def case(request, tmp_path_factory) -> Case:
    folder = comet_golden.build(request.param, tmp_path_factory.mktemp("comet"))
    rows, golden = comet_golden.rows(request.param), comet_golden.read(request.param)
    return Case(request.param, folder, in_float64(folder), rows, golden)


def as_tuples(result: Scored) -> list[list[Any]]:
    return [[s.start, s.end, s.severity, s.text] for s in result.error_spans or []]


def test_the_weights_are_those_that_upstream_read(case):
    """Or all the rest is in vain: `recompute_comet.py` is due where one is built otherwise."""
    assert comet_golden.digest(case.folder) == case.golden["weights"]


@pytest.mark.parametrize("sizes", [[4, 1, 9], [80]], ids=["uneven", "at once"])
def test_scores_and_raw_spans_equal_predict(case, sizes):
    """Batches mixed in length, with and without a reference, also with an empty one. Large batches
    without the longest texts, to which all the others would be padded."""
    marks = case.backend.comet.marks_errors if comet_golden.is_joint(case.name) else False
    theirs = case.golden["spans"] if marks else [None] * len(case.rows)
    expected = list(zip(case.rows, case.golden["scores"], theirs, strict=True))
    random.Random(0).shuffle(expected)
    if sizes == [80]:
        expected = [one for one in expected if max(map(len, one[0].values())) < 500]
    rows = [{"src": "", **row} for row, _, _ in expected]
    results = score(case.backend, rows, sizes, span_offsets="upstream")
    for (row, their_score, their_spans), ours in zip(expected, results, strict=True):
        assert ours.score == pytest.approx(their_score, abs=CLOSE), row
        assert (ours.error_spans is None) == (not marks)
        assert as_tuples(ours) == [[a, b, s.upper(), t] for a, b, s, t, _ in their_spans or []], row
        for mine, span in zip(ours.error_spans or [], their_spans or [], strict=True):
            assert mine.confidence == pytest.approx(span[4], abs=CLOSE)


def test_long_texts_are_flagged_as_they_are_cut(case):
    (long, *_) = [row for row in case.rows if len(row["mt"]) > 1000]
    (ours,) = score(case.backend, [long])
    read = comet_golden.texts_read(case.name)
    assert dict(ours.truncated) == {name: name in read for name in ("src", "mt", "ref")}
    assert 0 < ours.mt_covered < len(long["mt"])


# ---- of xCOMET -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mix(tmp_path_factory) -> Case:
    folder = comet_golden.build("xcomet_mix", tmp_path_factory.mktemp("comet"))
    golden = comet_golden.read("xcomet_mix")
    return Case("xcomet_mix", folder, in_float64(folder), comet_golden.rows("xcomet_mix"), golden)


def test_an_empty_reference_is_read_as_a_text(mix):
    """Three passes, and another score than without one."""
    empty = next(row for row in mix.rows if row.get("ref") == "")
    with_it, without = score(mix.backend, [empty, {"src": empty["src"], "mt": empty["mt"]}])
    assert with_it.tokens > 2 * without.tokens and with_it.score != without.score


def ids_digest(encoded: Encoded) -> str:
    return comet_golden.row_digest(encoded.payload.rows, encoded.payload.offsets.tolist())


def test_ids_are_upstreams(mix):
    """Every pass reads the ids that upstream would give it."""
    samples = [TranslationSample(**row) for row in mix.rows]
    encoded = mix.backend.encode(samples, XCometOptions())
    assert [ids_digest(one) for one in encoded] == mix.golden["ids"]


@pytest.mark.parametrize("limit", [512, 64])
def test_ids_are_upstreams_at_every_edge(mix, limit):
    """One token more or less around each of the limits, also with a lower `max_input_length`;
    `truncated` and `mt_covered` by the ids that are there."""
    seen = set()
    rows = comet_golden.edge_rows(limit)
    assert len(rows) == len(mix.golden["edges"][str(limit)])
    for row, digest in zip(rows, mix.golden["edges"][str(limit)], strict=True):
        (encoded,) = mix.backend.encode(
            [TranslationSample(**row)], XCometOptions(max_input_length=limit)
        )
        assert ids_digest(encoded) == digest
        check_flags(mix.backend, row, encoded, limit)
        seen.add(tuple(encoded.fields["truncated"].values()))
    assert len(seen) >= 5, seen


def check_flags(backend: XCometBackend, row: dict[str, str], encoded: Encoded, limit: int) -> None:
    """A text was read to its end where all of its ids stand in each pass that has it."""
    tokenizer = backend.comet.tokenizer
    passes = encoded.payload.rows
    assert encoded.fields["tokens"] == sum(map(len, passes))
    assert encoded.length == max(map(len, passes)) <= limit
    whole = {k: tokenizer(text, add_special_tokens=False).input_ids for k, text in row.items()}
    orders = [("mt", "src"), ("mt", "ref"), ("mt", "src", "ref")][: len(passes)]
    for name in row:
        lost = False
        for ids, order in zip(passes, orders, strict=True):
            if name in order:
                start = 1 + sum(
                    min(len(whole[n]), limit - 4) + 2 for n in order[: order.index(name)]
                )
                lost = lost or ids[start : start + len(whole[name])] != whole[name]
        assert encoded.fields["truncated"][name] == lost, (name, row)
    read = [tuple(o) for o in encoded.payload.offsets.tolist() if tuple(o) != (0, 0)]
    cut = encoded.fields["truncated"]["mt"]
    assert encoded.fields["mt_covered"] == (read[-1][1] if cut else len(row["mt"]))


def test_an_altered_formula_is_noticed(mix):
    """These files would tell: another share of the spans moves scores by far more than CLOSE."""
    with patch.object(mix.backend.comet, "_shares", [0.12, 0.33, 0.32, 0.23]):
        ours = score(mix.backend, mix.rows[:20])
    apart = [abs(a.score - b) for a, b in zip(ours, mix.golden["scores"], strict=False)]
    assert max(apart) > 1000 * CLOSE
