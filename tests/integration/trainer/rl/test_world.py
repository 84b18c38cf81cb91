"""Compare several processes on this CPU (gloo), started as users start them, with one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from scorekit.schemas import TranslationSample
from scorekit.server.fake import FakeBackend, fake_score
from testing.servers import running_service, wait_until
from tests.kits import forked
from tests.kits.float64 import CLOSE
from tests.kits.forked import Command
from tests.kits.trainer.one_update import CASES, LENGTHS, config
from tests.kits.trainer.rewards import OtherMetric
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, write_examples
from trainer.rl.config import PolicyConfig
from trainer.rl.forward import micro_batches
from trainer.rl.policy import load_policy

ROOT = Path(__file__).parents[4]


def torchrun(
    *arguments: str, processes: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Start `torchrun --nproc_per_node 2 -m ...`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc_per_node", str(processes), "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def ranks(*arguments: str, processes: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Fork what torchrun would start, without loading torch in each process, if the start is not
    tested."""
    return forked.completed(*arguments, environment=os.environ | environment, ranks=processes)


STARTS = (ranks, pytest.param(torchrun, marks=pytest.mark.slow))


def updates(folder: Path, processes: int, *cases: str) -> dict[str, Any]:
    module = "tests.kits.trainer.one_update"
    result = ranks(module, str(folder / "found.pt"), *cases, processes=processes)
    assert result.returncode == 0, result.stderr
    written = torch.load(folder / "found.pt")
    assert written["processes"] == processes
    return dict(written["found"])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return updates(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def several_processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return updates(tmp_path_factory.mktemp("several"), request.param)


#: In two of three processes with nothing to do, and in processes of which each has another number
#: of rollouts.
OF_THREE = ("token", "one", "one sharded", "images sharded")


@pytest.fixture(scope="module")
def three_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return updates(tmp_path_factory.mktemp("three"), 3, *OF_THREE)


@pytest.mark.parametrize("case", CASES)
def test_several_processes_update_as_one(
    one_process: dict[str, Any], several_processes: dict[str, Any], case: str
) -> None:
    """Compare gradients, updated weights, logged stats, log-probabilities and greedy samples.

    This covers FSDP2's sharding, one process with a micro-batch more than the other, and a case
    where all processes but one have nothing to do."""
    budget = config("token").micro_batch_tokens
    assert len(list(micro_batches([p + t for p, t in LENGTHS], budget))) == 3
    check_update(one_process[case], several_processes[case], case)


@pytest.mark.parametrize("case", OF_THREE)
def test_three_processes_update_as_one(
    one_process: dict[str, Any], three_processes: dict[str, Any], case: str
) -> None:
    check_update(one_process[case], three_processes[case], case)


def check_update(single: dict[str, Any], shared: dict[str, Any], case: str) -> None:
    rounded = case.startswith("bfloat16")  # its sums are in float32; all other cases are in float64
    # Sums of some tens of numbers below 4 in float32, in another order: 100 times 2**-22. After a
    # A step may round a weight that differs by that little to another bfloat16: 2**-9 of it.
    tolerances = {"gradients": 2e-5, "weights": 2**-9} if rounded else {}
    for kind in ("gradients", "weights"):
        for name, expected in single[kind].items():
            torch.testing.assert_close(
                shared[kind][name], expected, atol=tolerances.get(kind, CLOSE), rtol=0
            )
        assert any(value.abs().max() > 0.01 for value in single[kind].values())  # far above CLOSE
    after = {"abs": tolerances.get("weights", CLOSE), "rel": 0}
    assert shared["figures"] == pytest.approx(single["figures"], **after)
    assert shared["figures"]["steps"] == (4 if len(shared["logprobs"]) > 2 else 2)
    assert shared["completions"] == single["completions"]
    for row, expected_row in zip(shared["logprobs"], single["logprobs"], strict=True):
        assert row == pytest.approx(expected_row, **after)


def test_the_cases_differ(several_processes: dict[str, Any]) -> None:
    plain = several_processes["token"]
    # The shorter one waits for the other.
    assert len({len(ids) for ids in plain["completions"]}) > 1
    for case in ("sequence", "one", "bfloat16"):
        other = several_processes[case]["gradients"]
        assert any(
            (gradient - other[name]).abs().max() > 1e-4
            for name, gradient in plain["gradients"].items()
        )


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the config of two updates on three prompts, which two processes cannot share evenly."""
    folder = tmp_path_factory.mktemp("run")
    train = write_examples(folder / "train.jsonl", [f"Open file {n}." for n in range(4)])
    held_out = write_examples(folder / "eval.jsonl", [f"Save {n}." for n in range(3)], ref="저장")
    values = {
        "data": {"train": str(train), "eval": str(held_out)},
        "policy": {"path": str(save_policy(folder / "policy", byte_level_tokenizer()))},
        "generation": {
            "prompt_template": "source",
            "max_new_tokens": 8,
            "num_samples_per_prompt": 4,
        },
        "rl": {"num_updates": 2, "batch_size": 3, "lr": 1e-3, "micro_batch_tokens": 64},
        "misc": {"threads": 1, "device": "cpu", "run_dir": str(folder / "out")},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_run_of_two_processes_writes_as_one(config_file: Path) -> None:
    """Check a full run with a held-out metric; a second run in the same folder is refused."""
    with (
        running_service(FakeBackend("metricx")) as m,
        running_service(FakeBackend("xcomet")) as x,
        running_service(OtherMetric()) as other,
    ):
        urls = {"METRICX_URL": m, "XCOMET_URL": x}
        metric = ("--set", f"eval.metrics.other={other}")
        result = torchrun("trainer", "train", "--config", str(config_file), *metric, **urls)
        assert result.returncode == 0, result.stderr
        refused = ranks("trainer", "train", "--config", str(config_file), processes=2, **urls)
    out = config_file.parent / "out"
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]
    for line in lines:
        assert line["samples"] == 12
        assert line["steps"] == 2
        assert line["A_norm_mean"] == pytest.approx(0, abs=1e-6)
        assert line["A_norm_std"] == pytest.approx(1, abs=1e-3)
    evaluations = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    assert [line["update"] for line in evaluations] == [0, 2]
    for line in evaluations:
        dump = [json.loads(row) for row in (out / line["completions"]).read_text().splitlines()]
        assert [row["src"] for row in dump] == [f"Save {n}." for n in range(3)]
        texts = [TranslationSample(src=row["src"], mt=row["mt"], ref="저장") for row in dump]
        scores = [fake_score(text, 1.0) for text in texts]
        assert [row["metrics"]["other"]["score"] for row in dump] == scores
        assert line["metric_other_mean"] == pytest.approx(sum(scores) / 3)
        assert line["metric_other_coverage"] == 1.0
    samples = (out / "completions/train-000001.jsonl").read_text().splitlines()
    sources = [json.loads(row)["src"] for row in samples]
    assert len(set(sources)) == 3 and all(sources.count(src) == 4 for src in sources)
    assert result.stdout.count("report: ") == result.stdout.count("policy: ") == 1
    assert result.stderr.count("held out, after update 0") == 1
    assert "Traceback" not in result.stderr
    load_policy(PolicyConfig(path=str(out / "checkpoints/step-000002")), torch.device("cpu"))

    assert refused.returncode != 0
    assert refused.stderr.count("has a run or other files") == 1
    assert refused.stderr.startswith("error: misc.run_dir")


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", ["whole", "sharded"])
def test_any_number_of_prompts_can_be_shared(
    config_file: Path, tmp_path: Path, weights: str, processes: int
) -> None:
    """Use as many prompts as processes in float32, and no multiple of them in bfloat16.

    bfloat16 adds forward passes of the policy before the update."""
    batches = ((processes, "float32", 1), (processes + 1, "bfloat16", 2))
    runs = [
        f"rl.batch_size={prompts},misc.dtype={dtype},misc.run_dir={tmp_path}/out,"
        f"eval.eval_limit=1,generation.batch_size=3,rl.num_updates={num_updates}"
        for prompts, dtype, num_updates in batches
    ]
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        result = ranks(
            "tests.kits.trainer.ranks.sharded_trainer",
            str(config_file),
            weights,
            *runs,
            processes=processes,
            METRICX_URL=m,
            XCOMET_URL=x,
        )
    assert result.returncode == 0, result.stderr
    for number, (prompts, _, num_updates) in enumerate(batches):
        lines = (tmp_path / f"out-{number}/log.jsonl").read_text().splitlines()
        updates = [(row["samples"], row["steps"]) for row in map(json.loads, lines)]
        assert updates == [(4 * prompts, 2)] * num_updates
        dump = (tmp_path / f"out-{number}/completions/eval-{num_updates:06d}.jsonl").read_text()
        assert dump.count("\n") == 1
        saved = tmp_path / f"out-{number}/checkpoints/step-{num_updates:06d}"
        load_policy(PolicyConfig(path=str(saved)), torch.device("cpu"))
    weight_counts = re.findall(r"reference: (\d+) of (\d+) weights here", result.stdout)
    assert len(weight_counts) == (2 * processes if weights == "sharded" else 0)
    for part, total in weight_counts:  # a matrix's rows are split, so one may have a row more
        assert int(part) < int(total) / processes * 1.2


def test_adapters_learn_alike_whether_the_weights_are_shared(
    config_file: Path, tmp_path: Path
) -> None:
    """Check that generation and the update's forward passes use the policy inside peft's
    wrapper."""
    steps = []
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        for weights in ("whole", "sharded"):
            result = ranks(
                "tests.kits.trainer.ranks.sharded_trainer",
                str(config_file),
                weights,
                f"policy.lora.r=2,rl.num_updates=1,misc.run_dir={tmp_path}/{weights}",
                processes=2,
                METRICX_URL=m,
                XCOMET_URL=x,
            )
            assert result.returncode == 0, result.stderr
            out = tmp_path / f"{weights}-0"
            saved = load_file(out / "checkpoints/step-000001/adapter_model.safetensors")
            assert any(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)
            line = json.loads((out / "log.jsonl").read_text().splitlines()[0])
            steps.append((sorted(saved), line))
    (names, alone), (shared_names, shared) = steps
    assert shared_names == names
    for key in ("reward_mean", "policy_loss", "kl_ref", "grad_norm", "completion_length_mean"):
        # Sums in float32 in another order, as above; the norm covers all gradients.
        assert shared[key] == pytest.approx(alone[key], rel=1e-3, abs=2e-5), key


@pytest.mark.slow
def test_4_bits_learn_and_resume_in_two_processes(config_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    out = tmp_path / "out"
    settings = ["policy.lora.r=2", "policy.load_in_4bit=true", f"misc.run_dir={out}"]
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        for updates, more in ((1, ()), (2, ("--resume",))):
            words = [*settings, f"rl.num_updates={updates}"]
            result = ranks(
                *("trainer", "train", "--config", str(config_file), *more),
                *(word for setting in words for word in ("--set", setting)),
                processes=2,
                METRICX_URL=m,
                XCOMET_URL=x,
            )
            assert result.returncode == 0, result.stderr
    first, second = (
        load_file(out / f"checkpoints/step-{update:06d}/adapter_model.safetensors")
        for update in (1, 2)
    )
    names = [name for name in first if "lora_B" in name]
    assert names and all(bool(first[name].any()) for name in names)
    assert any(not torch.equal(first[name], second[name]) for name in names)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in lines)


def endless(config_file: Path, out: Path, setting: str, **environment: str) -> Command:
    """Yield a run of two processes that has made an update and continues."""
    process = Command(
        "trainer",
        "train",
        "--config",
        str(config_file),
        *(part for value in (f"misc.run_dir={out}", setting) for part in ("--set", value)),
        "--set",
        "rl.num_updates=100000",
        environment=os.environ | environment,
        ranks=2,
    )
    wait_until(lambda: process.poll() is not None or (out / "log.jsonl").exists(), 240)
    return process


def test_a_process_that_does_not_come_is_named(config_file: Path, tmp_path: Path) -> None:
    """Stop one process, like a hanging machine: the other names it and its phase."""
    out = tmp_path / "out"
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        process = endless(config_file, out, "misc.patience_s=15", METRICX_URL=m, XCOMET_URL=x)
        process.send_signal(signal.SIGSTOP, rank=1)
        process.processes[0].wait(240)
        process.send_signal(signal.SIGCONT, rank=1)  # so that it can be ended
        _, errors = process.communicate()
    assert process.returncode != 0
    assert re.search(
        r"error: process 0 of 2 has waited for \d+ s at '[^']+' "
        r"\(process 1 is at '[^']+'; misc.patience_s is 15\)",
        errors,
    )


@pytest.mark.parametrize("start", STARTS)
def test_a_process_that_stops_within_an_exchange_is_named(start: Any) -> None:
    """Check a stop during a torch exchange: torch itself waits and reports no process."""
    result = start("tests.kits.trainer.ranks.late_process", processes=2)
    assert result.returncode != 0
    assert re.search(
        r"Stalled: process 0 of 2 has waited for 4 s at 'update 7, learning' "
        r"\(process 1 is at 'update 8, learning'; misc.patience_s is 2\)",
        result.stderr,
    )


@pytest.mark.parametrize("start", STARTS)
def test_the_end_of_a_process_within_an_exchange_is_told(start: Any) -> None:
    result = start("tests.kits.trainer.ranks.late_process", "--end", processes=2)
    assert result.returncode != 0
    message = "Stalled: process 0 of 2 was at 'update 7, learning' when another one ended"
    assert message in result.stderr


def test_all_processes_leave_after_the_same_update(config_file: Path, tmp_path: Path) -> None:
    """Check that a signal to a process other than the main one ends all, and that the run
    resumes."""
    out = tmp_path / "out"
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        process = endless(
            config_file, out, "misc.save_every_n_updates=0", METRICX_URL=m, XCOMET_URL=x
        )
        process.send_signal(signal.SIGTERM, rank=1)
        _, errors = process.communicate()
        log = out / "log.jsonl"
        done = log.read_text().count("\n")
        assert process.returncode != 0
        log_text = (out / "messages.log").read_text()
        assert f"the run ends: SIGTERM after update {done}: resume with --resume" in log_text, (
            errors
        )
        assert errors.count("the run ends: SIGTERM") == 1  # only the main process reports it
        assert [path.name for path in out.glob("checkpoints/*")] == [f"step-{done:06d}"]
        overrides = [f"misc.run_dir={out}", f"rl.num_updates={done + 1}"]
        resumed = ranks(
            "trainer",
            "train",
            "--config",
            str(config_file),
            "--resume",
            *(word for override in overrides for word in ("--set", override)),
            processes=2,
            METRICX_URL=m,
            XCOMET_URL=x,
        )
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.count(f"is resumed after update {done}") == 1
    assert log.read_text().count("\n") == done + 1


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_configs_of_accelerate_are_read(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    accelerate_config = load_config_from_file(str(ROOT / f"configs/accelerate/{name}.yaml"))
    assert accelerate_config.num_processes == 2
    assert accelerate_config.distributed_type == {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}[name]


@pytest.mark.parametrize("processes", [2, 3])
def test_threads_exchange_through_forks_while_the_main_thread_does(tmp_path, processes):
    module = "tests.kits.trainer.ranks.threads_of_ranks"
    result = ranks(module, str(tmp_path), processes=processes)
    assert result.returncode == 0, result.stderr
    for rank in range(processes):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["sums"] == [float(processes * value) for value in range(40)]
        assert seen["right"] == [40, 40, 40]
        assert seen["joined"] == [1] * processes  # the main thread still may
        assert seen["closed"] == "ProcessStalled"


def test_threads_of_the_others_end_when_a_process_fails(tmp_path):
    module = "tests.kits.trainer.ranks.threads_of_ranks"
    result = ranks(module, str(tmp_path), "--error", processes=2)
    assert result.returncode != 0
    # Whichever process ends first: the launcher then ends the other, perhaps before it has printed.
    assert "in the middle" in result.stderr or "ended with an error" in result.stderr
    assert not list(tmp_path.iterdir())
