"""Draw a uniform sample with quotas: the texts with the smallest keyed hashes of each stratum.

A text's priority is a hash of its id under the run's seed. The k smallest are a uniform sample
without replacement. They do not depend on the order of texts, equal texts coincide, and the samples
of parts merge into the full sample. A stratum is a length bucket of sentences or of blobs. Of two
different texts with equal 64-bit priorities, one would be lost.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from synth.config_sections import BlobConfig, BucketingConfig

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


def fill(quotas: Sequence[int | None], supply: Sequence[int]) -> list[int]:
    """Return what each stratum gives from its supply: its quota, and a part of others' deficits.

    A type's deficit is filled from its other buckets in equal parts, lower ones first; the
    remaining deficit from the other type.
    """
    available = [0 if q is None else have for q, have in zip(quotas, supply, strict=True)]
    counts = [min(q or 0, have) for q, have in zip(quotas, available, strict=True)]
    half = len(quotas) // len(TYPES)
    types = [range(start, start + half) for start in range(0, len(quotas), half)]
    for group in types:
        lack = sum((quotas[i] or 0) - counts[i] for i in group)
        _spread(lack, group, counts, available)
    lack = sum(q or 0 for q in quotas) - sum(counts)
    _spread(lack, range(len(quotas)), counts, available)
    return counts


def _spread(lack: int, group: Sequence[int], counts: list[int], available: Sequence[int]) -> None:
    while lack > 0 and (able := [i for i in group if counts[i] < available[i]]):
        share = max(1, lack // len(able))
        for index in able:
            more = min(share, available[index] - counts[index], lack)
            counts[index] += more
            lack -= more


class BottomK:
    """Keeps the smallest priorities of each stratum, as many as the sample may need.

    A stratum needs its quota and the others' possible deficits: the total minus what they already
    have. So memory depends on the total, not on the number of offers.
    """

    def __init__(self, quotas: Sequence[int | None]) -> None:
        self.quotas = list(quotas)
        self._total = sum(q or 0 for q in quotas)
        self._cutoffs = [-1 if q is None else _MAX_PRIORITY for q in quotas]
        self._priorities = [array("Q") for _ in quotas]
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

    def finish(self) -> tuple[list[int], list[int]]:
        """Return how many sources each stratum gives, and their largest priorities (-1: none)."""
        self._clear()
        counts = fill(
            self.quotas, [len(stratum_priorities) for stratum_priorities in self._priorities]
        )
        last = [
            stratum_priorities[n - 1] if n else -1
            for n, stratum_priorities in zip(counts, self._priorities, strict=True)
        ]
        return counts, last

    def _clear(self) -> None:
        """Drop duplicates, and priorities that are no longer needed."""
        distinct = [np.unique(np.frombuffer(h, dtype=np.uint64)) for h in self._priorities]
        have = [min(q or 0, len(d)) for q, d in zip(self.quotas, distinct, strict=True)]
        for index, smallest in enumerate(distinct):
            need = self._total - (sum(have) - have[index])
            if len(smallest) > need:
                smallest = smallest[:need]
                self._cutoffs[index] = int(smallest[-1]) if need else -1
            self._priorities[index] = array("Q", smallest.tobytes())
        self._count = sum(map(len, self._priorities))
        self._limit = 2 * self._count + _SLACK
