"""Check which certificates a client of ours trusts, with a service under https."""

from __future__ import annotations

import pytest
import uvicorn

from scorekit.client import SyncScoringClient
from scorekit.errors import ServiceUnreachable
from scorekit.net.http_clients import ssl_context
from scorekit.server.app import create_app
from scorekit.server.fake import FakeBackend
from scorekit.server.settings import ServiceSettings
from testing.servers import running_app
from tests.integration.scorekit.net.certificates import HAS_OPENSSL, self_signed


@pytest.fixture(autouse=True)
def no_store_of_the_user(monkeypatch):
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the certificate")
def test_a_client_trusts_the_certificates_that_are_named_when_it_is_made(monkeypatch, tmp_path):
    certificate, key = self_signed(tmp_path)
    app = create_app(FakeBackend(), ServiceSettings(cache="memory"))
    config = uvicorn.Config(app, log_config=None, ssl_certfile=certificate, ssl_keyfile=str(key))
    with running_app(app, config) as url:
        url = url.replace("http:", "https:")
        with SyncScoringClient(url, deadline_s=0.1) as client:
            with pytest.raises(ServiceUnreachable, match="certificate"):
                client.info()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with SyncScoringClient(url) as client:
            assert client.score([{"src": "a", "mt": "b"}])[0].ok


@pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the certificate")
def test_clients_share_what_is_costly_to_make(monkeypatch, tmp_path):
    context = ssl_context()
    assert ssl_context() is context
    monkeypatch.setenv("SSL_CERT_FILE", str(self_signed(tmp_path)[0]))
    assert ssl_context() is not context
