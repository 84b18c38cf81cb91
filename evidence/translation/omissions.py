"""A stand-in for the judge's `mqm` without an LLM. It KNOWS THE REFERENCE and reports omissions.

An LLM would read source and translation. This compares the translation with the reference: a word
of the reference is missing if less than half of its characters are in the translation (each
character of the translation counts once). Then the source's words at the same relative position are
reported as omitted. English and Korean order words differently, so the number of these words is
meaningful, but not which they are. Adjacent words are one omission. It is CRITICAL if it has half
of the source's words or more, else MAJOR. Other errors are not reported; xCOMET finds them.

So a valid translation in other words is penalized, too. The result shows what an annotator's
omissions would do to a policy. It does not show what a judge without the reference can find.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scorekit.errors import SampleError
from scorekit.schemas import JudgeOptions, JudgeSample, ScoreRange, TaskInfo
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.score_endpoint import ScoreDescription, ScoreEndpoint

#: Shares of a word's characters that have to be left, and of the source that is a critical loss.
_LEFT, _CRITICAL = 0.5, 0.5
#: The score of MQM: lower is better, 25 at most.
_WEIGHTS, _MOST = {"MAJOR": 5.0, "CRITICAL": 25.0}, 25.0


class OmissionTeller:
    """A judge whose task `mqm` uses the reference.

    references: source -> true translation.
    """

    service = "judge"

    def __init__(self, references: Mapping[str, str]) -> None:
        self.references = dict(references)
        self.endpoint = ScoreEndpoint(JudgeSample, JudgeOptions)

    def load(self) -> ScoreDescription:
        """Return the description. There is nothing to load."""
        return ScoreDescription(
            model="stand-in that knows the reference",
            revision="1",
            tokenizer="none",
            dtype="none",
            device="none",
            max_input_length=100_000,
            score_range=ScoreRange(min=0.0, max=1.0),
            higher_is_better=True,
            tasks={
                "mqm": TaskInfo(score_range=ScoreRange(min=0.0, max=_MOST), higher_is_better=False)
            },
        )

    def encode(self, samples: Sequence[JudgeSample], options: Any) -> list[Encoded | SampleError]:
        """Accept only samples of the task `mqm`.

        A source without a known reference, as in the health check's sample, gets no omissions.
        """
        encoded: list[Encoded | SampleError] = []
        for sample in samples:
            texts = sample.model_extra or {}
            if sample.task != "mqm" or not {"src", "mt"} <= texts.keys():
                encoded.append(SampleError("invalid_input", "only the task mqm is known here"))
                continue
            fields = {
                "tokens": 0,
                "truncated": {"src": False, "mt": False, "ref": False},
                "mt_covered": len(texts["mt"]),
            }
            encoded.append(Encoded(1, fields, (texts["src"], texts["mt"])))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the omissions of each sample, and their score."""
        return [self._outcome(*encoded.payload) for encoded in batch]

    def _outcome(self, src: str, mt: str) -> Outcome:
        reference = self.references.get(src)
        omitted = [] if reference is None else omissions(src, mt, reference)
        score = min(_MOST, sum(_WEIGHTS[omission["severity"]] for omission in omitted))
        return {"score": score, "error_spans": [], "omissions": omitted, "unplaced": []}

    def probe(self, words: int) -> JudgeSample:
        """Return the input of a probe: a source without a reference."""
        return JudgeSample(task="mqm", src="word " * words, mt="말 " * words)

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Return None: there is no model in memory."""
        return None


def omissions(src: str, mt: str, reference: str) -> list[dict[str, Any]]:
    """Return the parts of `src` that are missing in `mt`, as on the wire.

    A part is missing if its part of the reference is missing.
    """
    words = list(re.finditer(r"\S+", src))
    missing = _missing(reference.split(), mt)
    parts = len(missing)
    is_missing = [parts > 0 and missing[index * parts // len(words)] for index in range(len(words))]
    found_omissions: list[dict[str, Any]] = []
    begin = 0
    while begin < len(words):
        end = begin
        while end < len(words) and is_missing[end]:
            end += 1
        if end > begin:
            start, stop = words[begin].start(), words[end - 1].end()
            critical = end - begin >= _CRITICAL * len(words)
            found_omissions.append(
                {
                    "start": start,
                    "end": stop,
                    "severity": "CRITICAL" if critical else "MAJOR",
                    "confidence": None,
                    "text": src[start:stop],
                    "category": "accuracy/omission",
                }
            )
        begin = end + 1
    return found_omissions


def _missing(words: Sequence[str], mt: str) -> list[bool]:
    """Return for each word of the reference whether less than half of its characters are left
    in `mt`.
    """
    left = Counter(mt)
    missing = []
    for word in words:
        characters = Counter(word)
        shared = characters & left
        missing.append(shared.total() < _LEFT * characters.total())
        if not missing[-1]:
            left -= shared
    return missing
