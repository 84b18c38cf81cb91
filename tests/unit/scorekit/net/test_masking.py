"""Check that no secret is left in a text, and that a server's words are one line."""

from __future__ import annotations

import base64

import pytest

from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from scorekit.net.masking import server_words, without_passwords


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://user:secret@host:8001/v1", "http://***@host:8001/v1"),
        ("a http://u:p@h, b https://key@g/x", "a http://***@h, b https://***@g/x"),
        ("http://u:p@ss@host/", "http://***@host/"),
        ("mail me@example.org about http://host/a@b", "mail me@example.org about http://host/a@b"),
        ("no url, user:secret@host", "no url, user:secret@host"),
        ("redis://:secret@db:6379/0", "redis://***@db:6379/0"),
    ],
)
def test_passwords_of_urls_are_masked(text, masked):
    assert without_passwords(text) == masked


def test_no_error_has_the_password_of_a_url():
    url = "http://user:secret@host"
    errors = [
        UserError(f"{url}: wrong", [f"{url}: line"]),
        ServiceUnreachable(url, f"{url} is away"),
        RequestError("overloaded", f"{url}: busy"),
        SampleError("upstream", f"{url}: busy"),
    ]
    for error in errors:
        assert "secret" not in f"{error} {error!r} {vars(error)}"
        assert "***@host" in str(error)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\r\n two\t three\u2028four", "one two three four"),
        ("\x1b[31mred\x1b[0m \x07\x9b", r"\x1b[31mred\x1b[0m \x07\x9b"),
        ("a\u202eb\u200bc\ud800\U000e0041", r"a\u202eb\u200bc\ud800\U000e0041"),
        ("Incorrect API key provided: sk-abcdefgh1234", "Incorrect API key provided: ***"),
        ("sent Authorization: Bearer abc.def-123", "sent Authorization: Bearer ***"),
        ("sent Proxy-Authorization: basic dXNlcjpwYXNz", "sent Proxy-Authorization: basic ***"),
        ('{"api_key": "abcdef", "n": 1}', '{"api_key": "***", "n": 1}'),
        ("GET http://me:p@ss@host/v1?key=abcdef&n=1", "GET http://***@host/v1?key=***&n=1"),
        ("key AIzaSyABCDEFGHIJKLMNOP is invalid", "key *** is invalid"),
        ("token eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.x", "token ***"),
        ("ours is open-sesame-1", "ours is ***"),
        ("max_tokens: 8192, token count: 9", "max_tokens: 8192, token count: 9"),
        ("한국어 €5", "한국어 €5"),
        ("", ""),
    ],
)
def test_a_server_s_words_are_one_line_without_marks_and_secrets(text, line):
    assert server_words(text, authorization="Bearer open-sesame-1") == line
    assert server_words(line) == line  # an error that repeats an error


def test_a_server_s_words_are_cut_after_they_are_masked():
    assert server_words("a" * 5000, max_chars=100) == "a" * 94 + " [...]"
    assert server_words("a" * 101, max_chars=100) == "a" * 94 + " [...]"
    assert server_words("a" * 100, max_chars=100) == "a" * 100
    words = "x" * 90 + " open-sesame-1"
    masked = server_words(words, authorization="Bearer open-sesame-1", max_chars=100)
    assert masked == "x" * 90 + " ***"


def test_a_secret_that_a_server_echoes_is_masked():
    assert server_words("bad key sesame-1", authorization="Bearer sesame-1") == "bad key ***"
    token = base64.b64encode(b"user:open sesame").decode()
    echo = f"Basic {token}, user:open sesame, open sesame"
    assert server_words(echo, authorization=f"Basic {token}") == "Basic ***, ***, ***"
    assert server_words("any word", authorization="Bearer any") == "any word"
