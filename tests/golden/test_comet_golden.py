"""Compare scores, raw spans and ids of every class with files of unbabel-comet's.

`recompute_comet.py` writes the files. The tests use float64: in float32 a label next to another
would depend on the processor."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from scorekit.schemas import Scored, TranslationSample, XCometOptions
from scorekit.server.backend import Encoded
from services.xcomet.model import XCometBackend
from testing.checkpoints.xcomet import in_float64, score
from tests.kits.comet import golden as comet_golden
from tests.kits.float64 import float64

#: The required tolerance; in float64 the difference is much smaller. Upstream sums the spans'
#: severities in float32 for any dtype of the model.
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
    """Holds a checkpoint's samples (rows) and upstream's results for each (golden)."""

    name: str
    folder: Path
    backend: XCometBackend
    rows: list[dict[str, str]]
    golden: dict[str, Any]


@pytest.fixture(scope="module", params=[*comet_golden.CHECKPOINTS, "demo"])
def case(request, comet_folder) -> Case:
    folder = comet_folder(request.param)
    rows, golden = comet_golden.rows(request.param), comet_golden.read(request.param)
    return Case(request.param, folder, in_float64(folder), rows, golden)


def longest_text(expected: tuple[dict[str, str], Any, Any]) -> int:
    return max(map(len, expected[0].values()))


def as_tuples(result: Scored) -> list[list[Any]]:
    return [[s.start, s.end, s.severity, s.text] for s in result.error_spans or []]


def test_the_weights_are_those_that_upstream_read(case):
    """Check that the files fit the weights: run `recompute_comet.py` after changing how one is
    built."""
    assert comet_golden.digest(case.folder) == case.golden["weights"]


def test_scores_and_raw_spans_equal_predict(case):
    """Score batches of mixed lengths, with, without and with an empty reference.

    The longest texts are in small uneven batches with a few short ones: they would pad all of a
    large one. Others are mixed in one batch, and lie beside ones of their length in the rest. The
    demo's model is a hundred times larger than the others: it scores fewer texts."""
    marks = case.backend.comet.marks_errors if comet_golden.is_joint(case.name) else False
    golden_spans = case.golden["spans"] if marks else [None] * len(case.rows)
    expected = list(zip(case.rows, case.golden["scores"], golden_spans, strict=True))
    random.Random(0).shuffle(expected)
    long = [row for row in expected if longest_text(row) >= 500]
    short = [row for row in expected if row not in long]
    if case.name == "demo":
        long, short = long[::2], short[::4]
    mixed = [*long, *short[:4]]
    random.Random(0).shuffle(mixed)
    expected = [*mixed, *short[4:16], *sorted(short[16:], key=longest_text)]
    rows = [{"src": "", **row} for row, _, _ in expected]
    results = [
        *score(case.backend, rows[: len(mixed)], [1, 3, 2], span_offsets="upstream"),
        *score(case.backend, rows[len(mixed) :], [12], span_offsets="upstream"),
    ]
    for (row, their_score, their_spans), result in zip(expected, results, strict=True):
        assert result.score == pytest.approx(their_score, abs=CLOSE), row
        assert (result.error_spans is None) == (not marks)
        assert as_tuples(result) == [[a, b, s.upper(), t] for a, b, s, t, _ in their_spans or []], (
            row
        )
        for own_span, span in zip(result.error_spans or [], their_spans or [], strict=True):
            assert own_span.confidence == pytest.approx(span[4], abs=CLOSE)


def test_long_texts_are_flagged_as_they_are_cut(case):
    (long, *_) = [row for row in case.rows if len(row["mt"]) > 1000]
    (result,) = score(case.backend, [long])
    read = comet_golden.texts_read(case.name)
    assert dict(result.truncated) == {name: name in read for name in ("src", "mt", "ref")}
    assert 0 < result.mt_covered < len(long["mt"])


# ---- of xCOMET -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mix(comet_folder) -> Case:
    folder = comet_folder("xcomet_mix")
    golden = comet_golden.read("xcomet_mix")
    return Case("xcomet_mix", folder, in_float64(folder), comet_golden.rows("xcomet_mix"), golden)


def test_an_empty_reference_is_read_as_a_text(mix):
    """Check that it takes three passes, and gives another score than no reference."""
    empty = next(row for row in mix.rows if row.get("ref") == "")
    with_it, without = score(mix.backend, [empty, {"src": empty["src"], "mt": empty["mt"]}])
    assert with_it.tokens > 2 * without.tokens and with_it.score != without.score


def ids_digest(encoded: Encoded) -> str:
    return comet_golden.row_digest(encoded.payload.rows, encoded.payload.offsets.tolist())


def test_ids_are_upstreams(mix):
    """Check that every pass reads the ids that upstream would give it."""
    samples = [TranslationSample(**row) for row in mix.rows]
    encoded = mix.backend.encode(samples, XCometOptions())
    assert [ids_digest(sample) for sample in encoded] == mix.golden["ids"]


@pytest.mark.parametrize("limit", [512, 64])
def test_ids_are_upstreams_at_every_edge(mix, limit):
    """Check one token more or less around each limit, also with a lower `max_input_length`.

    `truncated` and `mt_covered` follow from the ids that remain."""
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
    """Check that a text counts as complete if each pass that has it has all of its ids."""
    tokenizer = backend.comet.tokenizer
    passes = encoded.payload.rows
    assert encoded.fields["tokens"] == sum(map(len, passes))
    assert encoded.length == max(map(len, passes)) <= limit
    ids_by_name = {
        k: tokenizer(text, add_special_tokens=False).input_ids for k, text in row.items()
    }
    orders = [("mt", "src"), ("mt", "ref"), ("mt", "src", "ref")][: len(passes)]
    for name in row:
        is_cut = False
        for ids, order in zip(passes, orders, strict=True):
            if name in order:
                start = 1 + sum(
                    min(len(ids_by_name[n]), limit - 4) + 2 for n in order[: order.index(name)]
                )
                is_cut = is_cut or ids[start : start + len(ids_by_name[name])] != ids_by_name[name]
        assert encoded.fields["truncated"][name] == is_cut, (name, row)
    read = [tuple(o) for o in encoded.payload.offsets.tolist() if tuple(o) != (0, 0)]
    cut = encoded.fields["truncated"]["mt"]
    assert encoded.fields["mt_covered"] == (read[-1][1] if cut else len(row["mt"]))


def test_an_altered_formula_is_noticed(mix):
    """Check that these files detect it: another share of the spans moves scores far more than
    CLOSE."""
    with patch.object(mix.backend.comet, "_shares", [0.12, 0.33, 0.32, 0.23]):
        results = score(mix.backend, mix.rows[:20])
    differences = [abs(a.score - b) for a, b in zip(results, mix.golden["scores"], strict=False)]
    assert max(differences) > 1000 * CLOSE
