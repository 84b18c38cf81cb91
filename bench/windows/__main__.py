"""Compare spans and scores of windows with those of the full text, for texts that fit the model.

    python -m bench.windows

The documents are adjacent segments of tests/data/prose, whose translations no annotator marked.
Each fits the demo's xCOMET (512 tokens) with one more segment on each side. It is scored in full,
in windows of at most 256, 384 and 128 tokens, and cut at 256. For the noise that the model's
context causes, it is also scored with a segment added or removed at each end: a window lacks the
text before it, after it, or both. Half of the documents have errors at a border of windows of 256:
words of a distant segment on both sides of it.
Spans are compared by characters of `mt`: F1 of the characters that both mark (of any severity), the
same within 20 characters of a border of those windows, and how many of the planted words'
characters are marked.
Then, without a model: the share of borders of an alignment that are inside one pair of segments,
for documents that lack some translations or in which some are joined to the next.
"""

from __future__ import annotations

import json
import random
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from scorekit.command import run_command
from scorekit.schemas import Scored
from scorekit.scorers import SampleForScoring, ScoringConfig
from scorekit.text.windows import align

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results/windows.json"
#: File, languages, and what stands between two sentences of the source.
CORPORA = (
    ("ted_en_de", "en", "de", " "),
    ("ted_zh_en", "zh", "en", ""),
    ("ko_en", "en", "ko", " "),
)
DOCUMENTS = 24
LIMIT, WINDOW = 512, 256
SIZES = {"windows": WINDOW, "wider windows": 384, "narrow windows": 128}
NEAR = 20
#: Segments of a document: with one taken there are still two.
FEWEST = 3
#: Room for the words that are planted.
PLANTED_TOKENS = 48
#: Of documents of 40 segments: shares of translations that are lacking anywhere, and joined to the
#: next; the first and the one past the last segment of a passage that lacks its translation; and
#: of one whose source is lacking.
PLANTED = (
    (0, 0, (0, 0), (0, 0)),
    (0.05, 0.1, (0, 0), (0, 0)),
    (0.1, 0.2, (0, 0), (0, 0)),
    (0, 0, (28, 40), (0, 0)),
    (0, 0, (15, 23), (0, 0)),
    (0, 0, (0, 0), (15, 23)),
    (0.05, 0.1, (15, 23), (0, 0)),
)
NOISES = ("one added before", "first taken", "one added behind", "last taken")
Pair = tuple[str, str]


