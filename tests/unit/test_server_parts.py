"""Settings, devices: the small parts of the server half."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from scorekit.errors import UserError
from scorekit.server.device import looks_local, prepare_device
from scorekit.server.settings import (
    Secrets,
    ServiceSettings,
    load_api_keys,
    parse_settings,
    usable_cpus,
)
from services.metricx.settings import MetricXSettings
from services.xcomet.settings import XCometSettings


def test_flags_win_over_the_environment_and_that_over_defaults(monkeypatch):
    monkeypatch.setenv("METRICX_PORT", "7001")
    monkeypatch.setenv("METRICX_MAX_SAMPLES", "77")
    settings = parse_settings(MetricXSettings, ["--port", "7002"])
    assert (settings.port, settings.max_samples, settings.max_body_bytes) == (7002, 77, 2**24)


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


def test_a_wide_address_wants_a_key_or_an_explicit_no():
    with pytest.raises(UserError, match="can be reached by others"):
        load_api_keys(ServiceSettings(host="0.0.0.0"), Secrets())
    assert load_api_keys(ServiceSettings(host="0.0.0.0", no_auth=True), Secrets()) == ()
    assert load_api_keys(ServiceSettings(host="0.0.0.0"), Secrets(api_keys=SecretStr("k")))
    for loopback in ("127.0.0.1", "::1", "localhost"):
        assert load_api_keys(ServiceSettings(host=loopback), Secrets()) == ()


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(UserError, match="gone: No such file"):
        load_api_keys(ServiceSettings(api_keys_file=tmp_path / "gone"), Secrets())


def test_at_least_one_cpu_is_usable():
    assert usable_cpus() >= 1


def test_hub_ids_and_paths_are_told_apart(tmp_path):
    assert not looks_local("google/metricx-24-hybrid-large-v2p6")
    for path in (str(tmp_path), "./models/x", "/models/x", "models", "a/b/c"):
        assert looks_local(path)


@pytest.mark.parametrize("name", ["cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match=f"--device {name}"):
        prepare_device(name, 1)
