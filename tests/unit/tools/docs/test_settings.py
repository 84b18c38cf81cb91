"""The reference has every option of every service, and every variable."""

from __future__ import annotations

import re

import pytest
from pydantic_settings import CliApp

from tools.docs.errors import subclasses_of
from tools.docs.settings import ENVIRONMENT, SERVICES, environment_page, service_options


@pytest.mark.parametrize("service", SERVICES)
def test_a_page_has_the_options_that_help_has(
    service: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no option is broken into two lines
    with pytest.raises(SystemExit):
        CliApp.run(SERVICES[service], cli_args=["--help"])
    help = capsys.readouterr().out
    flags = set(re.findall(r"^ +(--[\w-]+)", help, re.MULTILINE))
    page = service_options(service)
    assert "--port" in flags
    assert {flag for flag in flags if f"### `{flag}` " not in page} == set()


def test_every_settings_class_is_on_a_page() -> None:
    page_names = {kind.__name__ for kind in (*SERVICES.values(), *ENVIRONMENT.values())}
    declared = {node.name for node in subclasses_of("BaseSettings")}
    # SCOREKIT_API_KEY, of the last one, is in score.md.
    bases = {"ServiceSettings", "ModelSettings", "FakeSettings", "_Environment"}
    assert declared - page_names - bases == set()


def test_variables_have_their_own_headings() -> None:
    assert "### `JUDGE_UPSTREAM_API_KEY` { #JUDGE_UPSTREAM_API_KEY .key }" in environment_page()
