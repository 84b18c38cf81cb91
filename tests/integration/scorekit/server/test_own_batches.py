"""Check that with `--own-batches` a score does not depend on other requests, to the last bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from demo.common import DATA, MODELS
from scorekit.client import SyncScoringClient
from services.metricx.model import MetricXBackend
from services.xcomet.model import XCometBackend
from testing.servers import running_service
from trainer.runs.run_log import read_jsonl


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def requests() -> list[list[dict[str, Any]]]:
    rows = read_jsonl(DATA / "heldout.jsonl")[:96]
    samples = [{"src": row["src_text"], "mt": row["ref_text"]} for row in rows]
    return [samples[begin : begin + 8] for begin in range(0, len(samples), 8)]


@pytest.mark.parametrize("service", ["metricx", "xcomet"])
def test_the_last_bit_of_a_score_does_not_depend_on_other_requests(service: str) -> None:
    backend_type = MetricXBackend if service == "metricx" else XCometBackend
    scores = []
    for callers in (1, 12):
        backend = backend_type(str(MODELS / service), device="cpu", threads=1)
        with (
            running_service(backend, own_batches=True) as url,
            SyncScoringClient(url) as client,
            ThreadPoolExecutor(callers) as pool,
        ):
            results = pool.map(lambda samples, client=client: client.score(samples), requests())
            scores.append([[result.score for result in of_request] for of_request in results])
    assert scores[0] == scores[1]
