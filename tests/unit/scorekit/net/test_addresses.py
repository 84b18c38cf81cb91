"""Check that a URL is split into an address, which is shown, and its password, which is not."""

from __future__ import annotations

import logging

import pytest

from scorekit.errors import UserError
from scorekit.net.addresses import address_of, client_url, server_url, without_userinfo


@pytest.mark.parametrize(
    ("url", "address", "authorization"),
    [
        ("http://host:8001/", "http://host:8001", None),
        ("http://user:secret@host:8001/v1/", "http://host:8001/v1", "Basic dXNlcjpzZWNyZXQ="),
        ("https://user:p%40ss@[::1]:8001", "https://[::1]:8001", "Basic dXNlcjpwQHNz"),
        ("http://token@host", "http://host", "Basic dG9rZW4="),
    ],
)
def test_a_url_is_split_into_address_and_authorization(url, address, authorization):
    assert server_url(url) == (address, authorization)
    assert address_of(url) == address


def test_the_password_of_a_url_goes_before_a_key():
    assert server_url("http://u:p@h").authorization_header("key") == {"Authorization": "Basic dTpw"}
    assert server_url("http://h").authorization_header("key") == {"Authorization": "Bearer key"}
    assert server_url("http://h").authorization_header(None) == {}


@pytest.mark.parametrize(
    "url",
    [
        "ftp://u:secret@h",
        "http://u:secret@",
        "http://u:secret@[",
        "http://u:#secret@h",
        "http://u:a/secret@h:80",
        "http://u:?secret@h",
        "u:secret@h",
        7,
    ],
)
def test_what_is_no_url_is_refused_without_its_password(url):
    with pytest.raises(UserError, match="is not the URL of a service") as error_info:
        server_url(url)
    assert "secret" not in str(error_info.value)


def test_a_password_is_warned_of_once_and_not_shown(caplog):
    caplog.set_level(logging.WARNING, "scorekit.net.addresses")
    for path in ("", "/"):
        client_url(f"http://u:secret@warned.example{path}", "SCOREKIT_API_KEY")
    client_url("http://quiet.example", "SCOREKIT_API_KEY")
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith("http://warned.example: ") and "set SCOREKIT_API_KEY" in line
    assert "secret" not in line


def test_data_of_a_run_loses_the_passwords_of_its_urls_only():
    url, address = "http://u:secret@h:1/v1", "http://h:1/v1"
    data = {
        "reward": {"metricx_urls": [url, "http://h:2/"], "joined": f"{url},{url}"},
        "unusual": ["HTTP://u:secret@h", f" {url}", "http://u:sec,ret@h", f"{url}, {url}"],
        url: {"model": "m@1", "n": 3, "nothing": None},
        "text": "write to me@example.org, see http://x/y",
    }
    assert without_userinfo(data) == {
        "reward": {"metricx_urls": [address, "http://h:2/"], "joined": f"{address},{address}"},
        "unusual": ["http://h", address, "http://h", f"{address},{address}"],
        address: {"model": "m@1", "n": 3, "nothing": None},
        "text": "write to me@example.org, see http://x/y",
    }
