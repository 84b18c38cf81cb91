"""Test steps as processes: completion, stop, resume and budget."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scorekit.errors import UserError
from scorekit.paid.store import open_store
from tests.kits import forked
from tests.kits.service_process import wait_until
from trainer.search.answer.config import SEARCH
from trainer.search.config import SearchConfig
from trainer.search.records import ApiUsage
from trainer.search.rounds.config import RoundLimits
from trainer.search.rounds.steps import StepFailed, Steps, lock_loop, read_steps
from trainer.sft.config import SftConfig

#: Replaces Python: notes that it was started, and runs the code in a file beside it.
STAND_IN = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).parent
with (folder / "begun").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
(folder / pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).stem).mkdir(exist_ok=True)
exec((folder.parent / "does.py").read_text())
"""

#: A call uses 8 tokens.
PAYS = """
import sqlite3
def pay(calls):
    db = sqlite3.connect(folder / "paid.sqlite")
    db.execute(
        "CREATE TABLE IF NOT EXISTS charges (run, server, calls, prompt_tokens, completion_tokens)"
    )
    told = ("r", "judge", calls, 7 * calls, calls)
    db.execute(
        "INSERT INTO charges (run, server, calls, prompt_tokens, completion_tokens) "
        "VALUES (?, ?, ?, ?, ?)", told
    )
    db.commit()
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python = [sys.executable, str(tmp_path / "stand_in.py")]
    monkeypatch.setattr("trainer.search.rounds.steps._PYTHON", python)
    return python


def write_step_code(tmp_path: Path, code: str) -> None:
    (tmp_path / "does.py").write_text(code)


def cfg(**sections: object) -> SearchConfig:
    return SearchConfig.model_validate({"task": "search", "policy": {"path": "p"}, **sections})


def sft() -> SftConfig:
    return SftConfig.model_validate({"policy": {"path": "p"}})


def started_runs(folder: Path) -> list[str]:
    return (folder / "begun").read_text().splitlines()


def steps(folder: Path, lock: int, launch: list[str], limits: RoundLimits | None = None) -> Steps:
    return Steps(folder, limits or RoundLimits(), [folder / "paid.sqlite"], lock, launch)


def test_a_step_is_done_once(tmp_path: Path, launch: list[str]) -> None:
    write_step_code(tmp_path, "")
    folder = tmp_path / "01-a"
    with lock_loop(tmp_path) as lock:
        for _ in range(2):
            assert steps(folder, lock, launch).train(cfg()) == folder / "train"
    (only,) = started_runs(folder)
    assert only == f"-m trainer train --config {folder}/train.yaml"
    record = read_steps(folder)["train"]
    assert (record.done, record.starts) == (True, 1)
    assert record.seconds > 0


def test_a_done_step_of_an_earlier_version_lacks_keys(tmp_path: Path, launch: list[str]) -> None:
    write_step_code(tmp_path, "")
    folder = tmp_path / "01-a"
    sft_cfg = SftConfig.model_validate(
        {"policy": {"path": "p"}, "sft": {"options": {"adam_beta2": 0.9}}}
    )
    with lock_loop(tmp_path) as lock:
        steps(folder, lock, launch).train(cfg())
        steps(folder, lock, launch).finetune(sft_cfg)
        records = json.loads((folder / "steps.json").read_text())
        del records["train"]["settings"]["rollout.n_agent"]
        (folder / "steps.json").write_text(json.dumps(records))
        steps(folder, lock, launch).train(cfg())
        steps(folder, lock, launch).finetune(sft_cfg)
        other = cfg(rollout={"n_agent": 7})
        with pytest.raises(UserError, match=r"\(rollout\.n_agent: 1 then, 7 now\)"):
            steps(folder, lock, launch).train(other)
    assert len(started_runs(folder)) == 2


def test_a_training_that_has_begun_goes_on(tmp_path: Path, launch: list[str]) -> None:
    folder = tmp_path / "01-a"
    write_step_code(tmp_path, "sys.exit('--resume' not in sys.argv)")
    with lock_loop(tmp_path) as lock:
        with pytest.raises(StepFailed):
            steps(folder, lock, launch).train(cfg())
        steps(folder, lock, launch).train(cfg())
    assert read_steps(folder)["train"].starts == 2


def test_a_step_that_fails_is_begun_again_and_what_it_took_is_kept(
    tmp_path: Path, launch: list[str]
) -> None:
    folder = tmp_path / "01-a"
    write_step_code(tmp_path, "raise SystemExit(3)")
    with lock_loop(tmp_path) as lock:
        with pytest.raises(StepFailed, match="train ended with exit code 3") as error:
            steps(folder, lock, launch).train(cfg())
        assert error.value.exit_code == 3
        before = read_steps(folder)["train"]
        assert not before.done
        write_step_code(tmp_path, "")
        steps(folder, lock, launch).train(cfg())
    after = read_steps(folder)["train"]
    assert (after.done, after.starts) == (True, 2)
    assert after.seconds > before.seconds > 0


def test_what_is_done_is_not_what_was_asked_for_otherwise(
    tmp_path: Path, launch: list[str]
) -> None:
    write_step_code(tmp_path, "")
    folder = tmp_path / "01-a"
    with lock_loop(tmp_path) as lock:
        steps(folder, lock, launch).train(cfg())
        other = cfg(policy={"path": "q"}, rollout={"n_agent": 3})
        message = r"\(policy.path: 'p' then, 'q' now; rollout.n_agent: .* 3 now\)"
        with pytest.raises(UserError, match="other settings " + message):
            steps(folder, lock, launch).train(other)
    assert len(started_runs(folder)) == 1


def test_calls_and_tokens_of_a_step_are_counted_and_end_a_round(
    tmp_path: Path, launch: list[str]
) -> None:
    write_step_code(tmp_path, "")
    folder = tmp_path / "01-a"
    folder.mkdir()
    store = open_store(folder / "paid.sqlite", SEARCH, "earlier")
    charge = ApiUsage(calls=2, prompt_tokens=10, completion_tokens=5)
    asyncio.run(store.finish(b"0" * 16, "generator", charge))
    asyncio.run(store.close())
    write_step_code(tmp_path, PAYS + "pay(3)")
    limits = RoundLimits(tokens=24)
    with lock_loop(tmp_path) as lock:
        steps(folder, lock, launch, limits).train(cfg())
        record = read_steps(folder)["train"]
        assert (record.calls, record.tokens) == (3, 24)
        with pytest.raises(UserError, match=r"sft: the round has used up its limits\.tokens of 24"):
            steps(folder, lock, launch, limits).finetune(sft())
        steps(folder, lock, launch, RoundLimits(tokens=25)).finetune(sft())
    assert len(started_runs(folder)) == 2


def test_what_a_step_asks_for_while_it_leaves_is_counted(
    tmp_path: Path, launch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.search.rounds.steps._BEAT_S", 0.05)
    handle_sigterm = "import signal; signal.signal(15, lambda *_: (pay(100), sys.exit(143)))\n"
    write_step_code(tmp_path, PAYS + handle_sigterm + "pay(3); time.sleep(600)")
    folder = tmp_path / "01-a"
    with lock_loop(tmp_path) as lock:
        with pytest.raises(UserError, match=r"limits\.calls"):
            steps(folder, lock, launch, RoundLimits(calls=2)).train(cfg())
        assert read_steps(folder)["train"].calls == 103
        exec(PAYS + "pay(50)", {"folder": folder})  # another program, in between
        write_step_code(tmp_path, PAYS + "pay(4)")
        steps(folder, lock, launch).train(cfg())
    assert read_steps(folder)["train"].calls == 107


def test_a_training_that_its_own_rule_has_ended_is_done(
    tmp_path: Path, launch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"update": 1, "skipped": True, "kl_ref_k3": None, "reward_mean": 0.0}
    code = f"(folder / 'train/log.jsonl').write_text({json.dumps(line)!r}); sys.exit(1)"
    write_step_code(tmp_path, code)
    finished_cfg = cfg(stop={"skipped_updates": 1})
    folder = tmp_path / "01-a"
    with lock_loop(tmp_path) as lock:
        with pytest.raises(StepFailed):  # it has written no policy
            steps(folder, lock, launch).train(finished_cfg)
        monkeypatch.setattr("trainer.search.rounds.steps.newest_checkpoint", lambda folder: folder)
        steps(folder, lock, launch).train(finished_cfg)
        record = read_steps(folder)["train"]
        assert record.done and "stop.skipped_updates is 1" in record.stopped
        assert "1 updates in a row made no step" in record.stopped
        write_step_code(tmp_path, "sys.exit(1)")
        with pytest.raises(StepFailed):  # it was not stopped by a rule
            steps(tmp_path / "02-b", lock, launch).train(finished_cfg)


def test_sft_is_one_process_on_one_gpu_whatever_starts_trainings(
    tmp_path: Path, launch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    write_step_code(
        tmp_path, "import os; (folder / 'saw').write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    folder = tmp_path / "01-a"
    with lock_loop(tmp_path) as lock:
        steps(folder, lock, ["no-such-launcher"]).finetune(sft())
        assert (folder / "saw").read_text() == "2"
        steps(folder, lock, launch).train(cfg())
    assert (folder / "saw").read_text() == "2,3"


def test_torchrun_gives_a_training_time_to_save(
    tmp_path: Path, launch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    write_step_code(tmp_path, f"import os; (folder / 'saw').write_text(os.environ[{key!r}])")
    with lock_loop(tmp_path) as lock:
        for value, expected_value in ((None, "600"), ("45", "45")):
            monkeypatch.delenv(key, raising=False)
            if value:
                monkeypatch.setenv(key, value)
            folder = tmp_path / f"01-{expected_value}"
            steps(folder, lock, launch).train(cfg())
            assert (folder / "saw").read_text() == expected_value


def test_a_done_step_whose_folder_is_gone_is_one_line(tmp_path: Path, launch: list[str]) -> None:
    write_step_code(tmp_path, "")
    folder = tmp_path / "01-a"
    with lock_loop(tmp_path) as lock:
        (steps(folder, lock, launch).train(cfg()) / ".").rmdir()
        with pytest.raises(UserError, match="was done, but its folder is missing"):
            steps(folder, lock, launch).train(cfg())


def test_a_launcher_that_ends_first_leaves_its_training_time_to_save(
    tmp_path: Path, launch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.search.rounds.steps._BEAT_S", 0.05)
    saves = (
        "import signal, time, pathlib, sys; f = pathlib.Path(sys.argv[1]);"
        "signal.signal(15, lambda *_: (time.sleep(1), (f / 'saved').touch(), sys.exit(0)));"
        "(f / 'up').touch(); time.sleep(600)"
    )
    begins = f"import subprocess; subprocess.Popen([sys.executable, '-c', {saves!r}, str(folder)])"
    write_step_code(
        tmp_path, begins + "\nwhile not (folder / 'up').exists(): time.sleep(0.01)\ntime.sleep(600)"
    )
    folder = tmp_path / "01-a"
    with lock_loop(tmp_path) as lock, pytest.raises(UserError, match=r"limits\.hours"):
        steps(folder, lock, launch, RoundLimits(hours=5e-4)).train(cfg())
    assert (folder / "saved").exists()


def test_hours_end_a_step_that_is_at_work(
    tmp_path: Path, launch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.search.rounds.steps._BEAT_S", 0.05)
    write_step_code(tmp_path, "time.sleep(600)")
    folder = tmp_path / "01-a"
    with lock_loop(tmp_path) as lock, pytest.raises(UserError, match=r"limits\.hours"):
        steps(folder, lock, launch, RoundLimits(hours=1e-4)).train(cfg())
    record = read_steps(folder)["train"]
    assert not record.done
    assert record.seconds >= 0.36


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"train": 1}', '{"train": {"more": 1}}'):
        (tmp_path / "steps.json").write_text(text)
        with pytest.raises(UserError, match=r"steps\.json: cannot be read"):
            read_steps(tmp_path)


LOOP = """
import pathlib, sys
from trainer.search.rounds.config import RoundLimits
from trainer.search.rounds.steps import Steps, lock_loop
from trainer.runs.shutdown import ShutdownHandler
from trainer.search.config import SearchConfig
out = pathlib.Path(sys.argv[1])
cfg = SearchConfig.model_validate({"task": "search", "policy": {"path": "p"}})
with lock_loop(out) as lock, ShutdownHandler():
    launch = [sys.executable, str(out / "stand_in.py")]
    Steps(out / "01-a", RoundLimits(), [], lock, launch).train(cfg)
