"""Estimate a stage's cost from the sizes of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scorekit.languages import find_language
from scorekit.prompts import load_template
from synth.config import SynthConfig

#: Tokens of the Qwen3 tokenizer that a translation takes for one of English: (1st, 99th percentile)
#: of paragraphs of the Debian installation guide. Other languages: set by hand.
_TOKENS = {
    "en": (1.0, 1.0),
    "ko": (0.95, 2.27),
    "ja": (0.95, 2.05),
    "zh": (0.64, 1.35),
    "de": (1.03, 2.23),
    "ru": (0.98, 2.16),
}
_OTHER_TOKENS = (1.0, 2.3)
#: Tokens of the longest common line of web text, and bytes per token: set by hand.
_LONG_SENTENCE, _TOKEN_BYTES = 200, 4.3
_TOKENS_A_CHAR = {"ko": 0.75, "zh": 0.7, "ja": 0.7, "th": 0.5}
_OTHER_TOKENS_A_CHAR = 0.25
#: Compressed bytes of a record without texts; compressed bytes per byte of text: for a single text,
#: and next to another translation of the same source.
_RECORD_BYTES, PACKED, PACKED_ALIKE = 110, 0.45, 0.2
_LINE_BYTES = 700  # of a view's line without its texts


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a stage.

    records: input records.
    left_out: records that are always left out.

    driver_s: CPU seconds of the driver for each record, and for each candidate: measured by
    bench.synth.million on a core of a cloud machine.
    view_records, view_bytes: of its view, and of each line of it.
    """

    stage: str
    records: int = 0
    requests: int = 0
    sequences: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    scored: int = 0
    judged: int = 0
    left_out: int = 0
    disk_bytes: int = 0
    driver_s: tuple[float, float] = (0.0, 0.0)
    view_records: int = 0
    view_bytes: float = 0.0


class Sizes:
    """The sizes of a run if every source passes all stages.

    It assumes that each length bucket gives its quota, that sentences have at most 200 tokens, and
    that blobs fill their limit.

    pool, chosen: sources that are prefiltered, and that get candidates.
    source_tokens, target_tokens, prompt_tokens: means.
    ratio, most_ratio: of a translation's tokens to its source's, usual and at most.
    longest_sentence: of a source, in tokens.
    source_bytes, text_bytes: of a source's text and a translation's, unpacked.
    parts: requests that the candidates of a source are asked for with.
    """

    def __init__(self, cfg: SynthConfig) -> None:
        self.cfg = cfg
        final = cfg.final_generation
        low, high = _band(cfg.data.tgt_lang)
        source_middle = math.sqrt(math.prod(_band(cfg.data.src_lang)))
        self.ratio, self.most_ratio = math.sqrt(low * high) / source_middle, high / source_middle
        self.longest_sentence = _longest_sentence(cfg)
        self.source_tokens = _mean_source(cfg, self.longest_sentence)
        self.target_tokens = self.source_tokens * self.ratio
        template = len(load_template(cfg.teacher.prompt)) * _OTHER_TOKENS_A_CHAR
        self.prompt_tokens = template + 30 + self.source_tokens
        self.source_bytes = self.source_tokens * _TOKEN_BYTES
        self.text_bytes = self.target_tokens * _TOKEN_BYTES
        self.pool = cfg.data.sample_pool_size
        self.chosen = min(cfg.data.target_examples_total, self.pool)
        self.parts = math.ceil(final.num_candidates / cfg.candidates_per_request)

    @property
    def sampled_bytes(self) -> float:
        """Return the compressed bytes of a sampled record."""
        return _RECORD_BYTES + self.source_bytes * PACKED

    @property
    def scored_bytes(self) -> float:
        """Return the compressed bytes of a prefiltered record."""
        stored = self.cfg.prefilter.store_texts
        texts = 2 * self.text_bytes * PACKED_ALIKE if stored else 0
        return self.sampled_bytes + 60 + texts

    @property
    def candidates_bytes(self) -> float:
        """Return the compressed bytes of all candidates of a source."""
        return self.cfg.final_generation.num_candidates * (self.text_bytes * PACKED_ALIKE + 20)

    @property
    def best_bytes(self) -> float:
        """Return the compressed bytes of a record with its stored candidates."""
        final = self.cfg.final_generation
        best = (final.store_top_k + 1) * (self.text_bytes * PACKED_ALIKE + 40)
        return self.scored_bytes + best + (self.candidates_bytes if final.store_candidates else 0)

    def line_bytes(self, texts: float = 0.0) -> float:
        """Return the bytes of a view's line.

        texts: bytes of texts besides the source.
        """
        return self.source_bytes + texts + _LINE_BYTES


def _mean_source(cfg: SynthConfig, longest_sentence: float) -> float:
    """Return the mean tokens of a source over sentences and blobs."""
    blob = cfg.final_generation.blob
    share = blob.blob_ratio if blob.enabled else 0.0
    sentences = _mean_of_buckets(cfg, min(_LONG_SENTENCE, longest_sentence))
    return (1 - share) * sentences + share * _mean_of_buckets(cfg, blob.blob_max_tokens)


def _mean_of_buckets(cfg: SynthConfig, limit: float) -> float:
    """Return the mean of the middles of the buckets below `limit`, weighted by quota."""
    edges = cfg.bucketing.boundaries
    quota = cfg.bucketing.per_bucket_quota
    weights = quota if isinstance(quota, list) else [1] * (len(edges) - 1)
    middles = [
        (weight, (edge + min(end, limit)) / 2)
        for weight, edge, end in zip(weights, edges[:-1], edges[1:], strict=True)
        if edge < limit and weight
    ] or [(1, limit)]
    return sum(w * middle for w, middle in middles) / sum(w for w, _ in middles)


def _longest_sentence(cfg: SynthConfig) -> float:
    """Return the longest sentence in tokens."""
    language = find_language(cfg.data.src_lang)
    tokens_per_char = _TOKENS_A_CHAR.get(language.madlad if language else "", _OTHER_TOKENS_A_CHAR)
    return cfg.segmentation.max_chars * tokens_per_char


def _band(code: str) -> tuple[float, float]:
    language = find_language(code)
    return _TOKENS.get(language.madlad if language else "", _OTHER_TOKENS)
