"""Check evaluations with the configured engine, of adapters, and in several processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from testing.servers import free_port, running_app, running_service
from tests.kits import forked
from tests.kits.trainer.rewards import OtherMetric
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, write_examples
from tests.kits.vllm_stub import KEY, VLLMStub
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.evaluation.files import EvaluationOutcome
from trainer.runs.run_log import read_jsonl
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_examples
from trainer.translation.evaluation.run import run_evaluation
from trainer.translation.train import train_translation

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the config of a policy with adapters and two services whose scores depend on the
    text."""
    folder = tmp_path_factory.mktemp("ways")
    save_policy(folder / "policy", byte_level_tokenizer(), initializer_range=0.5)
    sources = write_examples(folder / "e.jsonl", [f"Save {n}." for n in range(7)], ref="저장")
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        values = {
            "data": {"train": str(sources), "eval": str(sources)},
            "policy": {"path": str(folder / "policy"), "lora": {"r": 4}},
            "generation": {
                "prompt_template": "source",
                "max_new_tokens": 6,
                "num_samples_per_prompt": 2,
            },
            "reward": {"metricx_urls": m, "xcomet_urls": x},
            "rl": {"num_updates": 1, "batch_size": 4, "lr": 0.05},
            "misc": {"threads": 1, "device": "cpu", "run_dir": str(folder / "run")},
        }
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        yield path


@pytest.fixture(scope="module")
def checkpoint(config: Path) -> Path:
    """Return a checkpoint of adapters after an update that changes translations."""
    cfg = load_config(TranslationConfig, config)
    examples = load_examples(str(cfg.data.eval))
    return train_translation(examples, examples, cfg).checkpoint


def evaluated(config: Path, out: Path, *overrides: str, **options: Any) -> EvaluationOutcome:
    """Run the command in this process."""
    cfg = load_config(TranslationConfig, config, [f"misc.run_dir={out}", *overrides])
    (outcome,) = run_evaluation(
        cfg, {DEFAULT_EVAL_SET: load_examples(str(cfg.data.eval))}, **options
    )
    return outcome


def translations(outcome: EvaluationOutcome) -> list[str]:
    return [line["mt"] for line in outcome.evaluation.examples]


def without_seconds(path: Path) -> dict[str, Any]:
    stats = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in stats.items() if name != "seconds"}


def command(
    *arguments: str, world: int = 1, module: str = "trainer"
) -> subprocess.CompletedProcess[str]:
    return forked.completed(module, "evaluate", *arguments, environment={**os.environ}, ranks=world)


