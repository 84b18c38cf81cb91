"""Test the findings of `python -m trainer check`, which loads no weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from scorekit.config import load_config
from scorekit.report.findings import Findings
from scorekit.server.fake import FakeBackend
from testing.servers import free_port, running_service
from tests.kits.trainer.runs import byte_level_tokenizer, save_policy, tiny_llama, write_examples
from trainer.__main__ import app
from trainer.runs.memory import activation_bytes, estimate_memory
from trainer.translation.check import check_run
from trainer.translation.config import TranslationConfig
from trainer.translation.data import load_examples
from trainer.translation.train import train_translation


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    with running_service(FakeBackend("metricx")) as m, running_service(FakeBackend("xcomet")) as x:
        yield m, x


@pytest.fixture
def settings(tmp_path: Path, urls: tuple[str, str]) -> list[str]:
    save_policy(tmp_path / "policy", byte_level_tokenizer())
    train = write_examples(tmp_path / "train.jsonl", [f"Open {n}." for n in range(8)])
    return [
        f"policy.path={tmp_path}/policy",
        f"data.train={train}",
        f"data.eval={train}",
        "generation.prompt_template=source",
        "generation.max_new_tokens=8",
        f"reward.metricx_urls={urls[0]}",
        f"reward.xcomet_urls={urls[1]}",
        "misc.device=cpu",
        f"misc.run_dir={tmp_path}/out",
    ]


def check(settings: list[str], *overrides: str) -> Findings:
    return check_run(load_config(TranslationConfig, None, [*settings, *overrides]))


def message_of(findings: Findings, name: str) -> str:
    (message,) = [check.result for check in findings.checks if check.name == name]
    return message


def test_a_run_that_can_start_is_told_what_it_has(settings: list[str]) -> None:
    findings = check(settings)
    assert not findings.failed
    message = message_of(findings, "rl")
    assert message.startswith("ppo; ") and message.endswith("importance correction: off")
    assert message_of(findings, "data.train").startswith("8 rows (en-US>ko-KR 8); first: 'Open 0.'")
    assert "LlamaForCausalLM, " in message_of(findings, "policy.path")
    assert "no chat template, ends at </s>" in message_of(findings, "policy.tokenizer")
    assert "fake-metricx, lower is better" in message_of(findings, "metricx")
    assert "fake-xcomet, higher is better" in message_of(findings, "xcomet")
    assert message_of(findings, "prompts of data.train").endswith("and 8 for the translation")
    stale = check(settings, "rl.max_staleness=2", "rl.importance_mode=token_mask")
    expected = "importance correction: ratio of a token, masked outside 0.5 to 2"
    assert message_of(stale, "rl").endswith(expected)
    assert "adapters trained" in message_of(check(settings, "policy.lora.r=2"), "policy.path")


def test_every_fault_is_named_not_only_the_first(
    settings: list[str], tmp_path: Path, urls: tuple[str, str]
) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "file").write_text("")
    mistakes = [
        "data.eval=gone.jsonl",
        f"policy.reference_path={tmp_path}/gone",
        "policy.tokenizer=./gone",
        f"reward.metricx_urls=http://127.0.0.1:{free_port()}",
        f"reward.xcomet_urls={urls[0]}",
        "misc.trackers=[smoke]",
        f"misc.run_dir={tmp_path}/file/x",
        "generation.temperature=0",
        "generation.engine=vllm",
        f"generation.vllm.url=http://127.0.0.1:{free_port()}",
    ]
    sets = [part for value in [*settings, *mistakes] for part in ("--set", value)]
    result = CliRunner().invoke(app, ["check", "--config", str(tmp_path / "config.yaml"), *sets])
    assert result.exit_code == 2
    errors = [line.removeprefix("error: ") for line in result.stderr.splitlines()]
    assert [line.split(":")[0] for line in errors if line.count(":") > 1] == [
        "config",
        "data.eval",
        "policy.reference_path",
        "policy.tokenizer",
        "metricx",
        "xcomet",
        "vLLM",
        "misc.trackers",
        "misc.run_dir",
    ]
    assert "is a metricx service" in result.stderr
    assert f"error: misc.run_dir: {tmp_path}/file/x: " in result.stderr  # its key occurs once


def test_weights_are_looked_at_but_never_loaded(settings: list[str], tmp_path: Path) -> None:
    """Check a header of 25.8 billion weights over a sparse file, which uses no disk block."""
    policy = tmp_path / "policy"
    config = json.loads((policy / "config.json").read_text())
    big = {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 24}
    (policy / "config.json").write_text(json.dumps(config | big))
    size = 25_800_000_000
    entry = {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}
    header = json.dumps({"weights": entry}).encode()
    with (policy / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * size)
    findings = check(settings)
    assert [failed.name for failed in findings.failed] == ["memory"]
    assert "are free on cpu. Lower rl.micro_batch_tokens" in message_of(findings, "memory")
    assert dict(findings.memory)["all"] > 4 * 4 * 19e9
    (policy / "config.json").write_text(json.dumps(config | big | {"num_hidden_layers": 40}))
    assert "has 25,800,000,000 weights, but its config defines" in message_of(
        check(settings), "policy.path"
    )
    with (policy / "model.safetensors").open("r+b") as file:
        file.truncate(8 + len(header) + 4 * size - 1)
    assert "model.safetensors: truncated: " in message_of(check(settings), "policy.path")
    (policy / "model.safetensors").write_bytes(b"not weights")
    assert "not a safetensors file" in message_of(check(settings), "policy.path")


def test_a_run_that_stands_there_can_be_gone_on_with(settings: list[str], tmp_path: Path) -> None:
    short = ["rl.num_updates=1", "rl.batch_size=2"]
    cfg = load_config(TranslationConfig, None, [*settings, *short])
    train_translation(load_examples(tmp_path / "train.jsonl"), [], cfg)
    findings = check(settings, *short)
    assert not findings.failed
    assert "has a run of 1 updates. Resume it with --resume" in message_of(findings, "misc.run_dir")
    assert "misc.seed: " in message_of(check(settings, *short, "misc.seed=9"), "misc.run_dir")


def test_the_memory_estimate_counts_what_is_held() -> None:
    model = tiny_llama(byte_level_tokenizer())
    weights = sum(p.numel() for p in model.parameters())
    rows = dict(estimate_memory(TranslationConfig(), model, 8))
    assert rows["policy, weights"] == rows["reference, weights"] == 4 * weights
    assert rows["optimizer"] == 8 * weights and rows["gradients"] == 4 * weights
    alone = load_config(TranslationConfig, None, ["rl.kl_coef=0"])
    assert "reference, weights" not in dict(estimate_memory(alone, model, 8))


def test_activations_are_what_torch_keeps_within_a_quarter() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    }
    model = tiny_llama(byte_level_tokenizer(), **sizes)
    parameter_pointers = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storage_by_pointer: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_pointers:
            storage_by_pointer[storage.data_ptr()] = storage
        return tensor

    ids = torch.ones((1, 256), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=ids, use_cache=False)
    measured = sum(storage.nbytes() for storage in storage_by_pointer.values())
    cfg = load_config(TranslationConfig, None, ["rl.micro_batch_tokens=256"])
    head = 256 * model.config.vocab_size * 16
    estimate = activation_bytes(cfg, model.config, 8) - head
    assert output is not None and 0.75 < measured / estimate < 1.25