"""


def started(tmp_path: Path) -> forked.Popen:
    loop = forked.Popen([sys.executable, "-c", LOOP, str(tmp_path)], stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "01-a/pid").exists())
    return loop


AT_WORK = """
import os, signal
def leave(*_):
    (folder / "left").write_text("in order")
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
temporary = folder / "pid.new"
temporary.write_text(str(os.getpid()))
temporary.rename(folder / "pid")
time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_step_is_told_to_leave_with_its_loop(
    number: signal.Signals, tmp_path: Path, launch: list[str]
) -> None:
    write_step_code(tmp_path, AT_WORK)
    loop = started(tmp_path)
    pid = int((tmp_path / "01-a/pid").read_text())
    with pytest.raises(UserError, match="another loop uses it"), lock_loop(tmp_path):
        pass
    loop.send_signal(number)
    loop.wait(timeout=60)
    wait_until(lambda: has_ended(pid))
    assert (tmp_path / "01-a/left").read_text() == "in order"
    with lock_loop(tmp_path):
        record = json.loads((tmp_path / "01-a/steps.json").read_text())["train"]
    assert (record["done"], record["starts"]) == (False, 1)


def test_a_step_that_outlives_its_loop_keeps_the_folder(tmp_path: Path, launch: list[str]) -> None:
    stays = AT_WORK.replace("sys.exit(143)", "pass")
    write_step_code(tmp_path, stays + "time.sleep(600)\n")
    loop = started(tmp_path)
    pid = int((tmp_path / "01-a/pid").read_text())
    loop.kill()
    loop.wait()
    wait_until(lambda: (tmp_path / "01-a/left").exists())
    with pytest.raises(UserError, match="a step of a killed loop"), lock_loop(tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid))
    with lock_loop(tmp_path):
        pass
