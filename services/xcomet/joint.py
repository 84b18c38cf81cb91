"""xCOMET and CometKiwi: all texts are encoded in one sequence, and the translation's words tagged.

Input format, as upstream (the translation first; each text is cut alone, then the full row):

    always            <s> mt </s></s> src </s>
    with a reference  <s> mt </s></s> ref </s>   and   <s> mt </s></s> src </s></s> ref </s>

(A DeBERTa encoder has one separator between two texts.)

Shapes: R rows of a batch (1 or 3 a sample), S samples, L tokens, M positions of the translation
with its <s> and </s>, H hidden size, N layers, K labels. The sentence head reads only the first
position of each layer, so the only kept tensor of size [R, L, H] is the layer of the word head.

Labels become error spans. A run is a sequence of adjacent subwords that are all tagged as an error
of any severity. Its severity is that of its first subword, its confidence the mean probability of
its labels. This is unbabel-comet's rule (`UnifiedMetric.decode`). There are two kinds of offsets,
in Unicode code points:

- `upstream_spans`: as unbabel-comet computes them. They start with the space before a word, `<s>`
  and `</s>` count as the empty range 0..0, and a run still open at the last position is dropped.
- `exact_spans`: the same runs with the characters that they really cover; no run is dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scorekit.errors import SampleError, UserError
from scorekit.schemas import ScoreRange, Wanted, XCometOptions
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.tokenizers import TokenizedText
from services.xcomet.comet_model import CometBase, LayerCapture, has_layer_norm, input_fields

log = logging.getLogger(__name__)

_SEGMENTS = (["mt", "src"], ["mt", "ref"], ["mt", "src", "ref"])


@dataclass(slots=True)
class _Input:
    """A sample's input, from `assemble` to `forward`.

    rows: ids of each sequence. offsets [n, 2]: as upstream pairs them with positions. read_offsets
    [m, 2]: true offsets of the translation's positions. They differ if the text contains padding
    tokens, which upstream removes from the ids but not from `offsets`, and if unknown characters
    are encoded as bytes.
    """

    rows: list[list[int]]
    offsets: np.ndarray
    read_offsets: np.ndarray
    mt: str
    span_offsets: str


class Unified(CometBase):
    """`unified_metric` (CometKiwi 22, 23-XL, 23-XXL; UniTE-like ones with references).

    The score is the regression head's, or the mean of three passes; tags do not change it.
    """

    def __init__(self, metric: Any, device: torch.device) -> None:
        segments = list(metric.hparams["input_segments"])
        if segments not in _SEGMENTS:
            raise UserError(
                f"input_segments is {segments} in the checkpoint; served are {_SEGMENTS}"
            )
        both = len(segments) == 3
        src: Wanted = "required" if "src" in segments else "ignored"
        ref: Wanted = "optional" if both else "required" if "ref" in segments else "ignored"
        super().__init__(metric, device, {"src": src, "mt": "required", "ref": ref})
        self._separators = metric.encoder.size_separator
        self.marks_errors = self._read_labels(metric)
        self.hidden2tag = metric.hidden2tag if self.marks_errors else None
        if both:  # weights of the tags: mt+src, mt+ref, mt+src+ref
            self._span_weights = metric.input_weights_spans.tolist()
        self.taps = LayerCapture(
            self.transformer,
            word_layer=metric.hparams["word_layer"] if self.marks_errors else None,
            layer_norm=has_layer_norm(metric),
        )

    def _read_labels(self, metric: Any) -> bool:
        """Return True if the words are tagged with severities. Sets the severity of each label."""
        if not metric.word_level:
            return False
        labels = tuple(str(label).upper() for label in metric.hparams["error_labels"])
        self._severities = ("O", *labels)
        if set(labels) <= set(SEVERITIES[1:]):
            return True
        log.warning("no error spans: the labels %s are not severities", ", ".join(labels))
        return False

    # ---- before the model ----

    def assemble(
        self, tokenized: dict[str, TokenizedText], mt: str, limit: int, options: XCometOptions
    ) -> Encoded | SampleError:
        """Return one row, or three if source and reference are read."""
        pad = self.tokenizer.pad_token_id
        ids = [[i for i in read.ids if i != pad] for read in tokenized.values()]
        passes = [(0, 1)] if len(ids) == 2 else [(0, 1), (0, 2), (0, 1, 2)]
        full_rows = [self._join([ids[k] for k in segments]) for segments in passes]
        # A row that is too long is cut at its end. Losing the last </s> does not count as a cut.
        cut_flags = [read.is_cut for read in tokenized.values()]
        for segments, row in zip(passes, full_rows, strict=True):
            excess = len(row) - 1 - limit
            for k in reversed(segments):
                cut_flags[k] = cut_flags[k] or (excess > 0 and bool(ids[k]))
                excess -= len(ids[k]) + self._separators
        if options.overlong == "error" and any(cut_flags):
            longest = sum(read.total + 2 for read in tokenized.values())  # with special tokens
            return SampleError("overlong", f"{longest} tokens, limit {limit}")
        rows = [row[:limit] for row in full_rows]
        edge = [(0, 0)]
        mt_ids = tokenized["mt"]
        read = [o for o, i in zip(mt_ids.own_offsets, mt_ids.ids, strict=True) if i != pad]
        offsets = np.array(edge + mt_ids.offsets + edge)
        read_offsets = np.array(edge + read + edge)
        payload = _Input(rows, offsets, read_offsets, mt, options.span_offsets)
        fields = input_fields(tokenized, cut_flags, sum(map(len, rows)))
        return Encoded(max(map(len, rows)), fields, payload, rows=len(rows))

    def _join(self, texts: list[list[int]]) -> list[int]:
        """Return the ids of <s> a </s></s> b </s></s> c </s>.

        This is XLM-R's `build_inputs_with_special_tokens`, nested; DeBERTa has one separator."""
        first, last = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        row = [first, *texts[0], last]
        for text in texts[1:]:
            row += [*[last] * (self._separators - 1), *text, last]
        return row

    # ---- the model ----

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return scores and spans of a batch; samples with and without reference can be mixed."""
        inputs: list[_Input] = [encoded.payload for encoded in batch]
        sentence, confidence, labels = self._run(inputs)
        outcomes = []
        row = 0
        for i, sample_input in enumerate(inputs):
            stop = row + len(sample_input.rows)
            outcomes.append(
                self._outcome(sample_input, sentence[row:stop], confidence[i], labels[i])
            )
            row = stop
        return outcomes

    def _run(self, inputs: list[_Input]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sentence scores [R], and confidence and label of each position, both [S, M]."""
        rows = [row for sample_input in inputs for row in sample_input.rows]
        ids, mask = self.table(rows)
        cls_states, words = self.taps.run(ids, mask)  # [N+1, R, H], [R, L, H]
        mixed = torch.einsum("n,nrh->rh", self.mix, cls_states)
        sentence = self.estimator(mixed).view(-1)  # [R]
        if self.hidden2tag is None or words is None:
            nothing = np.zeros((len(inputs), 0), np.float32)
            return sentence.cpu().numpy(), nothing, nothing.astype(np.int64)
        positions = min(max(len(sample_input.offsets) for sample_input in inputs), ids.shape[1])
        logits = self.hidden2tag(words[:, :positions].float())  # [R, M, K]
        probabilities = self._merge(logits.softmax(-1), inputs)  # [S, M, K]
        confidence, labels = probabilities.max(-1)
        # One transfer for all tensors: the device is synchronized once for each batch.
        flat = torch.cat((sentence, confidence.flatten(), labels.flatten().float())).cpu().numpy()
        by_word = flat[len(rows) :].reshape(2, len(inputs), positions)
        return flat[: len(rows)], by_word[0], by_word[1].astype(np.int64)

    def _merge(self, probabilities: torch.Tensor, inputs: list[_Input]) -> torch.Tensor:
        """Return the mean over a sample's passes with upstream's weights: [R, M, K] -> [S, M,
        K]."""
        if len(probabilities) == len(inputs):
            return probabilities
        index, weight = [], []
        row = 0
        for sample_input in inputs:
            has_three = len(sample_input.rows) == 3
            index.append([row, row + 1, row + 2] if has_three else [row, row, row])
            weight.append(self._span_weights if has_three else [1.0, 0.0, 0.0])
            row += len(sample_input.rows)
        picked = probabilities[torch.tensor(index, device=self._device)]  # [S, 3, M, K]
        weights = torch.tensor(weight, device=self._device)  # [S, 3]
        return (picked * weights[:, :, None, None]).sum(1)

    # ---- behind the model ----

    def _outcome(
        self, sample_input: _Input, heads: np.ndarray, confidence: np.ndarray, labels: np.ndarray
    ) -> Outcome:
        """Return the result of a sample from heads [1 or 3], confidence and labels [M]."""
        n = min(len(sample_input.offsets), *map(len, sample_input.rows))
        if not (np.isfinite(heads).all() and np.isfinite(confidence[:n]).all()):
            return SampleError("non_finite", "the model gave a number that is not finite")
        if not self.marks_errors:
            return {"score": self._score(heads, ())}
        raw = upstream_spans(labels[:n], confidence[:n], sample_input.offsets[:n], self._severities)
        score = self._score(heads, raw)
        if sample_input.span_offsets == "exact":
            m = len(sample_input.read_offsets)
            read = sample_input.read_offsets
            spans = exact_spans(labels[:m], confidence[:m], read, sample_input.mt, self._severities)
        else:
            spans = [
                {
                    "start": span.start,
                    "end": span.end,
                    "severity": span.severity,
                    "confidence": span.confidence,
                    "text": self.tokenizer.decode(sample_input.rows[0][span.first : span.stop]),
                }
                for span in raw
            ]
        return {"score": score, "error_spans": spans}

    def _score(self, heads: np.ndarray, spans: Sequence[RawSpan]) -> float:
        """Return the mean of the heads [1 or 3], as `UnifiedMetric.predict_step`."""
        return math.fsum(heads.astype(np.float64)) / len(heads)


