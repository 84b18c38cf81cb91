"""Check that only well-formed answers are opinions and no generator verifies itself."""

from __future__ import annotations

import json

import pytest

from scorekit.errors import UserError
from trainer.search.answer.config import GeneratorConfig
from trainer.search.steps.verify import Opinion, VerifierConfig, check_independent, read_opinion

GOOD = {"sure": True, "answer": "12 %", "evidence": [{"picture": 2, "quote": "12 percent"}]}


def read(**changed):
    return read_opinion(json.dumps(GOOD | changed), 2)


def test_an_opinion_is_read_from_what_models_put_around_it():
    expected = Opinion(True, "12 %", ((2, "12 percent"),))
    text = json.dumps(GOOD)
    for response in (text, f"```json\n{text}\n```", f"<think>hm</think>{text}"):
        assert read_opinion(response, 2) == expected
    assert read(sure=False, answer="", evidence=[]) == Opinion(False, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12 %",
        "[]",
        "null",
        json.dumps(GOOD)[:-3],
        json.dumps([GOOD]),
        json.dumps(GOOD) * 2,
        "I am sure. " + json.dumps(GOOD),
        '{"sure": true, "sure": false, "answer": "x"}',
        '{"sure": true, "answer": "\\ud800", "evidence": [{"picture": 1, "quote": "x"}]}',
        "[" * 5000 + "]" * 5000,
    ],
)
def test_what_is_not_of_the_form_is_no_opinion(text):
    assert read_opinion(text, 2) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"sure": "true"},
        {"sure": None},
        {"class": "OK"},
        {"answer": 12},
        {"answer": "  "},
        {"answer": "x" * 2001},
        {"evidence": []},
        {"evidence": "12 percent"},
        {"evidence": [{"picture": 0, "quote": "x"}]},
        {"evidence": [{"picture": 3, "quote": "x"}]},
        {"evidence": [{"picture": 1.5, "quote": "x"}]},
        {"evidence": [{"picture": 1, "quote": " "}]},
        {"evidence": [{"picture": 1, "quote": "x", "more": 1}]},
        {"evidence": [{"picture": 1, "quote": "x" * 2001}]},
        {"evidence": [{"picture": 1, "quote": "x"}] * 21},
    ],
)
def test_what_breaks_the_form_is_no_opinion(changed):
    assert read() is not None and read(**changed) is None


LOCAL_URL = "http://localhost:8000/v1"


@pytest.mark.parametrize(
    "url",
    [LOCAL_URL, "http://127.0.0.1:8000/v1/", "http://LOCALHOST:8000/v1", "http://[::1]:8000/v1"],
)
def test_the_generator_does_not_verify_itself(url):
    generator = GeneratorConfig(base_url=LOCAL_URL, model="m")
    with pytest.raises(UserError, match="is the generator"):
        check_independent(VerifierConfig(base_url=url, model="m"), generator)


def test_another_model_or_another_server_may():
    generator = GeneratorConfig(base_url=LOCAL_URL, model="m")
    check_independent(VerifierConfig(base_url=LOCAL_URL, model="n"), generator)
    check_independent(VerifierConfig(base_url="http://localhost:8001/v1", model="m"), generator)
    check_independent(VerifierConfig(base_url="https://localhost:8000/v1", model="n"), generator)


def test_a_verifier_has_to_be_named():
    generator = GeneratorConfig(base_url=LOCAL_URL, model="m")
    for missing in ({"model": "m"}, {"base_url": LOCAL_URL}):
        with pytest.raises(UserError, match=r"verify\.verifier\.(base_url|model): not set"):
            check_independent(VerifierConfig(**missing), generator)
