"""Test the trainer's vLLM engine with a real vLLM: the server follows the policy's weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from scorekit.server.fake import FakeBackend
from testing.servers import running_service
from tests.kits.vllm import KEY, ROOT, make_model, running_vllm, untie
from trainer.rl.config import SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import probe_server
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.engines.vllm import VLLMSampler
from trainer.rl.forward import completion_logprobs
from trainer.rl.policy import load_policy, stop_token_ids
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example, load_examples
from trainer.translation.prompting import check_prompts
from trainer.translation.train import train_translation

pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
#: Kernels differ; the largest difference so far was 2e-6.
SMALL = 1e-3
LEARNS = pytest.mark.parametrize("rank", [8, 0], ids=["adapters", "every weight"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Yield (URL, folder of the model) of a server with the flags of trainer/rl/engines/vllm.py."""
    folder = tmp_path_factory.mktemp("vllm")
    model = untie(make_model(folder / "model"))
    with running_vllm(
        model,
        folder / "vllm.log",
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-lora",
        VLLM_SERVER_DEV_MODE="1",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
    ) as url:
        yield url.removesuffix("/v1"), model


@pytest.fixture
def cfg(
    served: tuple[str, Path], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TranslationConfig:
    """Return the config of a run on that server, which gets the policy's own weights first."""
    url, model = served
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    reload_request = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    httpx.post(f"{url}/collective_rpc", json=reload_request, timeout=60).raise_for_status()
    return TranslationConfig.model_validate(
        {
            "policy": {"path": str(model), "lora": {"r": rank, "alpha": 16.0}},
            "generation": {
                "prompt_template": "source",
                "max_new_tokens": 24,
                "temperature": 0.8,
                "engine": "vllm",
                "vllm": {"url": url},
            },
            "reward": {"w_xcomet_span": 0.0},
            "rl": {"num_updates": 5, "batch_size": 8, "lr": 3e-3, "kl_coef": 0.0},
            "misc": {"run_dir": str(tmp_path / "run"), "device": "cpu", "threads": 1},
        }
    )


def examples(count: int) -> list[Example]:
    return load_examples(str(ROOT / "demo/data/heldout.jsonl"))[:count]


@pytest.fixture
def engine(cfg: TranslationConfig) -> Iterator[tuple[VLLMSampler, nn.Module, Any]]:
    """Yield (sampler with the model's weights, model, tokenizer)."""
    model, tokenizer = load_policy(cfg.policy, CPU)
    stops = stop_token_ids(model, tokenizer)
    server, adapters = cfg.generation.vllm, cfg.policy.lora.r > 0
    name = probe_server(server, adapters=adapters)
    vllm_sampler = VLLMSampler(
        server, name, stops, DistributedContext(CPU), adapters=adapters, run_dir=cfg.misc.run_dir
    )
    with closing(vllm_sampler) as sampler:
        sampler.sync_weights(model, 0)
        yield sampler, model, tokenizer


def change(model: nn.Module) -> None:
    """Change all trainable weights by a large amount."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * max(0.3 * parameter.std(), 0.05))


def gap(sampler: VLLMSampler, model: nn.Module, prompts: list[list[int]], cfg: Any) -> float:
    """Return the largest |log pi trainer - log pi server| of sampled tokens."""
    groups = sampler.sample(prompts, cfg.generation, seed=1)
    pairs = [(prompts[i], sample) for i, group in groups for sample in group]
    with torch.no_grad():
        trainer_logprobs, _, mask = completion_logprobs(
            model, [p for p, _ in pairs], [s.token_ids for _, s in pairs], 0.8, 0
        )
    server_logprobs = torch.tensor([value for _, s in pairs for value in s.logprobs or ()])
    return float((trainer_logprobs[mask] - server_logprobs).abs().max())


@LEARNS
def test_greedy_and_sampled_outputs_follow_a_large_update(
    engine: Any, cfg: TranslationConfig
) -> None:
    sampler, model, tokenizer = engine
    greedy = cfg.eval_generation()
    prompts = [p.ids.tolist() for p in check_prompts(examples(32), model, tokenizer, greedy)]
    outputs = []
    for update in (0, 1):
        completions = dict(sampler.sample(prompts, greedy, with_logprobs=False))
        local_sampler = GenerateSampler(model, tokenizer)
        local_sampler.sync_weights(model, update)
        expected = dict(local_sampler.sample(prompts, greedy, with_logprobs=False))
        assert sum(completions[i] == expected[i] for i in expected) >= 30
        assert gap(sampler, model, prompts, cfg) < SMALL
        samples = [dict(sampler.sample(prompts, cfg.generation, seed=7)) for _ in range(2)]
        assert samples[0] == samples[1]
        outputs.append(completions)
        change(model)
        sampler.sync_weights(model, update + 1)
    assert sum(outputs[0][i] != outputs[1][i] for i in outputs[0]) >= 16


@LEARNS
def test_nothing_that_was_computed_with_old_weights_is_used_again(
    engine: Any, cfg: TranslationConfig
) -> None:
    sampler, model, _ = engine
    long = [[5 + i % 1000 for i in range(600)]]  # the prefix cache has blocks of 128 here
    assert gap(sampler, model, long, cfg) < SMALL
    change(model)
    sampler.sync_weights(model, 1)
    assert gap(sampler, model, long, cfg) < SMALL


def pause_while_sampling(url: str, thread: threading.Thread) -> None:
    """Pause and resume the server while it samples two sequences for the thread.

    Nothing happens if the thread ends before that is seen: a fast machine needs under a second.
    """
    with httpx.Client(base_url=url, timeout=60) as client:
        while thread.is_alive():
            lines = client.get("/metrics").text.splitlines()
            running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
            if sum(float(line.split()[-1]) for line in running) == 2:
                for route in ("/pause", "/resume"):
                    client.post(route).raise_for_status()
                return


@LEARNS
def test_completions_that_a_pause_aborts_are_sampled_again(
    served: tuple[str, Path], cfg: TranslationConfig
) -> None:
    """Check it with the default mode of vLLM's pause, and without stop ids, so that it takes long.

    A pause returns what the completions in flight have so far, with HTTP status 200.
    """
    url, _ = served
    model, _ = load_policy(cfg.policy, CPU)
    adapters = cfg.policy.lora.r > 0
    name = probe_server(cfg.generation.vllm, adapters=adapters)
    gen_cfg = SamplingConfig(max_new_tokens=900, temperature=0.8, num_samples_per_prompt=2)
    sampler = VLLMSampler(
        cfg.generation.vllm,
        name,
        [],
        DistributedContext(CPU),
        adapters=adapters,
        run_dir=cfg.misc.run_dir,
    )
    with closing(sampler):
        sampler.sync_weights(model, 0)
        expected = dict(sampler.sample([[5, 6, 7]], gen_cfg, seed=1))
        assert [len(completion.token_ids) for completion in expected[0]] == [900, 900]
        for _ in range(10):  # until a pause comes before the completions are done
            results: dict[int, Any] = {}
            thread = threading.Thread(
                target=lambda results=results: results.update(
                    sampler.sample([[5, 6, 7]], gen_cfg, seed=1)
                )
            )
            thread.start()
            pause_while_sampling(url, thread)
            thread.join()
            assert results == expected
            if aborted := sampler.stats()["sampler_faults_unfinished"]:
                break
        assert aborted == 1


@LEARNS
def test_five_updates_learn_and_the_server_keeps_up(cfg: TranslationConfig) -> None:
    with running_service(FakeBackend("metricx")) as url:
        reward = cfg.reward.model_copy(update={"metricx_urls": [url]})
        cfg = cfg.model_copy(update={"reward": reward})
        artifacts = train_translation(examples(40), examples(16), cfg)
    lines = [
        json.loads(line) for line in (artifacts.run_dir / "log.jsonl").read_text().splitlines()
    ]
    assert [line["skipped"] for line in lines] == [False] * 5
    for line in lines:
        print({name: line[name] for name in line if "sampler" in name or "importance" in name})
        assert line["sampler_gap_max"] < SMALL
        assert line["approx_kl"] > SMALL  # the policy moved that far: old weights would be detected
        assert line["importance_weight_mean"] == pytest.approx(1, abs=SMALL)
    (_, before), (_, after) = artifacts.reports
    texts = [[row["mt"] for row in report.examples] for report in (before, after)]
    assert sum(b != a for b, a in zip(*texts, strict=True)) >= 8
