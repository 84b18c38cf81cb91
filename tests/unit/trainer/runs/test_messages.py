"""Check which warnings a command prints, and that their file does not decide about the run."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from trainer.runs.messages import messages, show_messages

log = logging.getLogger("trainer.test")


def test_warnings_are_in_the_folder_with_those_from_before_it_existed(tmp_path: Path) -> None:
    with messages() as handler:
        log.warning("before")
        handler.write_to(tmp_path)
        log.info("not a warning")
        log.warning("after")
    lines = (tmp_path / "messages.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["WARNING before", "WARNING after"]


def test_a_full_disk_loses_warnings_and_says_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "messages.log"
    path.symlink_to("/dev/full")
    with messages() as handler:
        handler.write_to(tmp_path)
        for number in range(3):
            log.warning("warning %d", number)
    report = f"{path}: lines that were not written: 3 (No space left on device)"
    assert report in [record.getMessage() for record in caplog.records]
    assert "Logging error" not in capsys.readouterr().err


def test_a_folder_that_takes_no_file_loses_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "messages.log").mkdir()
    with messages() as handler:
        handler.write_to(tmp_path)
        log.warning("a warning")
    assert "lines that were not written: 1 (Is a directory)" in caplog.text


@pytest.mark.parametrize(
    ("message", "is_shown"),
    [
        ("`is_gradient_checkpointing` is deprecated and will be removed in v6.", False),
        ("`gradient_checkpointing_enable` is deprecated and will be removed in v6.", False),
        ("`gradient_checkpointing_disable` is deprecated and will be removed in v6.", False),
        ("`gradient_checkpointing_kwargs` is deprecated and will be removed in v6.", True),
        ("`torchscript` is deprecated", True),
    ],
)
def test_only_warnings_of_methods_that_libraries_call_are_left_out(message, is_shown, recwarn):
    show_messages()
    warnings.warn(message, FutureWarning, stacklevel=1)
    assert [str(w.message) for w in recwarn] == [message] * is_shown