class XComet(Unified):
    """`xcomet_metric`: XCOMET-XL, XCOMET-XXL, xCOMET-lite.

    Scores equal upstream's (`XCOMETMetric.predict_step`), with its quirks: each head is capped at 1
    but not at 0, and the spans' share counts the raw spans, of which some are missing.
    """

    def __init__(self, metric: Any, device: torch.device) -> None:
        super().__init__(metric, device)
        self._shares = metric.score_weights  # mt+src, mt+ref, mt+src+ref, spans

    @property
    def score_range(self) -> ScoreRange:
        """Return the score's range: heads are capped at 1, and the spans' score is at most 1."""
        return ScoreRange(min=None, max=1.0)

    def _score(self, heads: np.ndarray, spans: Sequence[RawSpan]) -> float:
        capped = np.minimum(heads, np.float32(1.0)).astype(np.float64)
        by_head = self._shares[:3] if len(heads) == 3 else [sum(self._shares[:3])]
        score = math.fsum(capped * by_head)
        return score + mqm_score(span.severity for span in spans) * self._shares[3]


#: Label id of xCOMET -> severity; 0 is "no error".
SEVERITIES = ("O", "MINOR", "MAJOR", "CRITICAL")
_MQM_WEIGHTS = {"MINOR": 1, "MAJOR": 5, "CRITICAL": 10}
_MQM_WORST = 25


