"""Test episodes of the search task with a real vLLM.

Images use its token route, and the server gets the policy's weights after each update."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.trainer.search.training.test_taught import train
from tests.kits.trainer.images import PAD, PROCESSOR
from tests.kits.trainer.searching.episodes import crop, played, search
from tests.kits.trainer.searching.policies import (
    TINY_SIGHT,
    ScriptedStart,
    tiny_reader,
    tiny_tokenizer,
    turn_ids,
)
from tests.kits.trainer.searching.taught import Taught, taught
from tests.kits.vllm import KEY, running_vllm
from trainer.rl.config import PolicyConfig, SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.engines.vllm_http import VLLMServer
from trainer.rl.policy import load_policy
from trainer.rl.rollout import Rollout, rollout_logprobs
from trainer.search.rollout.sampled import SampledPolicy

pytestmark = pytest.mark.vllm

CPU = torch.device("cpu")
#: vLLM and the trainer round differently in float32: up to 1.4e-5 on the processors tried. The
#: weights of another update give more than 1.
GAP = 1e-4
LEARNS = pytest.mark.parametrize("rank", [4, 0], ids=["adapters", "every weight"])
SEES = pytest.mark.parametrize("served", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
ALL = pytest.mark.parametrize("served", ["text", "qwen2_5_vl", "qwen3_vl"], indirect=True)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Taught]]:
    """Yield (URL, policy) of a server with the flags of trainer/rl/engines/vllm.py."""
    folder = tmp_path_factory.mktemp(request.param)
    sees = request.param != "text"
    limit = ["--limit-mm-per-prompt", '{"image":8,"video":0}'] if sees else []
    with (
        taught(folder, request.param) as policy,
        running_vllm(
            policy.policy,
            folder / "vllm.log",
            *("--max-model-len", "2048"),
            *("--logprobs-mode", "processed_logprobs"),
            "--enable-lora",
            "--enable-scale-out",
            *limit,
            VLLM_SERVER_DEV_MODE="1",
            VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
        ) as url,
    ):
        yield url.removesuffix("/v1"), policy


@pytest.fixture(autouse=True)
def reset_weights(served: tuple[str, Taught], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the server the policy's own weights."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    url, policy = served

    async def give() -> None:
        server = VLLMServer(url)
        try:
            await server.reload(policy.policy, "default")
        finally:
            await server.close()

    asyncio.run(give())


@contextmanager
def engine(served: tuple[str, Taught], rank: int, run_dir: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (sampler with the model's weights, model, reader)."""
    url, folder = served[0], served[1].policy
    cfg = SamplingConfig.model_validate({"engine": "vllm", "vllm": {"url": url}})
    name = probe_engine(cfg, adapters=rank > 0, images=True)
    policy = PolicyConfig.model_validate({"path": str(folder), "lora": {"r": rank}})
    model, tokenizer = load_policy(policy, CPU)
    reader = tiny_reader(model, PROCESSOR)
    options: dict[str, Any] = {
        "adapters": rank > 0,
        "run_dir": run_dir,
        "banned_token_ids": reader.banned_token_ids,
    }
    sampler = open_sampler(cfg, name, model, tokenizer, DistributedContext(CPU), **options)
    try:
        sampler.sync_weights(model, 0)
        yield sampler, model, reader
    finally:
        sampler.close()


def change(model: nn.Module) -> None:
    """Change all trainable weights."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * max(0.1 * weight.std(), 0.02))


def max_difference(rows: list[Rollout], model: nn.Module, banned_token_ids: list[int]) -> float:
    """Return the largest |log pi trainer - log pi server| of a token that the policy wrote."""
    trainer_logprobs = rollout_logprobs(
        rows, model, 1.0, PAD, 10**5, banned_token_ids=banned_token_ids
    )
    return max(
        abs(trainer_logprob - server_logprob)
        for row, values in zip(rows, trainer_logprobs, strict=True)
        for trainer_logprob, server_logprob, action in zip(
            values, row.old_logprobs or [], row.actions, strict=True
        )
        if action
    )


@LEARNS
@SEES
def test_episodes_with_crops_follow_each_update(
    served: tuple[str, Taught], rank: int, tmp_path: Path
) -> None:
    """Check episodes whose search and crop are scripted and whose later turns the server samples.

    The server must read the joined ids, or the engine fails. After an update it must use the new
    weights, although it has read the same prompts before."""
    first_turns = [search("births"), crop(10, 10, 40, 40)]
    sampling = SamplingConfig(max_new_tokens=24)
    episode = {"instructions": "Search.", "max_turns": 5, "sight": TINY_SIGHT}
    with engine(served, rank, tmp_path / "run") as (sampler, model, reader):
        ids = turn_ids(tiny_tokenizer(), reader)
        for update in range(3):
            first = ScriptedStart(sampler, model, first_turns, reader.banned_token_ids)
            policy = SampledPolicy(first, ids, sampling, name="tiny", context=2000, seed=1)
            done = played(policy, samples=2, **episode)
            rows = [
                policy.ended_episodes[trajectory.trajectory_id].rollout(
                    trajectory.trajectory_id, 0, ids.stops
                )
                for trajectory in done
            ]
            for trajectory, row in zip(done, rows, strict=True):
                kinds = [view.kind for turn in trajectory.turns for view in turn.views]
                assert kinds[:2] == ["page", "crop"] and len(trajectory.turns) > 2
                assert len(row.images) >= 2
            current = max_difference(rows, model, reader.banned_token_ids)
            change(model)
            stale = max_difference(rows, model, reader.banned_token_ids)
            print(f"update {update}: {current:.1e} apart; with the weights of another {stale:.1e}")
            assert current <= GAP and stale > 1000 * GAP
            sampler.sync_weights(model, update + 1)


@LEARNS
@ALL
def test_a_run_learns_from_what_the_server_draws(
    served: tuple[str, Taught], rank: int, tmp_path: Path
) -> None:
    """Check three updates of `trainer train`: text uses one route, crops the other."""
    url, policy = served
    engine = ("generation.engine=vllm", f"generation.vllm.url={url}", f"policy.lora.r={rank}")
    lines = train(policy, tmp_path / "run", *engine)
    for line in lines:
        print({name: line[name] for name in ("steps", "sampler_gap_max", "crops_mean")})
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert sum(line["steps"] for line in lines) >= 2
    # Groups with a single reward train nothing: such an update compares nothing.
    assert all(line["sampler_gap_max"] <= GAP for line in lines if line["steps"])
    assert sum(line["crops_mean"] for line in lines) > 0.5
