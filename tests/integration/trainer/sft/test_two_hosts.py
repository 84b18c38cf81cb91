"""Finetune on two hosts: network namespaces with addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.hosts import missing_permission
from tests.kits.trainer.sft import dialogues, save_chat_model, sft_config, write_rows
from tests.kits.trainer.two_hosts import TwoHosts, check_same, run_on_one_host, stats, two_hosts

REASON = missing_permission()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
UPDATES = 4


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "data").mkdir()
    rows = write_rows(folder / "data/rows.jsonl", dialogues(12))
    cfg = sft_config(
        save_chat_model(folder / "model"),
        rows,
        folder / "run",
        data={"eval": str(rows)},
        sft={"per_device_train_batch_size": 2, "max_steps": UPDATES},
        misc={"save_every_n_updates": 1, "patience_s": 60},
    )
    with two_hosts(folder) as trio:
        trio.values = cfg.model_dump(mode="json")
        yield trio


@pytest.fixture(scope="module")
def on_one(trio: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose two processes are on one host."""
    return run_on_one_host(trio, tmp_path_factory.mktemp("one") / "run", UPDATES)


def test_two_hosts_learn_as_one_with_a_folder_or_none(
    trio: TwoHosts, on_one: Path, tmp_path: Path
) -> None:
    """Check a folder that both see, and one that the second does not see."""
    for name, hidden in (("shared", ()), ("own", [tmp_path])):
        codes, texts = trio.finish(trio.config(tmp_path / name), hidden=hidden)
        assert codes == [0, 0], texts
        check_same(on_one, tmp_path / name, UPDATES)


def test_what_a_host_does_not_see_is_one_line(trio: TwoHosts, on_one: Path, tmp_path: Path) -> None:
    """Check the rows, and the checkpoints of a run that is resumed."""
    resumed = trio.config(on_one)
    for config, flags, hidden, line in (
        (trio.config(tmp_path / "data"), (), trio.folder / "data", "process 1 of 2: "),
        (resumed, ("--resume",), on_one.parent, "misc.run_dir: process 1 has no checkpoint in "),
    ):
        codes, texts = trio.finish(config, *flags, hidden=[hidden])
        assert codes == [2, 0], texts
        assert texts[0].count("error: ") == 1 and f"error: {line}" in texts[0], texts
        assert "Traceback" not in "".join(texts) and "error: " not in texts[1]


def test_a_host_that_dies_is_named_and_the_run_resumes(trio: TwoHosts, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = trio.config(run_dir, sft={"max_steps": 60})
    text = trio.lose_one(config)
    assert "process 0 of 2 " in text and "process 1 is at 'update" in text, text
    codes, texts = trio.finish(config, "--resume")
    assert codes == [0, 0], texts
    assert [line["update"] for line in stats(run_dir)] == list(range(1, 61))
