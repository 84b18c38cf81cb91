"""Prometheus metrics of a service. Each app has its own registry, so that tests can run several."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from scorekit.errors import SAMPLE_ERROR_TYPES

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes and its like
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        # state
        self.loaded = gauge("loaded", "1 once the model is loaded and warmed up.")
        self.ready = gauge("ready", "1 while new work is taken: what /health/ready says.")
        # requests
        self.requests = counter("requests", "Requests by route and status.", "route", "status")
        self.request_seconds = histogram(
            "request_seconds", "Seconds from a request to its answer.", _SECONDS, "route"
        )
        self.samples = counter(
            "samples", "Samples by outcome: ok, cached, or the type of the failure.", "outcome"
        )
        self.key_requests = counter(
            "key_requests", "Requests that came with a configured key, by its id.", "key"
        )
        self.key_samples = counter(
            "key_samples", "Samples that were accepted with a configured key, by its id.", "key"
        )
        for outcome in ("ok", "cached", *SAMPLE_ERROR_TYPES):
            self.samples.labels(outcome)
        # cache
        self.cache_hits = counter("cache_hits", "Samples found in the cache, by tier.", "tier")
        self.cache_seconds = histogram(
            "cache_seconds", "Seconds that a request waited for the second cache tier.", _SECONDS
        )
        self.cache_errors = counter("cache_errors", "Calls of the second cache tier that failed.")
        self.cache_damaged = counter(
            "cache_damaged", "Stored values that did not pass the check on reading."
        )
        self.cache_breaker_open = gauge(
            "cache_breaker_open", "1 while the second cache tier is left alone after failures."
        )
        # queue
        self.joined = counter("joined", "Samples that joined an equal one in flight.")
        self.queue_items = gauge("queue_items", "Samples that wait for the model or are in it.")
        self.queue_items_limit = gauge("queue_items_limit", "Most samples that may wait.")
        self.queue_tokens = gauge("queue_tokens", "About how many tokens these samples have.")
        self.queue_tokens_limit = gauge("queue_tokens_limit", "Most tokens that may wait.")
        self.queue_seconds = histogram(
            "queue_seconds", "Seconds that samples waited; one of a request in a batch.", _SECONDS
        )
        self.longest_wait = gauge(
            "longest_wait_seconds", "Seconds that the oldest waiting sample has waited.", "line"
        )
        self.tokenise_seconds = histogram(
            "tokenise_seconds", "Seconds of tokenising up to 256 samples of a request.", _SECONDS
        )
        self.truncated = counter(
            "truncated",
            "Texts that were cut to the model's limit, by field of the sample.",
            "field",
        )
        # model
        self.model_seconds = histogram(
            "model_seconds", "Seconds of a batch in the model.", _SECONDS
        )
        self.batch_samples = histogram("batch_samples", "Samples in a batch.", _SIZES)
        self.tokens = counter("tokens", "Tokens that the model read.")
        self.padding_tokens = counter("padding_tokens", "Tokens of padding that the model read.")
        self._watch_host()

    def _watch_host(self) -> None:
        peak = self._gauge("host_memory_peak_bytes", "Most memory that the process has held.")
        peak.set_function(_peak_resident_bytes)
        limit = self._gauge("host_memory_limit_bytes", "Most memory that the process may hold.")
        limit.set(memory_limit_bytes())

    def watch_device(self, memory_bytes: Callable[[], tuple[int, int, int] | None]) -> None:
        """Add the device's memory (current, peak, total) if there is a device."""
        if memory_bytes() is None:
            return
        now = self._gauge("device_memory_bytes", "Memory that the model holds on its device.")
        peak = self._gauge("device_memory_peak_bytes", "Most memory that it has held there.")
        total = self._gauge("device_memory_total_bytes", "Memory that the device has.")
        now.set_function(lambda: (memory_bytes() or (0, 0, 0))[0])
        peak.set_function(lambda: (memory_bytes() or (0, 0, 0))[1])
        total.set_function(lambda: (memory_bytes() or (0, 0, 0))[2])

    def begin_at_zero(self, route: str, texts: Iterable[str] = ()) -> None:
        """Create the series for alerts before their first event.

        texts: those that may be cut.

        Prometheus sees no increase in a series that begins with its first failure."""
        for status in ("200", "429", "500", "503", "504"):
            self.requests.labels(route, status)
        for text in texts:
            self.truncated.labels(text)

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"scorekit_{name}", description, labels, registry=self.registry)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(f"scorekit_{name}", description, labels, registry=self.registry)

    def _histogram(
        self, name: str, description: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"scorekit_{name}", description, labels, buckets=buckets, registry=self.registry
        )


def _peak_resident_bytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_limit_bytes() -> int:
    """Return the memory limit of this process: the machine's, capped by a cgroup v2 or v1 limit."""
    limit_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in _MEMORY_LIMITS:
        try:
            limit_bytes = min(limit_bytes, int(Path(limit_file).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return limit_bytes
