"""Check which proxy a URL has, by the variables of the environment."""

from __future__ import annotations

import pytest

from scorekit.errors import UserError
from scorekit.net.addresses import proxy_for, proxy_note

PROXY = "http://me:hidden@proxy.example:3128"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    return monkeypatch


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_direct"),
    [
        ("http://gpu7:8001/", "http://gpu7:8001", True),
        ("", "http://gpu7:8001", False),
        ("*", "http://gpu7:8001", True),
        ("localhost,fd00::/8", "http://gpu7:8001", False),
        ("localhost,fd00::/8", "http://[fd00::7]:8001", True),
        ("localhost, [fd00::]/8", "http://[fd12::7]:8001", True),
        ("fd00::/8", "http://[fe80::7]:8001", False),
        ("[2001:db8::1]", "http://[2001:db8::1]:8001", True),
        ("2001:db8::1", "http://[2001:db8::1]", True),
        ("[2001:db8::1]:81", "http://[2001:db8::1]:81", True),
        ("[2001:db8::1]:81", "http://[2001:db8::1]:82", False),
        ("10.0.0.0/8", "http://10.3.4.5:8001", True),
        ("10.0.0.0/8", "http://11.3.4.5:8001", False),
        ("10.0.0.0/8", "http://gpu7:8001", False),
        ("example.org", "http://a.example.org", True),
        (".example.org", "http://example.org", True),
        ("*.example.org", "http://a.example.org", True),
        ("example.org", "http://otherexample.org", False),
        ("GPU7", "http://gpu7:8001", True),
        ("gpu7:8001", "http://gpu7:8001", True),
        ("gpu7:8001", "http://gpu7:8002", False),
        ("gpu7:80", "http://gpu7", True),
        ("https://gpu7", "http://gpu7", False),
        ("all://gpu7", "http://gpu7", True),
        ("fd00::/999,[::1,:,://,[]", "http://gpu7:8001", False),
    ],
)
def test_no_proxy_names_hosts_addresses_and_ranges(environment, no_proxy, url, is_direct):
    environment.setenv("NO_PROXY", no_proxy)
    proxy = proxy_for(url)
    assert (proxy is None) == is_direct
    assert bool(proxy_note(url)) != is_direct


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.8.8.8", "[::1]", "0.0.0.0", "metricx.localhost"]
)
def test_a_server_of_this_machine_has_no_proxy(host):
    assert proxy_for(f"http://{host}:8001") is None


def test_each_variable_has_its_scheme_and_is_named(environment):
    environment.setenv("ALL_PROXY", "proxy2.example:3128")
    http, https = proxy_for("http://gpu7"), proxy_for("https://gpu7")
    assert http is not None and https is not None
    assert (http.url, http.variable) == (PROXY, "HTTP_PROXY")
    assert (https.url, https.variable) == ("http://proxy2.example:3128", "ALL_PROXY")
    assert http.setting == "HTTP_PROXY=http://***@proxy.example:3128"


def test_a_message_names_the_proxy_without_its_password():
    note = proxy_note("http://gpu7:8001")
    assert "HTTP_PROXY=http://***@proxy.example:3128" in note and "NO_PROXY=gpu7" in note
    assert "hidden" not in note


@pytest.mark.parametrize(
    ("proxy", "words"),
    [
        ("socks4://me:hidden@p:1080", "a socks4 proxy cannot be used"),
        ("http://me:hidden@", "not the URL of a proxy"),
        ("http://me:#hidden@p:3128", "not the URL of a proxy"),
        ("http://me:/hidden@p:3128", "not the URL of a proxy"),
        ("http://me:a#hidden@p:3128", "not the URL of a proxy"),
        ("http://p:port", "not the URL of a proxy"),
        ("http://[::1", "not the URL of a proxy"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_refused_in_one_line(environment, proxy, words):
    environment.setenv("HTTP_PROXY", proxy)
    with pytest.raises(UserError, match=r"^HTTP_PROXY=.*gpu7 into NO_PROXY") as error_info:
        proxy_for("http://gpu7:8001")
    assert words in str(error_info.value) and "hidden" not in str(error_info.value)


def test_a_socks_proxy_needs_a_package_only_where_it_is_used(environment):
    environment.delenv("HTTP_PROXY")
    environment.setenv("ALL_PROXY", "socks5://me:hidden@p:1080")
    environment.setattr("importlib.util.find_spec", lambda name: None)
    assert proxy_for("http://127.0.0.1:8001") is None
    with pytest.raises(UserError, match=r"^ALL_PROXY=socks5://\*\*\*@p:1080: .*httpx\[socks\]"):
        proxy_for("http://gpu7:8001")
    environment.setattr("importlib.util.find_spec", lambda name: "socksio")
    proxy = proxy_for("http://gpu7:8001")
    assert proxy is not None and proxy.url.startswith("socks5://")
    with pytest.raises(UserError, match="LLM client cannot use a socks5 proxy"):
        proxy_for("http://gpu7:8001", can_use_socks=False)
