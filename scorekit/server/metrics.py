"""What a service tells Prometheus. Each app has its own registry, so that tests can run several."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The figures of one service."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "scorekit_requests", "Requests by route and status.", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "scorekit_request_seconds", "Seconds from a request to its answer.", ["route"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.samples = Counter(
            "scorekit_samples", "Samples by outcome: ok, cached, or the type of the failure.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self.cache_hits = Counter(
            "scorekit_cache_hits", "Samples found in the cache, by tier.", ["tier"],
            registry=registry,
        )  # fmt: skip
        self.cache_errors = Counter(
            "scorekit_cache_errors", "Calls of the second cache tier that failed.",
            registry=registry,
        )  # fmt: skip
        self.cache_damaged = Counter(
            "scorekit_cache_damaged", "Stored values that did not pass the check on reading.",
            registry=registry,
        )  # fmt: skip
        self.cache_breaker_open = Gauge(
            "scorekit_cache_breaker_open",
            "1 while the second cache tier is left alone after failures.", registry=registry,
        )  # fmt: skip
        self.joined = Counter(
            "scorekit_joined", "Samples that joined an equal one in flight.", registry=registry
        )
        self.queue_items = Gauge(
            "scorekit_queue_items", "Samples that wait for the model or are in it.",
            registry=registry,
        )  # fmt: skip
        self.queue_seconds = Histogram(
            "scorekit_queue_seconds", "Seconds a sample waited for the model.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.tokenise_seconds = Histogram(
            "scorekit_tokenise_seconds", "Seconds of tokenising a request's samples.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.model_seconds = Histogram(
            "scorekit_model_seconds", "Seconds of a batch in the model.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.batch_samples = Histogram(
            "scorekit_batch_samples", "Samples in a batch.", buckets=_SIZES, registry=registry
        )
        self.tokens = Counter("scorekit_tokens", "Tokens that the model read.", registry=registry)
        self.padding_tokens = Counter(
            "scorekit_padding_tokens", "Tokens of padding that the model read.", registry=registry
        )