@dataclass(frozen=True, slots=True)
class RawSpan:
    """A span of the subwords first..stop-1, as unbabel-comet computes it."""

    start: int
    end: int
    severity: str
    confidence: float
    first: int
    stop: int


def label_runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of tagged positions in `labels` [n] as (first, stop), `stop` exclusive."""
    tagged = np.concatenate(([False], labels != 0, [False]))
    edges = np.flatnonzero(tagged[1:] != tagged[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def upstream_spans(
    labels: np.ndarray,
    confidence: np.ndarray,
    offsets: np.ndarray,
    severities: Sequence[str] = SEVERITIES,
) -> list[RawSpan]:
    """Return the spans as upstream's `predict` does.

    labels, confidence: [n], one for each position with its `<s>` first and its `</s>` last.
    offsets: [n, 2], (0, 0) for `<s>` and `</s>`.
    severities: of each label.
    """
    return [
        RawSpan(
            start=int(offsets[first, 0]),
            end=int(offsets[stop - 1, 1]),
            severity=severities[int(labels[first])],
            confidence=float(confidence[first:stop].mean()),
            first=first,
            stop=stop,
        )
        for first, stop in label_runs(labels)
        if stop < len(labels)  # upstream closes a span only on the next untagged position
    ]


def exact_spans(
    labels: np.ndarray,
    confidence: np.ndarray,
    offsets: np.ndarray,
    mt: str,
    severities: Sequence[str] = SEVERITIES,
) -> list[dict[str, Any]]:
    """Return spans with `mt[start:end] == text`: ordered, disjoint, with visible edges.

    Arguments as for `upstream_spans`, and the translation. A run that covers no visible character
    (white space, `<s>`, `</s>`) gives no span. Runs that share a character become one span: a
    tokenizer may spread one character over several subwords, with an untagged one in between.
    """
    merged: list[tuple[int, int, list[int]]] = []  # start, end, positions
    for first, stop in label_runs(labels):
        start, end = _visible_range(offsets[first:stop], mt)
        if start == end:
            continue
        positions = list(range(first, stop))
        if merged and start < merged[-1][1]:
            previous = merged.pop()
            start, end = min(start, previous[0]), max(end, previous[1])
            positions = previous[2] + positions
        merged.append((start, end, positions))
    return [
        {
            "start": start,
            "end": end,
            "severity": severities[int(labels[positions[0]])],
            "confidence": float(confidence[positions].mean()),
            "text": mt[start:end],
        }
        for start, end, positions in merged
    ]


def _visible_range(offsets: np.ndarray, mt: str) -> tuple[int, int]:
    """Return the range of visible characters under `offsets` [k, 2]; (0, 0) if there are none."""
    wide = offsets[offsets[:, 0] < offsets[:, 1]]
    if not len(wide):
        return 0, 0
    start, end = int(wide[:, 0].min()), int(wide[:, 1].max())
    text = mt[start:end]
    visible = text.strip()
    if not visible:
        return 0, 0
    start += len(text) - len(text.lstrip())
    return start, start + len(visible)


def mqm_score(severities: Iterable[str]) -> float:
    """Return 1 without errors, 0 at 25 penalty points or more (minor 1, major 5, critical 10).

    Source: `XCOMETMetric.predict_step`, which counts the spans of `upstream_spans`.
    """
    points = sum(_MQM_WEIGHTS[severity] for severity in severities)
    return (_MQM_WORST - min(points, _MQM_WORST)) / _MQM_WORST
