"""Test episodes sampled by a vLLM server, against a stand-in with a real tiny Qwen2.5-VL."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from testing.servers import running_app
from tests.kits import vllm_stub
from tests.kits.trainer.images import PROCESSOR, tiny
from tests.kits.trainer.searching.episodes import played, search
from tests.kits.trainer.searching.policies import (
    TINY_SIGHT,
    ScriptedStart,
    tiny_reader,
    tiny_tokenizer,
    turn_ids,
)
from trainer.rl.config import PolicyConfig, SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy import load_policy
from trainer.rl.rollout import rollout_logprobs
from trainer.search.rollout.sampled import SampledPolicy


def test_pictures_go_out_as_shown_and_the_trainer_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that one id is sent for each image, and that the server reads the ids that were
    joined."""
    monkeypatch.setenv("VLLM_API_KEY", vllm_stub.KEY)
    monkeypatch.setattr(vllm_stub, "CONTEXT", 8192)
    folder, cpu = tmp_path / "policy", torch.device("cpu")
    tiny("qwen2_5_vl").float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    stub = vllm_stub.VLLMStub(folder, routes=("dev", "images"), processor=PROCESSOR)
    image_by_hash: dict[str, bytes] = {}
    with running_app(stub.app) as url:
        cfg = SamplingConfig.model_validate(
            {"max_new_tokens": 8, "engine": "vllm", "vllm": {"url": url, "timeout_s": 60.0}}
        )
        served = probe_engine(cfg, adapters=False, images=True)
        model, tokenizer = load_policy(PolicyConfig(path=str(folder)), cpu)
        reader = tiny_reader(model, PROCESSOR)
        options: dict[str, Any] = {
            "adapters": False,
            "run_dir": tmp_path,
            "banned_token_ids": reader.banned_token_ids,
        }
        with closing(
            open_sampler(cfg, served, model, tokenizer, DistributedContext(cpu), **options)
        ) as sampler:
            sampler.sync_weights(model, 0)
            first = ScriptedStart(sampler, model, [search("births")], reader.banned_token_ids)
            ids = turn_ids(tokenizer, reader)
            policy = SampledPolicy(first, ids, cfg, name="tiny", context=8192, seed=1)
            done = played(policy, samples=2, max_turns=3, sight=TINY_SIGHT, pictures=image_by_hash)
    sent = [body for body in stub.bodies if "content_parts" in body]
    assert len(sent) == 4 and all(body["token_ids"].count(reader.image_id) == 1 for body in sent)
    for trajectory in done:
        assert trajectory.tokens is not None and len(trajectory.tokens.images) == 1
        assert [turn.action for turn in trajectory.turns][:1] == ["search"] and len(
            trajectory.turns
        ) > 2
        rollout = policy.ended_episodes[trajectory.trajectory_id].rollout(
            trajectory.trajectory_id, 0, ids.stops
        )
        assert [seen.png for seen in rollout.images] == [image_by_hash[trajectory.tokens.images[0]]]
        (trainer_logprobs,) = rollout_logprobs(
            [rollout], model, 1.0, 0, 10**5, banned_token_ids=reader.banned_token_ids
        )
        pairs = zip(trainer_logprobs, rollout.old_logprobs or [], rollout.actions, strict=True)
        for trainer_logprob, server_logprob, action in pairs:
            assert not action or trainer_logprob == pytest.approx(server_logprob, abs=1e-3)
