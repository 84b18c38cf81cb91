"""Check that YAML and JSON of any content is a value or one error with the line."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import yaml

from scorekit import documents
from scorekit.documents import (
    DocumentError,
    FullLoader,
    parse_json,
    parse_yaml,
    read_json,
    read_yaml,
)
from scorekit.errors import UserError

LONG = "9" * 5000
#: Nine lines that stand for a billion values.
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
#: A text, the line of its error, and the problem.
REFUSED = {
    "a date that does not exist": ("a: 1\nb: 2026-02-30\n", 2, "day is out of range"),
    "an hour that does not exist": ("a: 2026-01-01T25:00:00Z", 1, "hour must be in"),
    "a long number": (f"a: 1\nb: {LONG}", 2, "a number of more than 4,300 digits"),
    "a number of 80 bits": ("a: 0xfffffffffffffffffffff", 1, "more than 64 bits"),
    "deep lists": ("a:\n  " + "[" * 5000 + "]" * 5000, 2, "nested too deeply"),
    "deep mappings": ("{a: " * 3000 + "}" * 3000, 1, "nested too deeply"),
    "lists a little too deep": ("[" * 101 + "]" * 101, 1, "nested too deeply"),
    "deep lines": ("".join(" " * i + f"a{i}:\n" for i in range(200)), 100, "nested too deeply"),
    "a list in itself": ("a: &x\n- *x\n", 2, "&x contains itself"),
    "a mapping in itself": ("a: &x\n  b: 1\n  c: *x\n", 3, "&x contains itself"),
    "a mapping merged into itself": ("a: &x\n  <<: *x\n", 2, "&x contains itself"),
    "a billion values": (LAUGHS, 5, "more than 100,000 values"),
    "an unknown alias": ("a: 1\nb: *x\n", 2, "undefined alias"),
    "a tag that runs code": ('a: !!python/object/apply:os.system ["id"]', 1, "constructor"),
    "a tag of another value": ("a: !!bool maybe", 1, "not a value of 'bool'"),
    "an empty number": ('a: !!int ""', 1, "not a value of 'int'"),
    "an empty float": ("a: !!float _", 1, "not a value of 'float'"),
    "a time tag": ("a: !!timestamp x", 1, "not a value of 'timestamp'"),
    "bytes that are none": ('a: !!binary "abc"', 1, "decode base64"),
    "a key twice": ("a: 1\nb: 2\na: 3\n", 3, "the key 'a' is there twice"),
    "a list as a key": ("a: 1\n? [b]\n: 2\n", 2, "unhashable key"),
    "a NUL": ('a: 1\nb: "x\\0y"', 2, "a NUL character"),
    "half a character": ('a: 1\nb: "\\ud800"', 2, "a lone surrogate"),
    "a control character": ("a: 1\nb: \x07", 2, "is not allowed"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, "another document"),
    "an open bracket": ("a: 1\nb: [2\n", 3, "expected ',' or ']'"),
    "a tab": ("a:\n\tb: 1\n", 2, "cannot start any token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_yaml_with_a_problem_is_one_error_with_its_line(name, tmp_path):
    text, line, problem = REFUSED[name]
    for loader in (None, FullLoader):
        with pytest.raises(DocumentError, match=problem) as raised:
            parse_yaml(text, loader)
        assert raised.value.line == line
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=problem) as refused:
        read_yaml(path)
    message = str(refused.value)
    assert message.startswith(f"{path}, line {line}: not YAML: ")
    assert "\n" not in message
    assert len(message) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: \xe9", "not UTF-8 text. Save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "not UTF-8 text. Save the file as UTF-8"),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_is_no_text_is_refused(content, problem, tmp_path):
    path = tmp_path
    if content is not None:
        path = tmp_path / "c.yaml"
        path.write_bytes(content)
    for read in (read_yaml, read_json):
        with pytest.raises(UserError, match=problem):
            read(path)


def test_what_yaml_allows_is_read_as_before():
    text = (
        "\ufefflist: &l [1, 2]\r\nsame: *l\r\nbase: &b {x: 1}\r\nmore: {<<: *b, y: 2}\r\n"
        f"deep: {'[' * 90}{']' * 90}\r\nseed: {2**64 - 1}\r\nempty: \r\n"
    )
    content = parse_yaml(text.encode())
    assert content == yaml.safe_load(text.removeprefix("\ufeff"))
    assert content["more"] == {"x": 1, "y": 2}
    assert parse_yaml("") is None


def test_the_full_loader_reads_tuples_and_runs_nothing():
    assert parse_yaml("a: !!python/tuple [1, 2]", FullLoader) == {"a": (1, 2)}
    with pytest.raises(DocumentError):
        parse_yaml("a: !!python/tuple [1, 2]")


def test_a_file_without_an_end_is_not_read_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_YAML_BYTES", 2**20)
    path = tmp_path / "c.yaml"
    with path.open("wb") as file:
        file.truncate(2**28)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="longer than 1 MiB"):
            read_yaml(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        (f'{{"a": {LONG}}}', "a number has more than 4,300 digits"),
        ("", "line 1 column 1"),
        ("[1,\n2,\n}", "line 3 column 1"),
    ],
)
def test_json_with_a_problem_is_a_value_error(text, problem, tmp_path):
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=problem):
            parse_json(content)
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=problem) as raised:
        read_json(path)
    assert str(raised.value).startswith(f"{path}: not JSON: ")


def test_json_is_read_as_by_the_standard_library():
    text = '{"a": [1, 2.5, "\\u00e9", null], "b": {"c": true}}'
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


def test_a_merge_of_a_merge_is_no_key_that_is_there_twice():
    """Check it where the inner one is deeper in the text: PyYAML reads the outer one first."""
    text = "a: &a {xx: 1}\nb:\n  c:\n    d: &d\n      <<: *a\n      xx: 2\ne: {<<: *d, yy: 3}\n"
    assert parse_yaml(text)["e"] == {"xx": 2, "yy": 3}


def test_a_character_of_two_json_escapes_is_one_character():
    assert parse_yaml(json.dumps({"\U0001f600": "a\U0001f600\u00e9"})) == {
        "\U0001f600": "a\U0001f600\u00e9"
    }
