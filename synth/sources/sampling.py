"""Draw a uniform sample with quotas: the texts with the smallest keyed hashes of each stratum.

A text's priority is a hash of its id under the run's seed. The k smallest are a uniform sample
without replacement. They do not depend on the order of texts, equal texts coincide, and the samples
of parts merge into the full sample. A stratum is a length bucket of sentences or of blobs. Equal
texts have equal lengths, so the sentence and the blob of one text are of the same bucket. Of two
different texts with equal 64-bit priorities, one would be lost.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from synth.config import BlobConfig, BucketingConfig

#: The types of sources, in the order of their strata.
TYPES = ("sentence", "blob")
_MAX_PRIORITY = 2**64 - 1
#: Number of priorities before the first clearing.
_SLACK = 1 << 12


def prioritise(seed: int) -> Callable[[str], int]:
    """Return a function from a source id to its priority, 0 to 2**64 - 1; it depends on the
    seed."""
    key = seed.to_bytes(16, "big")

    def priority(source_id: str) -> int:
        digest = hashlib.blake2b(bytes.fromhex(source_id), digest_size=8, key=key).digest()
        return int.from_bytes(digest, "big")

    return priority


def bucket_of(length: float, boundaries: Sequence[float]) -> int | None:
    """Return the bucket of a length (lower edges are included); None if there is none."""
    bucket = bisect_right(boundaries, length) - 1
    return bucket if 0 <= bucket < len(boundaries) - 1 else None


def plan_quotas(bucketing: BucketingConfig, blob: BlobConfig, pool: int) -> list[int | None]:
    """Return the quota of each stratum: the buckets of sentences, then those of blobs.

    auto: equal shares of the pool. Numbers: these, scaled down to the pool if necessary. A bucket
    with the number 0, and a type with the ratio 0, is None: it gives no sources.
    """
    buckets = len(bucketing.boundaries) - 1
    quota = bucketing.per_bucket_quota
    weights = quota if isinstance(quota, list) else [1 if quota == "auto" else quota] * buckets
    total = pool if quota == "auto" else min(pool, sum(weights))
    ratio = blob.blob_ratio if blob.enabled else 0.0
    shares = [share * weight for share in (1 - ratio, ratio) for weight in weights]
    return [
        count if share > 0 else None
        for count, share in zip(apportion(shares, total), shares, strict=True)
    ]


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Return integer shares of `total` by weight, by largest remainders; ties: the first."""
    weight_sum = sum(weights)
    if not weight_sum:
        return [0] * len(weights)
    exact = [total * weight / weight_sum for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def fill(
    quotas: Sequence[int | None], supply: Sequence[int], distinct: Sequence[int] | None = None
) -> list[int]:
    """Return what each stratum gives from its supply: its quota, and a part of others' deficits.

    A type's deficit is filled from its other buckets in equal parts, lower ones first; the
    remaining deficit from the other type.
    distinct: the number of different texts of each bucket, because a sentence and a blob can be the
    same text, which is given once; None: no such texts.
    """
    available = [0 if q is None else have for q, have in zip(quotas, supply, strict=True)]
    half = len(quotas) // len(TYPES)
    if distinct is None:
        distinct = [sum(available[bucket::half]) for bucket in range(half)]
    plan = _Plan(available, distinct)
    for index, quota in enumerate(quotas):
        plan.add(index, quota or 0)
    types = [range(start, start + half) for start in range(0, len(quotas), half)]
    requested = [sum(quotas[i] or 0 for i in group) for group in types]
    for group, total in zip(types, requested, strict=True):
        plan.spread(total - plan.total(group), group)
    for group, total in zip(types, requested, strict=True):
        plan.exchange(total - plan.total(group), group)
    everything = range(len(quotas))
    plan.spread(sum(requested) - plan.total(everything), everything)
    return plan.counts


class _Plan:
    """The number of sources that each stratum gives, within what it and its bucket have."""

    def __init__(self, available: Sequence[int], distinct: Sequence[int]) -> None:
        self._available, self._distinct = available, distinct
        self.counts = [0] * len(available)

    def total(self, strata: Iterable[int]) -> int:
        return sum(self.counts[i] for i in strata)

    def _num_remaining(self, index: int) -> int:
        """Return how many more sources a stratum can give."""
        half = len(self._distinct)
        in_bucket = self._distinct[index % half] - sum(self.counts[index % half :: half])
        return min(self._available[index] - self.counts[index], in_bucket)

    def add(self, index: int, number: int) -> int:
        """Take up to `number` more sources of a stratum; return how many it gives."""
        more = min(number, self._num_remaining(index))
        self.counts[index] += more
        return more

    def spread(self, lack: int, group: Sequence[int]) -> None:
        """Take `lack` more sources in equal parts from the strata that have more."""
        while lack > 0 and (able := [i for i in group if self._num_remaining(i)]):
            share = max(1, lack // len(able))
            for index in able:
                lack -= self.add(index, min(share, lack))

    def exchange(self, lack: int, group: Sequence[int]) -> None:
        """Let texts that the other type uses count for this type, and replace them there.

        The other type takes their number from its other buckets.
        """
        half = len(self._distinct)
        for index in group:
            other = (index + half) % len(self.counts)
            spare = self._available[index] - self.counts[index]
            other_strata = [i for i in range(len(self.counts)) if i not in group and i != other]
            number = min(
                max(0, lack),
                spare,
                self.counts[other],
                sum(self._num_remaining(i) for i in other_strata),
            )
            self.counts[other] -= number
            self.counts[index] += number
            self.spread(number, other_strata)
            lack -= number


def divide(
    sentences: np.ndarray, blobs: np.ndarray, num_sentences: int, num_blobs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the priorities of a bucket that are taken as sentences, and those as blobs.

    Each type takes its smallest; a text that is both is a sentence. Only if the other blobs are too
    few, the last of such texts are blobs.
    sentences, blobs: sorted priorities without duplicates; together they must have the two numbers
    of texts.
    """
    first = sentences[:num_sentences]
    other_blobs = blobs[~np.isin(blobs, first, assume_unique=True)]
    if len(other_blobs) >= num_blobs:
        return first, other_blobs[:num_blobs]
    # The result must not depend on how many priorities beyond these are still held.
    sentences, blobs = sentences[: num_sentences + num_blobs], blobs[: num_sentences + num_blobs]
    is_both = np.isin(blobs, sentences, assume_unique=True)
    only, both = blobs[~is_both], blobs[is_both]
    chosen_blobs = np.sort(np.concatenate([only, both[len(both) - (num_blobs - len(only)) :]]))
    other_sentences = sentences[~np.isin(sentences, chosen_blobs, assume_unique=True)]
    return other_sentences[:num_sentences], chosen_blobs


class BottomK:
    """Keeps the smallest priorities of each stratum, as many as the sample may need.

    A bucket needs its quotas and the others' possible deficits: the total minus what they surely
    give. So memory depends on the total, not on the number of offers. A sentence and a blob can be
    the same text, and which blobs are used up by sentences is known at the end; so a bucket's blobs
    are held until enough of them are beyond all of its sentences.
    """

    def __init__(self, quotas: Sequence[int | None]) -> None:
        self.quotas = list(quotas)
        self._total = sum(q or 0 for q in quotas)
        self._cutoffs = [-1 if q is None else _MAX_PRIORITY for q in quotas]
        self._priorities = [array("Q") for _ in quotas]
        self._half = len(quotas) // len(TYPES)
        self._count = 0
        self._limit = _SLACK

    def offer(self, stratum: int, priority: int) -> bool:
        """Add a priority; return False if the text can never be in the sample."""
        if priority > self._cutoffs[stratum]:
            return False
        self._priorities[stratum].append(priority)
        self._count += 1
        if self._count > self._limit:
            self._clear()
        return True

    def extend(self, stratum: int, priorities: np.ndarray) -> None:
        """Offer many priorities at once, for example of another part."""
        if self._cutoffs[stratum] < 0:
            return
        candidates = priorities[priorities <= np.uint64(self._cutoffs[stratum])]
        self._priorities[stratum].frombytes(candidates.astype(np.uint64).tobytes())
        self._count += len(candidates)
        if self._count > self._limit:
            self._clear()

    def finish(self) -> list[np.ndarray]:
        """Return the sorted priorities that each stratum gives; no two of a bucket are equal."""
        stratum_priorities = self._clear()
        counts = fill(
            self.quotas,
            [len(priorities) for priorities in stratum_priorities],
            self._distinct(stratum_priorities),
        )
        pairs = [
            divide(
                stratum_priorities[i],
                stratum_priorities[i + self._half],
                counts[i],
                counts[i + self._half],
            )
            for i in range(self._half)
        ]
        return [sentences for sentences, _ in pairs] + [blobs for _, blobs in pairs]

    def _distinct(self, stratum_priorities: Sequence[np.ndarray]) -> list[int]:
        """Return the number of different texts of each bucket."""
        pairs = zip(stratum_priorities[: self._half], stratum_priorities[self._half :], strict=True)
        return [len(np.union1d(sentences, blobs)) for sentences, blobs in pairs]

    def _clear(self) -> list[np.ndarray]:
        """Drop duplicates and priorities that are no longer needed; return the others, sorted."""
        stratum_priorities = [
            np.unique(np.frombuffer(h, dtype=np.uint64)) for h in self._priorities
        ]
        have = [min(q or 0, len(h)) for q, h in zip(self.quotas, stratum_priorities, strict=True)]
        # What a bucket gives at least. It only grows with further offers.
        min_counts = [
            min(have[i] + have[i + self._half], texts)
            for i, texts in enumerate(self._distinct(stratum_priorities))
        ]
        for bucket in range(self._half):
            self._cut(
                stratum_priorities, bucket, self._total - (sum(min_counts) - min_counts[bucket])
            )
        self._priorities = [array("Q", priorities.tobytes()) for priorities in stratum_priorities]
        self._count = sum(map(len, self._priorities))
        self._limit = 2 * self._count + _SLACK
        return stratum_priorities

    def _cut(self, stratum_priorities: list[np.ndarray], bucket: int, need: int) -> None:
        """Drop what a bucket cannot give if it gives at most `need` sources of both types."""
        first, second = bucket, bucket + self._half
        sentences, blobs = stratum_priorities[first], stratum_priorities[second]
        num_blobs = need - min(self.quotas[first] or 0, len(sentences))  # at most
        # Blobs behind the last sentence that is held can never be a chosen sentence.
        cutoff = self._cutoffs[first]
        behind = int(np.searchsorted(blobs, np.uint64(max(cutoff, 0)), side="right"))
        free = len(blobs) - behind if cutoff >= 0 else len(blobs)
        has_blobs = free >= num_blobs
        self._set(
            stratum_priorities, first, need - (self.quotas[second] or 0) if has_blobs else need
        )
        self._set(
            stratum_priorities,
            second,
            min(need, len(blobs) - free + num_blobs) if has_blobs else need,
        )

    def _set(self, stratum_priorities: list[np.ndarray], stratum: int, number: int) -> None:
        """Keep the first `number` priorities of a stratum."""
        if len(stratum_priorities[stratum]) > number:
            stratum_priorities[stratum] = stratum_priorities[stratum][:number]
            self._cutoffs[stratum] = int(stratum_priorities[stratum][-1]) if number > 0 else -1