def pairs(name: str, left: str, right: str) -> list[Pair]:
    """Return the segments in their order, with one translation each."""
    lines = (ROOT / f"tests/data/prose/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return list({row[left].strip(): row[right].strip() for row in rows}.items())


def joined(run: Sequence[Pair], joint: str) -> SampleForScoring:
    """Return the segments joined to a document."""
    src, mt = zip(*run, strict=True)
    return SampleForScoring(joint.join(src), " ".join(mt))


def starts(run: Sequence[Pair]) -> list[int]:
    """Return where the translations of a document begin, and where the next one would begin."""
    return list(accumulate((len(mt) + 1 for _, mt in run), initial=0))


def marked(result: Scored) -> set[int]:
    """Return the characters of `mt` that lie in a span."""
    return {
        position for span in result.error_spans or () for position in range(span.start, span.end)
    }


def f1(first: set[int], second: set[int]) -> float:
    """Return F1 of the two sets; 1 if both are empty."""
    both = len(first) + len(second)
    return 2 * len(first & second) / both if both else 1.0


class Document:
    """A document that fits the model with one more segment, and its adjacent segments.

    It also has the characters of `mt` that were planted.
    """

    def __init__(self, run: list[Pair], before: Pair, following: Pair, joint: str) -> None:
        self.run, self.before, self.following, self.joint = run, before, following, joint
        self.planted: set[int] = set()

    @property
    def sample(self) -> SampleForScoring:
        """Return the document as it is scored."""
        return joined(self.run, self.joint)

    def other_contexts(self) -> Iterator[tuple[str, list[Pair], int, tuple[int, int]]]:
        """Yield the document with a segment more or less at each end.

        Yields a name, the segments, where their `mt` begins in this document's, and the part that
        both have.
        """
        run, offsets = self.run, starts(self.run)
        full_range = (0, offsets[-1])
        yield NOISES[0], [self.before, *run], -len(self.before[1]) - 1, full_range
        yield NOISES[1], run[1:], offsets[1], (offsets[1], offsets[-1])
        yield NOISES[2], [*run, self.following], 0, full_range
        yield NOISES[3], run[:-1], 0, (0, offsets[-2])

    def plant(self, words: list[str], scorer: Any) -> None:
        """Put words on both sides of a border of windows: before the last word in front of it, and
        behind it. Raises ValueError where they move every border."""
        text = " ".join(words) + " "
        full_mt = self.sample.mt
        todo = borders(score(scorer, self.sample, WINDOW, "windows"))
        tried: set[int] = set()
        while todo:
            edge = todo.pop(0)
            if edge in tried:
                continue
            tried.add(edge)
            last = full_mt.rindex(" ", 0, edge - 1) + 1
            run = inserted(inserted(self.run, edge, text), last, text)
            edges = borders(score(scorer, joined(run, self.joint), WINDOW, "windows"))
            after = edge + len(text)
            if after in edges:
                self.run = run
                self.planted = {
                    k + position for position in (last, after) for k in range(len(text) - 1)
                }
                return
            # Where the words have moved the borders to, before they were planted.
            todo += [
                position if position < after else position - 2 * len(text) for position in edges
            ]
        raise ValueError(f"no border stays beside what is planted: {words}")


def inserted(run: list[Pair], position: int, text: str) -> list[Pair]:
    """Return the segments, with a text inserted at that character of the joined translations."""
    begins = starts(run)
    k = bisect_right(begins, position) - 1
    src, mt = run[k]
    cut = position - begins[k]
    return [*run[:k], (src, mt[:cut] + text + mt[cut:]), *run[k + 1 :]]


def borders(result: Scored) -> list[int]:
    """Return where windows meet in `mt`."""
    return [window.mt_start for window in (result.windows or [])[1:]]


def documents(corpus_pairs: list[Pair], joint: str, scorer: Any) -> Iterator[Document]:
    """Yield documents that fit the model with one more segment, but do not fit one window."""
    rng = random.Random(0)
    done = 0
    while done < DOCUMENTS:
        start, count = rng.randrange(1, len(corpus_pairs) - 30), 1
        while count < 28 and all(
            fits(corpus_pairs[first : start + count + 1 + more], joint, scorer)
            for first, more in ((start - 1, 0), (start, 1))
        ):
            count += 1
        document = Document(
            corpus_pairs[start : start + count],
            corpus_pairs[start - 1],
            corpus_pairs[start + count],
            joint,
        )
        if count < FEWEST or not borders(score(scorer, document.sample, WINDOW, "windows")):
            continue
        if done % 2:
            document.plant(corpus_pairs[(start + 60) % len(corpus_pairs)][1].split()[:3], scorer)
        done += 1
        yield document


def fits(run: Sequence[Pair], joint: str, scorer: Any) -> bool:
    """Return whether the model can read the full document with what is planted."""
    strict = ScoringConfig(overlong="error", max_input_length=LIMIT - PLANTED_TOKENS)
    return scorer.score_batch([joined(run, joint)], strict).sequence_scores[0] is not None


def score(scorer: Any, sample: SampleForScoring, limit: int, overlong: Any) -> Scored:
    """Score one sample, truncated or in windows of `limit` tokens."""
    cfg = ScoringConfig(overlong=overlong, max_input_length=limit)
    (result,) = scorer.score_batch([sample], cfg).metadata
    assert isinstance(result, Scored), result
    return result


def compare(scorer: Any, name: str, left: str, right: str, joint: str) -> dict[str, Any]:
    """Return the stats of a corpus: windows, truncation and context noise, compared with the
    full text.
    """
    rows: dict[str, list[dict[str, float]]] = {}
    counts: dict[str, list[tuple[int, float]]] = {}
    for document in documents(pairs(name, left, right), joint, scorer):
        sample, all_of_it = document.sample, (0, starts(document.run)[-1])
        reference_scores = score(scorer, sample, LIMIT, "error")
        edges: list[int] = []
        # What is scored, where its `mt` begins in the document's, and which part both have.
        variants: list[tuple[str, Scored, int, tuple[int, int]]] = []
        for kind, limit in SIZES.items():
            scored = score(scorer, sample, limit, "windows")
            if scored.windows:  # a document may fit the wider ones
                edges = edges or borders(scored)
                counts.setdefault(kind, []).append(
                    (len(scored.windows), scored.tokens / reference_scores.tokens)
                )
                variants.append((kind, scored, 0, all_of_it))
        variants.append(("cut", score(scorer, sample, WINDOW, "truncate"), 0, all_of_it))
        for kind, neighbour, begin, part in document.other_contexts():
            scored = score(scorer, joined(neighbour, joint), LIMIT, "error")
            variants.append((kind, scored, begin, part))
        near = {c for edge in edges for c in range(edge - NEAR, edge + NEAR)}
        for kind, other, begin, part in variants:
            compared = set(range(*part))
            variant_marks, reference_marks = (
                {c + begin for c in marked(other)} & compared,
                marked(reference_scores) & compared,
            )
            row = {
                "f1": f1(variant_marks, reference_marks),
                "f1_at_borders": f1(variant_marks & near, reference_marks & near),
            }
            row["score"] = abs(other.score - reference_scores.score)
            row["share_marked"] = len(variant_marks) / len(compared)
            if planted := document.planted & compared:
                row["planted_marked"] = len(variant_marks & planted) / len(planted)
                row["planted_marked_whole"] = len(reference_marks & planted) / len(planted)
            rows.setdefault(kind, []).append(row)
    rows_by_kind: dict[str, dict[str, float]] = {
        kind: {"documents": len(scored)} | mean(scored) for kind, scored in rows.items()
    }
    for kind, sizes in counts.items():
        windows, tokens = (statistics.fmean(column) for column in zip(*sizes, strict=True))
        rows_by_kind[kind] |= {"windows": round(windows, 4), "times_the_tokens": round(tokens, 4)}
    return rows_by_kind | against_noise(rows_by_kind)


def against_noise(rows_by_kind: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the model's noise, as the mean over the four context variants, and the others as
    multiples of it.
    """
    losses = {
        kind: {
            "f1_lost": 1 - row["f1"],
            "f1_lost_at_borders": 1 - row["f1_at_borders"],
            "score": row["score"],
        }
        for kind, row in rows_by_kind.items()
    }
    noise = {key: statistics.fmean(losses[kind][key] for kind in NOISES) for key in losses["cut"]}
    summary = {"noise": {key: round(value, 4) for key, value in noise.items()}}
    for kind in [kind for kind in losses if kind not in NOISES]:
        times = {key: round(value / noise[key], 2) for key, value in losses[kind].items()}
        summary[f"{kind}, times the noise"] = times
    return summary


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each stat, over the rows that have it."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return {key: round(statistics.fmean(r[key] for r in rows if key in r), 4) for key in keys}


def aligned(
    corpus_pairs: list[Pair],
    joint: str,
    missing_share: float,
    merged: float,
    untranslated: tuple[int, int],
    added: tuple[int, int],
) -> dict[str, float]:
    """Return two shares for documents of 40 segments.

    The first is the share of boundaries that are in the same pair of segments on both sides, the
    second the share of true boundaries that were found.
    """
    rng = random.Random(0)
    right_ones = got_ones = hit = true_ones = 0
    for _ in range(60):
        start = rng.randrange(len(corpus_pairs) - 40)
        left = right = ""
        true = [(0, 0)]
        for k, (src, mt) in enumerate(corpus_pairs[start : start + 40]):
            left += "" if k in range(*added) else src + joint
            chance = rng.random()
            if k not in range(*untranslated) and chance >= missing_share:
                right += (
                    mt.rstrip(".。!?！？") + ", " if chance < missing_share + merged else mt + " "
                )
            true.append((len(left), len(right)))
        got = align(left, right)[1:-1]
        got_ones += len(got)
        right_ones += sum(
            any(a <= x <= b and c <= y <= d for (a, c), (b, d) in pairwise(true)) for x, y in got
        )
        inner = {pair for pair in true if pair[0] < len(left) and pair[1] < len(right)} - {(0, 0)}
        hit += len(inner & set(got))
        true_ones += len(inner)
    return {"precision": round(right_ones / got_ones, 4), "recall": round(hit / true_ones, 4)}


def main() -> None:
    """Measure, print and write."""
    from services.xcomet.model import XCometXLScorer

    results: dict[str, Any] = {"alignment": {}, "spans": {}}
    for name, left, right, joint in CORPORA:
        corpus_pairs = pairs(name, left, right)
        results["alignment"][name] = {
            f"lacking {missing_share}, joined {merged}, untranslated {gap}, added {added}": aligned(
                corpus_pairs, joint, missing_share, merged, gap, added
            )
            for missing_share, merged, gap, added in PLANTED
        }
    scorer = XCometXLScorer(str(ROOT / "demo/models/xcomet"), device="cpu")
    for corpus in CORPORA:
        results["spans"][corpus[0]] = compare(scorer, *corpus)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main, stdout="log")
