"""Settings, devices: the small parts of the server half."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import SecretStr

from scorekit.errors import UserError
from scorekit.hub import looks_local
from scorekit.schemas import TranslationSample
from scorekit.server.checkpoint_backend import prepare_device
from scorekit.server.endpoint import text_error
from scorekit.server.pools import PendingRequest
from scorekit.server.settings import (
    Secrets,
    ServiceSettings,
    load_api_keys,
    parse_settings,
)
from services.metricx.settings import MetricXSettings
from services.xcomet.settings import XCometSettings


def test_flags_win_over_the_environment_and_that_over_defaults(monkeypatch):
    monkeypatch.setenv("METRICX_PORT", "7001")
    monkeypatch.setenv("METRICX_MAX_SAMPLES", "77")
    settings = parse_settings(MetricXSettings, ["--port", "7002"])
    assert (settings.port, settings.max_samples, settings.max_body_bytes) == (7002, 77, 2**24)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--max-smples", "3"],
            "unrecognized arguments: --max-smples 3 (did you mean --max-samples?)",
        ),
        (["--modle=x"], "unrecognized arguments: --modle=x (did you mean --model?)"),
        (["--no-pages"], "unrecognized arguments: --no-pages (did you mean --no-page?)"),
        (["--page"], "unrecognized arguments: --page (did you mean --no-page?)"),
        (["--no-page", "x"], "unrecognized arguments: x; see --help"),
        (["stray"], "unrecognized arguments: stray; see --help"),
        (["--port"], "argument --port: expected one argument; see --help"),
    ],
)
def test_a_flag_that_is_not_known_suggests_the_nearest(flags, message):
    with pytest.raises(UserError) as error:
        parse_settings(MetricXSettings, flags)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("settings_type", [MetricXSettings, XCometSettings])
def test_every_setting_has_a_sentence_of_documentation(settings_type):
    for name, field in settings_type.model_fields.items():
        assert field.description and field.description.endswith("."), name


def test_keys_come_from_the_environment_and_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SCOREKIT_API_KEYS", "k1-secret, k2-secret")
    path = tmp_path / "keys"
    path.write_text("three\n\nfour\n")
    keys = load_api_keys(ServiceSettings(api_keys_file=path), Secrets())
    assert keys == (b"k1-secret", b"k2-secret", b"three", b"four")
    assert "k1-secret" not in repr(Secrets())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "scorer.example", "localhost.x"])
def test_a_wide_address_wants_a_key_or_an_explicit_no(host):
    with pytest.raises(UserError, match="can be reached by others"):
        load_api_keys(ServiceSettings(host=host), Secrets())
    assert load_api_keys(ServiceSettings(host=host, no_auth=True), Secrets()) == ()
    assert load_api_keys(ServiceSettings(host=host), Secrets(api_keys=SecretStr("k"))) == (b"k",)


def test_an_address_of_this_machine_wants_no_key():
    for loopback in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert load_api_keys(ServiceSettings(host=loopback), Secrets()) == ()


@pytest.mark.parametrize("empty", ["", " ", ",", " , ,"])
def test_keys_that_are_configured_but_empty_open_nothing(empty, tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text(empty.replace(",", "\n"))
    with pytest.raises(UserError, match="keys: no key in it"):
        load_api_keys(ServiceSettings(api_keys_file=path, no_auth=True), Secrets())
    monkeypatch.setenv("SCOREKIT_API_KEYS", empty)
    with pytest.raises(UserError, match="SCOREKIT_API_KEYS: no key in it"):
        load_api_keys(ServiceSettings(), Secrets())


def test_a_key_file_may_come_from_any_editor(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfone\r\n two \r\n")
    assert load_api_keys(ServiceSettings(api_keys_file=path), Secrets()) == (b"one", b"two")
    path.write_bytes(b"\xff\xfeo\0n\0")
    with pytest.raises(UserError, match="keys: not UTF-8 text"):
        load_api_keys(ServiceSettings(api_keys_file=path), Secrets())


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ({}, None),
        ({"src": "", "mt": "", "ref": None}, None),
        ({"id": "\0" * 99}, None),
        ({"mt": "가" * 20}, None),
        ({"mt": "가" * 21}, "mt: 21 characters, at most 20"),
        ({"ref": "a" * 1_200_000}, "ref: 1,200,000 characters, at most 20"),
        ({"src": "a\0"}, "src: NUL character at position 1"),
        ({"ref": "가\ud800"}, "ref: lone surrogate at position 1"),
    ],
)
def test_a_text_that_no_model_should_read_is_named(texts, reason):
    error = text_error(TranslationSample(**{"src": "a", "mt": "b"} | texts), 20)
    assert (error and error.message) == reason
    assert error is None or error.type == "invalid_input"


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(UserError, match="gone: No such file"):
        load_api_keys(ServiceSettings(api_keys_file=tmp_path / "gone"), Secrets())


def test_hub_ids_and_paths_are_told_apart(tmp_path):
    assert not looks_local("google/metricx-24-hybrid-large-v2p6")
    for path in (str(tmp_path), "./models/x", "/models/x", "models", "a/b/c"):
        assert looks_local(path)


@pytest.mark.parametrize("name", ["cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match=f"--device {name}"):
        prepare_device(name, 1)


def test_a_request_whose_task_was_cancelled_did_not_time_out():
    async def cancel():
        job = PendingRequest(1, 0.0, 60.0)
        job.pending_count = 1
        job.done.cancel()
        return job.timed_out

    assert asyncio.run(cancel()) is False
