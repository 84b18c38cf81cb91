"""A uniform sample with quotas: of each stratum the texts whose keyed hash is smallest.

A text's priority is a hash of its name under the run's seed. The k smallest are a uniform sample
without replacement; they do not depend on the order in which texts come, equal texts fall together,
and samples of parts merge into the sample of the whole. A stratum is a length bucket of sentences
or of blobs. Of two different texts with one priority (of 64 bits) one would be lost.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from synth.config import BlobConfig, BucketingConfig

if TYPE_CHECKING:
    import numpy as np

#: The types of sources, in the order of their strata.
TYPES = ("sentence", "blob")
_MOST = 2**64 - 1
#: Priorities that may pile up before the first clearing.
_SLACK = 1 << 12


def prioritise(seed: int) -> Callable[[str], int]:
    """The priority of a source id, 0 to 2**64 - 1: another order for every seed."""
    key = seed.to_bytes(16, "big")

    def priority(source_id: str) -> int:
        digest = hashlib.blake2b(bytes.fromhex(source_id), digest_size=8, key=key).digest()
        return int.from_bytes(digest, "big")

    return priority


def bucket_of(length: float, boundaries: Sequence[float]) -> int | None:
    """The bucket of a length: its lower edge belongs to it. None where there is none."""
    bucket = bisect_right(boundaries, length) - 1
    return bucket if 0 <= bucket < len(boundaries) - 1 else None


def plan_quotas(bucketing: BucketingConfig, blob: BlobConfig, pool: int) -> list[int | None]:
    """How many sources each stratum gives: the buckets of sentences, then those of blobs.

    auto: equal shares of the pool. Numbers: those, or their shares of the pool where they are more.
    A bucket with the number 0, and a type with the ratio 0, is None: it never gives any.
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
    """Whole shares of `total` by weight: largest remainders first, of equal ones the first."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    exact = [total * weight / whole for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def fill(quotas: Sequence[int | None], supply: Sequence[int]) -> list[int]:
    """What each stratum gives when it has `supply`: its quota, and its part of what others lack.

    What a type lacks comes from its own other buckets in equal parts, lower ones first; what is
    lacking then, from the other type's.
    """
    room = [0 if q is None else have for q, have in zip(quotas, supply, strict=True)]
    taken = [min(q or 0, have) for q, have in zip(quotas, room, strict=True)]
    half = len(quotas) // len(TYPES)
    own = [range(start, start + half) for start in range(0, len(quotas), half)]
    for group in own:
        lack = sum((quotas[i] or 0) - taken[i] for i in group)
        _spread(lack, group, taken, room)
    lack = sum(q or 0 for q in quotas) - sum(taken)
    _spread(lack, range(len(quotas)), taken, room)
    return taken


def _spread(lack: int, group: Sequence[int], taken: list[int], room: Sequence[int]) -> None:
    while lack > 0 and (able := [i for i in group if taken[i] < room[i]]):
        share = max(1, lack // len(able))
        for index in able:
            more = min(share, room[index] - taken[index], lack)
            taken[index] += more
            lack -= more


class BottomK:
    """The smallest priorities of each stratum, as many as the sample may need.

    A stratum needs its quota and what the others may come to lack: the total less what they are
    known to have. So memory follows the total, not what is offered.
    """

    def __init__(self, quotas: Sequence[int | None]) -> None:
        self.quotas = list(quotas)
        self._total = sum(q or 0 for q in quotas)
        self._cutoffs = [-1 if q is None else _MOST for q in quotas]
        self._held = [array("Q") for _ in quotas]
        self._count = 0
        self._limit = _SLACK

    def offer(self, stratum: int, priority: int) -> bool:
        """Whether a text may be of the sample yet; if not, it never will be."""
        if priority > self._cutoffs[stratum]:
            return False
        self._held[stratum].append(priority)
        self._count += 1
        if self._count > self._limit:
            self._clear()
        return True

    def extend(self, stratum: int, priorities: np.ndarray) -> None:
        """Offer many at once, such as those of another part."""
        import numpy as np

        if self._cutoffs[stratum] < 0:
            return
        few = priorities[priorities <= np.uint64(self._cutoffs[stratum])]
        self._held[stratum].frombytes(few.astype(np.uint64).tobytes())
        self._count += len(few)
        if self._count > self._limit:
            self._clear()

    def finish(self) -> tuple[list[int], list[int]]:
        """How many each stratum gives, and the largest priority among them (-1 for none)."""
        self._clear()
        taken = fill(self.quotas, [len(held) for held in self._held])
        last = [held[n - 1] if n else -1 for n, held in zip(taken, self._held, strict=True)]
        return taken, last

    def _clear(self) -> None:
        """Drop doubles, and what no stratum can need any more."""
        import numpy as np

        distinct = [np.unique(np.frombuffer(h, dtype=np.uint64)) for h in self._held]
        have = [min(q or 0, len(d)) for q, d in zip(self.quotas, distinct, strict=True)]
        for index, found in enumerate(distinct):
            need = self._total - (sum(have) - have[index])
            if len(found) > need:
                found = found[:need]
                self._cutoffs[index] = int(found[-1]) if need else -1
            self._held[index] = array("Q", found.tobytes())
        self._count = sum(map(len, self._held))
        self._limit = 2 * self._count + _SLACK