def test_a_checkpoint_of_adapters_is_evaluated_as_it_is(
    config: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Compare the stats with those of the run, and with those of the base."""
    base = str(config.parent / "policy")
    comparison = evaluated(config, tmp_path, f"policy.path={checkpoint}", against=base)
    run = checkpoint.parents[1]
    first, last = read_jsonl(run / "eval.jsonl")
    assert not (checkpoint / "config.json").exists()
    assert translations(comparison) == [row["mt"] for row in read_jsonl(run / last["completions"])]
    assert comparison.evaluation.stats["reward_mean"] == pytest.approx(last["reward_mean"])
    assert comparison.evaluation.policy == str(checkpoint)
    assert comparison.earlier is not None and comparison.earlier.policy == base
    before = [row["mt"] for row in read_jsonl(run / first["completions"])]
    assert (
        [line["mt"] for line in comparison.earlier.examples] == before != translations(comparison)
    )


def test_adapters_on_another_base_than_they_learned_on_are_refused(
    config: Path, checkpoint: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    other = save_policy(tmp_path / "other", byte_level_tokenizer(), seed=5)
    state = (copy / "state.json").read_text(encoding="utf-8")
    for base, message in ((other, "is not what the run started with"), ("/gone", "gone")):
        changed = state.replace(str(config.parent / "policy"), str(base))
        (copy / "state.json").write_text(changed, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            evaluated(config, tmp_path / "out", f"policy.path={copy}")
    (copy / "state.json").unlink()  # like adapters of another tool: peft's own file names the base
    comparison = evaluated(config, tmp_path / "out", f"policy.path={copy}")
    assert comparison.evaluation.stats["samples"] == 7


@pytest.mark.parametrize("adapters", [True, False])
def test_an_evaluation_samples_with_the_engine_of_the_config(
    config: Path, checkpoint: Path, tmp_path: Path, adapters: bool
) -> None:
    """Check that a vLLM server gets the weights and gives the translations of `generate`."""
    policy = checkpoint if adapters else config.parent / "policy"
    overrides = [f"policy.path={policy}", *([] if adapters else ["policy.lora.r=0"])]
    stub = VLLMStub(config.parent / "policy")
    with running_app(stub.app) as url:
        engine = ["generation.engine=vllm", f"generation.vllm.url={url}"]
        comparison = evaluated(config, tmp_path / "vllm", *overrides, *engine)
    assert stub.calls["/v1/completions"] > len(comparison.evaluation.examples)
    assert translations(comparison) == translations(
        evaluated(config, tmp_path / "here", *overrides)
    )
    assert not stub.adapters and not list((tmp_path / "vllm/sync").glob("*"))


def test_a_dead_vllm_is_one_line_before_anything_is_loaded(config: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    settings = (
        "generation.engine=vllm",
        f"generation.vllm.url={url}",
        f"misc.run_dir={tmp_path}",
        "reward.metricx_urls=http://127.0.0.1:9",
    )
    overrides = [part for value in settings for part in ("--set", value)]
    result = command("--config", str(config), *overrides)
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: generation.vllm.url: cannot connect to {url}")


def test_an_earlier_evaluation_is_replaced_only_when_asked(config: Path, tmp_path: Path) -> None:
    plain = ("policy.lora.r=0",)
    evaluated(config, tmp_path, *plain, against=str(config.parent / "policy"))
    before = (tmp_path / "evaluation.json").read_bytes()
    for options in ({}, {"against": str(tmp_path)}):
        with pytest.raises(UserError, match=r"evaluation.json exists .* --overwrite"):
            evaluated(config, tmp_path, *plain, **options)
    assert (tmp_path / "evaluation.json").read_bytes() == before
    replaced = evaluated(config, tmp_path, *plain, against=str(tmp_path), overwrite=True)
    assert replaced.earlier is not None and replaced.comparison == tmp_path / "comparison.html"
    evaluated(config, tmp_path, *plain, "eval.max_new_tokens=3", overwrite=True)
    assert (tmp_path / "evaluation.json").read_bytes() != before
    assert not (tmp_path / "comparison.html").exists()  # its evaluation no longer exists


@pytest.mark.parametrize("module", ["trainer", "tests.kits.trainer.ranks.sharded_evaluation"])
def test_several_processes_give_the_figures_of_one(
    config: Path, checkpoint: Path, tmp_path: Path, module: str
) -> None:
    """Check seven sources, which two processes cannot share evenly, with full or sharded weights.

    A held-out metric scores them, too; a mistake is one line."""
    base = str(config.parent / "policy")
    with running_service(OtherMetric()) as url:
        metric = f"eval.metrics.other={url}"
        evaluated(config, tmp_path / "one", f"policy.path={checkpoint}", metric, against=base)
        settings = (f"policy.path={checkpoint}", metric, f"misc.run_dir={tmp_path / 'two'}")
        overrides = [part for value in settings for part in ("--set", value)]
        arguments = ["--config", str(config), *overrides, "--against", base]
        result = command(*arguments, world=2, module=module)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("report: ") == result.stdout.count("comparison: ") == 1
    for name in ("evaluation.json", "comparison.json", "against/evaluation.json"):
        assert without_seconds(tmp_path / "two" / name) == without_seconds(tmp_path / "one" / name)
    assert without_seconds(tmp_path / "two/evaluation.json")["metric_other_coverage"] == 1.0
    single, distributed = (
        read_jsonl(tmp_path / name / "evaluation.jsonl") for name in ("one", "two")
    )
    assert single == distributed
    refused = command(*arguments, world=2)
    assert refused.returncode != 0 and refused.stderr.count("exists from an earlier") == 1
