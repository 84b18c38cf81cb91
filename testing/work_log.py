"""Counts the arithmetic of a scorer, and measures how fast this machine multiplies matrices."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scorekit.net.http_clients import sync_client


@dataclass(slots=True)
class WorkLog:
    """Records the batches of a backend's `forward`: (padded length, lengths of the rows)."""

    shapes: list[tuple[int, list[int]]] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def watching(cls, backend: Any) -> WorkLog:
        """Return a log of every further batch of `backend`."""
        log = cls()
        forward = backend.forward

        def watched(batch: Sequence[Any]) -> Any:
            lengths = [encoded.length for encoded in batch for _ in range(encoded.rows)]
            log.shapes.append((max(lengths), lengths))
            started = time.perf_counter()
            try:
                return forward(batch)
            finally:
                log.seconds += time.perf_counter() - started

        backend.forward = watched
        return log

    @property
    def batches(self) -> int:
        """Return how many batches there were."""
        return len(self.shapes)

    @property
    def real_tokens(self) -> int:
        """Return the number of tokens of texts."""
        return sum(sum(lengths) for _, lengths in self.shapes)

    @property
    def padded_tokens(self) -> int:
        """Return the number of tokens with the padding to the longest of a batch."""
        return sum(longest * len(lengths) for longest, lengths in self.shapes)

    @property
    def waste(self) -> float:
        """Return the share of the padded tokens that is padding."""
        return 1 - self.real_tokens / self.padded_tokens

    def flops(
        self, *, padded: bool, layers: int, hidden: int, intermediate: int, heads: int
    ) -> float:
        """Return the floating-point operations of an encoder of that shape.

        They are those of four projections, two inner products, and attention's two products per
        block. A product of [m, k] and [k, n] costs 2mkn.
        """
        del heads  # splits the width, costs nothing
        linear = 2 * (4 * hidden**2 + 2 * hidden * intermediate)
        total = 0.0
        for longest, lengths in self.shapes:
            for length in [longest] * len(lengths) if padded else lengths:
                total += length * (linear + 4 * length * hidden)
        return layers * total


def matmul_flops_per_s(
    hidden: int,
    intermediate: int,
    rows: int,
    seconds: float = 2.0,
    *,
    device: str = "cpu",
    dtype: str = "float32",
) -> float:
    """Return the rate of torch.mm over the products of one encoder block.

    The output memory exists already, so it is the rate that the model could reach at most.
    """
    import torch

    shapes = [(hidden, hidden)] * 4 + [(hidden, intermediate), (intermediate, hidden)]
    kind: Any = {"device": device, "dtype": getattr(torch, dtype)}
    products = [
        (torch.randn(rows, k, **kind), torch.randn(n, k, **kind).t(), torch.empty(rows, n, **kind))
        for k, n in shapes
    ]
    is_cuda = device.startswith("cuda")
    flops = sum(2 * rows * k * n for k, n in shapes)
    rates: list[float] = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(rates) < 3:
        started = time.perf_counter()
        for a, b, out in products:
            torch.mm(a, b, out=out)
        if is_cuda:
            torch.cuda.synchronize(device)
        rates.append(flops / (time.perf_counter() - started))
    return statistics.median(rates)


def waste_percent(url: str) -> float:
    """Return the share of a service's tokens that was padding, by its own count."""
    with sync_client(url, timeout_s=60.0) as client:
        text = client.get("/metrics").text
    real, padding = (
        float(re.search(rf"^scorekit_{name}_total (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("tokens", "padding_tokens")
    )
    return 100 * padding / (real + padding)
