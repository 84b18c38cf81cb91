"""Check what is told about a package that is missing, by the kind of installation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scorekit import extras
from scorekit.extras import install_command, missing_package


class Installed:
    """An installed distribution with a direct_url.json."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return json.dumps(self.origin) if self.origin else None


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "https://host/scorekit-0.2.0-py3-none-any.whl", "archive_info": {}},
            'pip install "scorekit[search] @ https://host/scorekit-0.2.0-py3-none-any.whl"',
        ),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            'pip install "scorekit[search] @ git+https://host/a.git@abc"',
        ),
        (None, "install the extra 'search' of scorekit from where scorekit was installed"),
    ],
    ids=["wheel", "git", "index"],
)
def test_an_installed_package_gets_its_extra_from_where_it_came(
    origin: dict[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "scorekit/extras.py"))
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(origin))
    assert install_command("search") == command


def raised_in(*modules: str) -> ModuleNotFoundError:
    """Return the error of an import in the last of these modules, each called by the one before."""

    def fail() -> None:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    call: Callable[[], None] = fail
    for module in reversed(modules):
        scope = {"__name__": module, "call": call}
        exec("def enter():\n    call()", scope)
        call = scope["enter"]  # type: ignore[assignment]
    try:
        call()
    except ModuleNotFoundError as error:
        # The frame of `fail` above is that of a test, and would be the one that imports.
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            if trace.tb_next.tb_frame.f_code is fail.__code__:
                trace.tb_next = None
            trace = trace.tb_next
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("modules", "extra"),
    [
        (("scorekit.command", "trainer.__main__", "trainer.search.cli"), "search"),
        (("trainer.__main__", "trainer.translation.train"), "trainer"),
        (("trainer.__main__", "trainer.roleplay.cli", "scorekit.text.rules"), "roleplay"),
        (("services.judge.__main__", "scorekit.server.app"), "judge"),
        (("synth.run", "scorekit.text.rules"), "synth"),
        (("scorekit.metaeval.command", "scorekit.report.page"), "meta-eval"),
        (("trainer.__main__", "a_rule_of_the_user"), None),
        (("trainer.__main__", "transformers.models"), None),
    ],
)
def test_the_extra_is_that_of_the_code_that_wants_the_package(
    modules: tuple[str, ...], extra: str | None
) -> None:
    command = "pip install numpy" if extra is None else install_command(extra)
    assert missing_package(raised_in(*modules)) == f"numpy is not installed: {command}"
