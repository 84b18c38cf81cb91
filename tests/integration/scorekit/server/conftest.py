"""Provide the services that the tests of the contract use."""

from __future__ import annotations

import pytest

from scorekit.server.fake import FakeBackend
from testing.servers import running_service


@pytest.fixture(scope="module")
def url():
    with running_service(FakeBackend("metricx"), max_samples=500, max_body_bytes=2**20) as url:
        yield url


@pytest.fixture(scope="module")
def xcomet_url():
    with running_service(FakeBackend("xcomet")) as url:
        yield url
