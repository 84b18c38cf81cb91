"""Measure the gain of a second replica on Ray Serve, and the throughput of Ray's proxy.

The backend is the fake one, and every answer is checked. Cluster and load share this machine. So
the model sleeps instead of computing, and the cores are busy only with the transport.

    python -m bench.ray_serve [--quick]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.common import Measurement, compare, run, service
from testing.load import batches, check, distinct_samples, encode, send_and_time
from testing.processes import free_port
from testing.ray_serve import start_serve

FAKE = "scorekit.server.fake"
CONNECTIONS = 16
REQUEST = 16  # pairs
SECONDS_PER_PAIR = 0.01


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    repeats, requests = (2, 32) if quick else (5, 64)
    with cluster() as url:
        yield two_against_one(url, repeats, requests)
        yield from ceiling(url, repeats, 100 if quick else 1000)


def two_against_one(url: str, repeats: int, requests: int) -> Measurement:
    """Send the same requests to applications of two replicas and of one, in turn."""
    for name, replicas in (("one", 1), ("two", 2)):
        deploy(name, replicas, seconds_per_pair=SECONDS_PER_PAIR)
        ask(f"{url}/{name}", 4 * CONNECTIONS, 1)  # so that the proxy knows the replicas
    timing = compare(
        lambda: ask(f"{url}/two", requests, REQUEST),
        lambda: ask(f"{url}/one", requests, REQUEST),
        repeats,
    )
    timing["pairs_a_run"] = requests * REQUEST
    for name in ("one", "two"):
        delete(name)
    return Measurement(
        "Ray Serve, 2 replicas against 1, 10 ms a pair",
        timing["times_faster"],
        "times the rate",
        at_least=1.8,
        details=timing,
    )


def ceiling(url: str, repeats: int, singles: int) -> Iterator[Measurement]:
    """Measure a model that takes no time behind the proxy, and the same service without Ray."""
    deploy("free", 2)
    with service(FAKE, "--cache", "memory") as (_, plain):
        for pairs, requests in ((1, singles), (64, singles // 5)):
            for target in (f"{url}/free", plain):
                ask(target, requests // 10, pairs)
            ray_rates, plain_rates = [], []
            for _ in range(repeats):
                ray_rates.append(requests / ask(f"{url}/free", requests, pairs))
                plain_rates.append(requests / ask(plain, requests, pairs))
            details = {
                "runs_per_s": ray_rates,
                "plain_runs_per_s": plain_rates,
                "requests_a_run": requests,
            }
            many = "s" if pairs > 1 else ""
            yield Measurement(
                f"Ray's proxy, 2 replicas, {pairs} pair{many} a request",
                statistics.median(ray_rates),
                "requests/s",
                details=details,
            )
            yield Measurement(
                "  the plain service beside it", statistics.median(plain_rates), "requests/s"
            )
    delete("free")


def ask(url: str, requests: int, pairs: int) -> float:
    """Return the seconds of that many requests, and check every answer."""
    root, _, prefix = url.removeprefix("http://").partition("/")
    path = f"POST /{prefix}/v1/score" if prefix else "POST /v1/score"
    parts = batches(distinct_samples(requests * pairs), pairs)
    bodies = [
        encode(part, options={"cache": False}).replace(b"POST /v1/score", path.encode(), 1)
        for part in parts
    ]
    answers, seconds = send_and_time(f"http://{root}", bodies, CONNECTIONS)
    assert len(answers) == requests
    for answer in answers:
        check(answer, parts[answer.index])
    return seconds


# -- the cluster ----------------------------------------------------


@contextmanager
def cluster() -> Iterator[str]:
    """Start a separate local Ray with Serve; yield the proxy's URL."""
    import ray
    from ray import serve

    try:
        port = free_port()
        http = {"host": "127.0.0.1", "port": port, "request_timeout_s": 900}
        start_serve(http_options=http, logging_config={"enable_access_log": False})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def deploy(name: str, replicas: int, **args: Any) -> None:
    """Deploy the fake under `/name`, and wait until it is ready."""
    from ray import serve

    from deploy.ray.apps import Scorer

    replicated: Any = Scorer  # as Ray's decorator makes it
    scorer = replicated.options(num_replicas=replicas, ray_actor_options={"num_cpus": 0.1})
    bound = scorer.bind("fake", {"no_auth": True, "log_level": "warning"} | args)
    serve.run(bound, name=name, route_prefix=f"/{name}")


def delete(name: str) -> None:
    """Delete the application and its replicas."""
    from ray import serve

    serve.delete(name)


if __name__ == "__main__":
    run("ray_serve", __doc__, questions)
