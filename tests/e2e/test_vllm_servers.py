"""Test the trainer with two real vLLM servers, one of which is killed, and one of two ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from scorekit.server.fake import FakeBackend
from testing.servers import running_service, wait_until
from tests.e2e.test_vllm_trainer import SMALL, change, examples, gap
from tests.kits.trainer.vllm_servers import NO_FAULTS
from tests.kits.vllm import KEY, NAME, kill_vllm, make_model, running_vllm, untie
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import probe_server
from trainer.rl.engines.vllm import VLLMSampler
from trainer.rl.policy import load_policy, stop_token_ids
from trainer.translation.config import TranslationConfig
from trainer.translation.prompting import check_prompts
from trainer.translation.train import train_translation

pytestmark = pytest.mark.vllm

FLAGS = ("--logprobs-mode", "processed_logprobs", "--enable-lora", "--enable-scale-out")
VARIABLES: Any = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
#: Seconds for a server to start on a busy machine.
START_S = 600.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untie(make_model(tmp_path_factory.mktemp("vllm") / "model"))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def config(model: Path, run_dir: Path, urls: Sequence[str], rank: int) -> TranslationConfig:
    return TranslationConfig.model_validate(
        {
            "policy": {"path": str(model), "lora": {"r": rank, "alpha": 16.0}},
            "generation": {
                "prompt_template": "source",
                "max_new_tokens": 24,
                "temperature": 0.8,
                "engine": "vllm",
                "vllm": {"url": list(urls)},
            },
            "reward": {"w_xcomet_span": 0.0},
            "rl": {"num_updates": 6, "batch_size": 8, "lr": 3e-3, "kl_coef": 0.0},
            "misc": {"run_dir": str(run_dir), "device": "cpu", "threads": 1},
        }
    )


@contextlib.contextmanager
def two_servers(model: Path, folder: Path) -> Iterator[list[str]]:
    """Yield the URLs of two servers, which start at the same time.

    A server ends with the thread that has started it, so the threads live as long.
    """
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:

        def start(number: int) -> str:
            server = running_vllm(model, folder / f"vllm{number}.log", *FLAGS, **VARIABLES)
            return stack.enter_context(server).removesuffix("/v1")

        yield list(threads.map(start, range(2)))


@pytest.mark.parametrize("rank", [8, 0], ids=["adapters", "every weight"])
def test_a_run_goes_on_without_a_server_that_is_killed_and_it_returns(
    model: Path, tmp_path: Path, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log_path = tmp_path / "run" / "log.jsonl"

    def kill_midway() -> None:
        wait_until(lambda: count_lines(log_path) >= 2, START_S)
        kill_vllm(urls[0])

    with ExitStack() as restarted, two_servers(model, tmp_path) as urls:
        cfg = config(model, tmp_path / "run", urls, rank)
        killer = threading.Thread(target=kill_midway, daemon=True)
        killer.start()
        with running_service(FakeBackend("metricx")) as scorer:
            reward = cfg.reward.model_copy(update={"metricx_urls": [scorer]})
            train_translation(examples(40), examples(16), cfg.model_copy(update={"reward": reward}))
        killer.join()
        rows = [json.loads(line) for line in log_path.read_text().splitlines()]
        assert [row["skipped"] for row in rows] == [False] * 6
        assert {row["samples"] for row in rows} == {8 * cfg.generation.num_samples_per_prompt}
        assert all(row["sampler_gap_max"] < SMALL for row in rows)
        assert f"{urls[0]} is left out: " in caplog.text

        # A sampler that does not find it gives it the weights when it is there again.
        policy, tokenizer = load_policy(cfg.policy, torch.device("cpu"))
        prompts = prompts_of(cfg, policy, tokenizer)
        with closing(open_sampler(cfg, policy, tokenizer)) as sampler:
            sampler.sync_weights(policy, 0)
            assert [server.url for server in sampler._pool.up] == urls[1:]
            change(policy)
            sampler.sync_weights(policy, 1)
            port = httpx.URL(urls[0]).port
            server = running_vllm(model, tmp_path / "again.log", *FLAGS, port=port, **VARIABLES)
            restarted.enter_context(server)
            note = f"{urls[0]} takes part again, with the weights of update 1"
            wait_until(lambda: note in caplog.text, START_S)
            assert gap(sampler, policy, prompts, cfg) < SMALL
            assert sampler.stats() == {"sampler_servers": 1, "sampler_moved": 0} | NO_FAULTS
            assert sampler.stats()["sampler_servers"] == 2


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def prompts_of(cfg: TranslationConfig, policy: Any, tokenizer: Any) -> list[list[int]]:
    prompts = check_prompts(examples(16), policy, tokenizer, cfg.generation)
    return [prompt.ids.tolist() for prompt in prompts]


def open_sampler(cfg: TranslationConfig, policy: Any, tokenizer: Any) -> VLLMSampler:
    return VLLMSampler(
        cfg.generation.vllm,
        NAME,
        stop_token_ids(policy, tokenizer),
        DistributedContext(torch.device("cpu")),
        adapters=cfg.policy.lora.r > 0,
        run_dir=cfg.misc.run_dir,
    )


def test_a_server_of_two_ranks_follows_the_weights(model: Path, tmp_path: Path) -> None:
    """Check vLLM's own data parallelism, with adapters and with all weights."""
    flags = (*FLAGS, "--data-parallel-size", "2")
    with running_vllm(model, tmp_path / "vllm.log", *flags, **VARIABLES) as url:
        for rank in (8, 0):
            cfg = config(model, tmp_path / f"run{rank}", [url], rank)
            assert probe_server(cfg.generation.vllm, adapters=rank > 0) == NAME
            policy, tokenizer = load_policy(cfg.policy, torch.device("cpu"))
            prompts = prompts_of(cfg, policy, tokenizer)
            with closing(open_sampler(cfg, policy, tokenizer)) as sampler:
                for update in range(3):
                    sampler.sync_weights(policy, update)
                    assert gap(sampler, policy, prompts, cfg) < SMALL
                    change(policy)
