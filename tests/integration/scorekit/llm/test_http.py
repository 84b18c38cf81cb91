"""Check the connection to an LLM server: proxies, certificates, keys, environment variables."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from pydantic import SecretStr

from scorekit.errors import UserError
from scorekit.llm import LLMClient
from testing.servers import free_port, running_app
from tests.integration.scorekit.net.certificates import HAS_OPENSSL, self_signed
from tests.kits.llm import ask

ANYWHERE = "http://teacher.invalid/v1"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def through(url, userinfo=""):
    """Return the URL of the fake as that of a proxy: it answers for any host."""
    return url.removesuffix("/v1").replace("http://", f"http://{userinfo}")


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_the_proxy_of_the_environment_is_used_with_its_password(url, fake, monkeypatch, name):
    monkeypatch.setenv(name, through(url, "me:hidden@"))
    _, [choice] = ask(ANYWHERE, fake, api_key=SecretStr("sesame"))
    (seen,) = fake.requests
    assert choice.text and seen.headers["host"] == "teacher.invalid"
    assert seen.headers["proxy-authorization"] == "Basic bWU6aGlkZGVu"  # me:hidden
    assert seen.headers["authorization"] == "Bearer sesame"


def test_a_server_of_this_machine_is_asked_without_the_proxy(url, fake, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    _, [choice] = ask(url, fake)
    assert choice.text


def test_no_proxy_names_hosts_that_are_asked_directly(url, fake, monkeypatch):
    monkeypatch.setenv("http_proxy", through(url))
    monkeypatch.setenv("no_proxy", "example.org,fd00::/8,teacher.invalid")
    _, error = ask(ANYWHERE, fake, max_attempts=1)
    assert error.type == "unreachable" and not fake.requests


def test_a_proxy_that_is_away_is_named_in_the_error(fake, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    _, error = ask(ANYWHERE, fake, max_attempts=1)
    assert "through the proxy http_proxy=http://127.0.0.1" in error.message


def test_a_proxy_s_password_is_in_no_error(fake, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://me:hidden@127.0.0.1:{free_port()}")
    _, error = ask(ANYWHERE, fake, max_attempts=1)
    assert error.type == "unreachable" and "hidden" not in str(error)


def test_a_proxy_that_refuses_a_tunnel_is_told_without_its_password(url, fake, monkeypatch):
    monkeypatch.setenv("https_proxy", through(url, "me:hidden@"))
    _, error = ask(ANYWHERE.replace("http", "https"), fake, max_attempts=1)
    assert error.type == "unreachable" and "hidden" not in str(error)


def test_a_socks_proxy_is_refused_in_one_line(fake, monkeypatch):
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1080")
    with pytest.raises(UserError, match=r"socks5 proxy.*NO_PROXY"):
        ask(ANYWHERE, fake)


def test_netrc_is_not_read(url, fake, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    ask(url, fake)
    assert fake.requests[0].headers["authorization"] == "Bearer none"


@pytest.mark.parametrize("key", ["sesame\n", "열려라"])
def test_a_key_that_fits_no_header_is_told_and_not_shown(url, key):
    with pytest.raises(UserError, match="line end") as error_info:
        LLMClient(url, "m", api_key=SecretStr(key))
    assert key.strip() not in str(error_info.value)


@pytest.mark.skipif(not HAS_OPENSSL, reason="openssl makes the certificate")
def test_a_certificate_is_checked_against_the_store_of_the_system(fake, monkeypatch, tmp_path):
    certificate, key = self_signed(tmp_path)
    config = uvicorn.Config(
        fake.app, log_config=None, ssl_certfile=certificate, ssl_keyfile=str(key)
    )
    with running_app(fake.app, config) as url:
        url = f"{url}/v1".replace("http:", "https:")
        _, error = ask(url, fake, max_attempts=1)
        assert error.type == "unreachable" and "certificate" in error.message.lower()
        assert not fake.requests
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        _, [choice] = ask(url, fake)
        assert choice.text


def test_a_client_that_was_closed_asks_again(url, fake):
    async def work():
        client = LLMClient(url, fake.model)
        await client.check()
        await client.close()
        await client.check()
        await client.close()

    asyncio.run(work())
