"""Train on two hosts, with the embedder on a third: network namespaces with addresses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.servers import wait_until
from tests.kits.hosts import Host, hosts, missing_permission
from tests.kits.trainer.two_hosts import stats, torchrun
from trainer.runs.checkpoints.checkpoint import newest_checkpoint, read_state
from trainer.runs.run_log import read_jsonl

pytestmark = pytest.mark.slow
REASON = missing_permission()


class Hosts:
    """Two hosts that learn, and one with the embedder."""

    def __init__(self, machines: list[Host], run_files: Any, folder: Path) -> None:
        *self.learners, services = machines
        self.run_files, self.folder = run_files, folder
        self.embedder = f"http://{services.address}:8003"
        server = (sys.executable, "-m", "tests.kits.trainer.ranks.ngram_host")
        output = folder / "embedder.txt"
        services.start(*server, services.address, "8003", output=output)
        wait_until(lambda: "ready" in output.read_text(), 120)

    def config(self, name: str, **changes: Any) -> Any:
        """Return the config of a run in a folder of this name."""
        return self.run_files.config(
            self.folder / name,
            reward__embedding_model=self.embedder,
            grpo__per_device_train_batch_size=2,
            **{"grpo__max_steps": 3, "misc__patience_s": 45} | changes,
        )

    def finish(self, configs: list[Any], *more: str) -> tuple[list[int], str]:
        """Return the exit codes of a run, and what the first host printed."""
        processes = torchrun(self.learners, configs, self.folder, *more)
        codes = [process.wait(600) for process in processes]
        return codes, (self.folder / "0.txt").read_text()


@pytest.fixture
def three(run_files: Any, tmp_path: Path) -> Iterator[Hosts]:
    with hosts(3) as machines:
        yield Hosts(machines, run_files, tmp_path)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_two_hosts_share_a_run_with_a_folder_or_none(three: Hosts, tmp_path: Path) -> None:
    """Check that the first host writes all, and that a missing folder is one line."""
    codes, text = three.finish([three.config(f"host{n}/run") for n in range(2)])
    assert codes == [0, 0], text
    assert not (tmp_path / "host1").exists()
    expected_lines = stats(tmp_path / "host0/run")
    assert [line["update"] for line in expected_lines] == [1, 2, 3]
    codes, text = three.finish([three.config("shared")] * 2)
    assert codes == [0, 0], text
    assert stats(tmp_path / "shared") == expected_lines

    missing = three.config("none", data__train="/no/such/folder.jsonl")
    codes, text = three.finish([three.config("none"), missing])
    assert codes[0] != 0
    assert text.count("error: process 1 of 2: /no/such/folder.jsonl") == 1

    configs = [three.config(f"host{n}/run", grpo__max_steps=4) for n in range(2)]
    codes, text = three.finish(configs, "--resume")
    assert codes[0] != 0
    assert text.count("error: misc.run_dir: process 1 has no checkpoint") == 1


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_host_that_dies_is_named_and_the_run_resumes(three: Hosts, tmp_path: Path) -> None:
    changes = {"grpo__max_steps": 10_000, "misc__keep_checkpoints": 1}
    processes = torchrun(three.learners, [three.config("run", **changes)] * 2, tmp_path)
    log = tmp_path / "run/log.jsonl"
    wait_until(lambda: len(read_jsonl(log)) > 1, 240)
    three.learners[1].die()
    assert processes[0].wait(200) != 0  # patience_s is 45 s, within an exchange twice that
    text = (tmp_path / "0.txt").read_text()
    assert "process 0 of 2 " in text and "process 1 is at 'update" in text, text
    done = read_state(newest_checkpoint(tmp_path / "run/checkpoints")).update
    three.learners[1].revive()
    changes["grpo__max_steps"] = done + 2
    codes, text = three.finish([three.config("run", **changes)] * 2, "--resume")
    assert codes == [0, 0], text
    assert [line["update"] for line in stats(tmp_path / "run")] == list(range(1, done + 3))


SLOW = REASON or missing_permission(slow=True)


@pytest.mark.skipif(SLOW is not None, reason=str(SLOW))
def test_a_slow_link_changes_no_number(three: Hosts, tmp_path: Path) -> None:
    codes, text = three.finish([three.config("plain")] * 2)
    assert codes == [0, 0], text
    for host in three.learners:
        host.slow_down()
    codes, text = three.finish([three.config("slow")] * 2)
    assert codes == [0, 0], text
    assert stats(tmp_path / "slow") == stats(tmp_path / "plain")
