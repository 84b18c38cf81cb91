"""Test the vLLM engine against a stand-in server that samples from a real tiny Llama."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from testing.servers import free_port, running_app, running_service
from tests.kits.trainer.runs import example, letter_tokenizer, save_policy
from tests.kits.vllm_stub import KEY, NAME, VLLMStub
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import probe_server
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.engines.vllm import VLLMSampler
from trainer.rl.forward import completion_logprobs
from trainer.rl.policy import load_policy, stop_token_ids
from trainer.rl.sampler import SampledCompletion, SeededPrompt
from trainer.translation.config import TranslationConfig
from trainer.translation.train import train_translation

CPU = torch.device("cpu")
TOKENIZER = letter_tokenizer()
PROMPTS = [[3, 4, 2], [5, 2], [6, 7, 8, 2], [5, 2]]
RANKS = (0, 4)  # 0: all weights are trained; 4: adapters are


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    return save_policy(folder, TOKENIZER, initializer_range=0.5)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def config(url: str, policy: Path, run_dir: Path, rank: int = 0, **vllm: Any) -> TranslationConfig:
    return TranslationConfig.model_validate(
        {
            "policy": {"path": str(policy), "lora": {"r": rank}},
            "generation": {
                "prompt_template": "source",
                "max_new_tokens": 6,
                "temperature": 0.8,
                "engine": "vllm",
                "vllm": {"url": url, "timeout_s": 30.0} | vllm,
            },
            "misc": {"run_dir": str(run_dir), "device": "cpu", "threads": 1},
        }
    )


def open_vllm_sampler(
    cfg: TranslationConfig, name: str, stops: list[int], world: DistributedContext
) -> VLLMSampler:
    return VLLMSampler(
        cfg.generation.vllm,
        name,
        stops,
        world,
        adapters=cfg.policy.lora.r > 0,
        run_dir=cfg.misc.run_dir,
    )


@contextmanager
def engine(
    stub: VLLMStub, policy: Path, run_dir: Path, rank: int = 0, **vllm: Any
) -> Iterator[tuple[VLLMSampler, nn.Module, TranslationConfig]]:
    """Yield the sampler on the stub server, with the model's weights."""
    with running_app(stub.app) as url:
        cfg = config(url, policy, run_dir, rank, **vllm)
        name = probe_server(cfg.generation.vllm, adapters=rank > 0)
        model, tokenizer = load_policy(cfg.policy, CPU)
        stops = stop_token_ids(model, tokenizer)
        sampler = open_vllm_sampler(cfg, name, stops, DistributedContext(CPU))
        with closing(sampler):
            sampler.sync_weights(model, 0)
            yield sampler, model, cfg


def draw(
    sampler: VLLMSampler, cfg: TranslationConfig, **options: Any
) -> dict[int, list[SampledCompletion]]:
    return dict(sampler.sample(PROMPTS, cfg.generation, **{"seed": 1} | options))


def change(model: nn.Module, by: float = 1.0) -> None:
    """Change all trainable weights by a large amount."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * by)


def check_follows(sampler: VLLMSampler, model: nn.Module, cfg: TranslationConfig) -> None:
    """Check that the greedy completions and the samples' log-probabilities are the model's."""
    greedy = cfg.eval_generation()
    assert sampler.weights is not None
    local_sampler = GenerateSampler(model, TOKENIZER)
    local_sampler.sync_weights(model, sampler.weights.update)
    expected_samples = local_sampler.sample(PROMPTS, greedy, with_logprobs=False)
    assert dict(sampler.sample(PROMPTS, greedy, with_logprobs=False)) == dict(expected_samples)
    pairs = [(PROMPTS[i], s) for i, group in draw(sampler, cfg).items() for s in group]
    with torch.no_grad():
        expected, _, mask = completion_logprobs(
            model, [p for p, _ in pairs], [s.token_ids for _, s in pairs], 0.8, 0
        )
    logprobs = torch.tensor([value for _, s in pairs for value in s.logprobs or ()])
    torch.testing.assert_close(logprobs, expected[mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", RANKS)
def test_completions_follow_the_weights(policy: Path, tmp_path: Path, rank: int) -> None:
    stub = VLLMStub(policy)
    with engine(stub, policy, tmp_path, rank) as (sampler, model, cfg):
        check_follows(sampler, model, cfg)
        before = draw(sampler, cfg)
        change(model)
        assert draw(sampler, cfg) == before  # nothing changes before the sync
        for update in (1, 2):
            sampler.sync_weights(model, update)
            (weights,) = (tmp_path / "sync").glob("scorekit-*/*")
            readable = {path.stat().st_mode & 0o044 for path in weights.glob("*.safetensors")}
            assert readable == {weights.stat().st_mode & 0o044}  # vLLM may run as another user
            assert len(stub.adapters) == (1 if rank else 0)
        check_follows(sampler, model, cfg)
        assert draw(sampler, cfg) != before
        salts = {body["cache_salt"] for body in stub.bodies if "cache_salt" in body}
        assert len(salts) == 2  # one for each of the two updates that were sampled from
    assert not stub.adapters and not list((tmp_path / "sync").iterdir())


@pytest.mark.parametrize("rank", RANKS)
def test_what_a_killed_start_left_is_removed_and_nothing_else(
    policy: Path, tmp_path: Path, rank: int
) -> None:
    """Check that only this run's leftovers are removed, and none of another run on the server."""
    stub = VLLMStub(policy)
    shared = tmp_path / "shared"
    with engine(stub, policy, tmp_path / "one", rank, sync_dir=str(shared)) as (killed, _, cfg):
        world, stops, name = killed.world, killed.stops, killed.model_name
        (left,) = shared.glob("scorekit-*/*")
        (left.parent / ".update-000009-x.partial").mkdir()
        (left.parent / "notes").mkdir()
        foreign_adapters = set(stub.adapters)
        with engine(stub, policy, tmp_path / "two", rank, sync_dir=str(shared)) as (
            other,
            model,
            _,
        ):
            assert other.folder != killed.folder and left.is_dir()
            assert foreign_adapters <= set(stub.adapters)
            with closing(open_vllm_sampler(cfg, name, stops, world)) as restarted:
                assert sorted(p.name for p in left.parent.iterdir()) == ["notes"]
                restarted.sync_weights(model, 0)
                assert not foreign_adapters & set(stub.adapters)
                assert other.weights is not None and other.weights.folder.is_dir()
    assert [p.name for p in shared.glob("scorekit-*/*")] == ["notes"]


def test_the_same_seed_gives_the_same_and_each_prompt_its_own(policy: Path, tmp_path: Path) -> None:
    with engine(VLLMStub(policy), policy, tmp_path) as (sampler, _, cfg):
        samples = draw(sampler, cfg)
        assert draw(sampler, cfg) == samples != draw(sampler, cfg, seed=2)
        assert samples[1] != samples[3]  # the same text twice in the batch
        assert all(len(group) == 4 for group in samples.values())
        stops, longest = sampler.stops, cfg.generation.max_new_tokens
        for sample in (sample for group in samples.values() for sample in group):
            assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)
            assert (sample.token_ids[-1] in stops) != (len(sample.token_ids) == longest)
            assert not set(sample.token_ids[:-1]) & set(stops)
        torch.manual_seed(3)
        first, second = draw(sampler, cfg, seed=None), draw(sampler, cfg, seed=None)
        torch.manual_seed(3)
        assert first != second and draw(sampler, cfg, seed=None) == first


def test_a_group_comes_while_another_is_still_generated(policy: Path, tmp_path: Path) -> None:
    stub = VLLMStub(policy)
    with engine(stub, policy, tmp_path) as (sampler, _, cfg):
        stub.blocked_prompts = {PROMPTS[0][0]}
        groups = sampler.sample(PROMPTS, cfg.generation, seed=1)
        first = [next(groups)[0] for _ in range(3)]
        assert sorted(first) == [1, 2, 3]
        stub.release.set()
        assert [i for i, _ in groups] == [0]


@pytest.mark.parametrize("failures", [[503, 502, 429], [0], [500]])
def test_a_server_that_fails_for_a_while_is_asked_again(
    policy: Path, tmp_path: Path, failures: list[int]
) -> None:
    stub = VLLMStub(policy)
    with engine(stub, policy, tmp_path) as (sampler, _, cfg):
        expected = draw(sampler, cfg)
        stub.failures = failures
        assert draw(sampler, cfg) == expected
        assert not stub.failures


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("under_way", [False, True])
def test_a_server_that_has_lost_the_weights_is_given_them_again(
    policy: Path, tmp_path: Path, rank: int, under_way: bool
) -> None:
    stub = VLLMStub(policy)
    with engine(stub, policy, tmp_path, rank, concurrency=1) as (sampler, model, cfg):
        change(model)
        sampler.sync_weights(model, 1)
        expected = draw(sampler, cfg)
        groups = sampler.sample(PROMPTS, cfg.generation, seed=1)
        stub.blocked_prompts = {PROMPTS[2][0]}
        samples = dict([next(groups)]) if under_way else {}
        stub.restart(503)  # for the waiting request, or the one before it
        stub.release.set()
        assert samples | dict(groups) == expected


def test_prompts_that_start_together_check_the_weights_once(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("vllm", "vllm_turns"):  # a busy machine may take longer than a second
        monkeypatch.setattr(f"trainer.rl.engines.{module}.RECENT_S", 100.0)
    stub = VLLMStub(policy)
    with engine(stub, policy, tmp_path, 1) as (sampler, _, cfg):
        prompts = [SeededPrompt(PROMPTS[0], (), 1.0, 4, seed) for seed in range(32)]

        async def complete_all() -> None:
            await asyncio.gather(
                *(sampler.complete(p, cfg.generation, with_logprobs=True) for p in prompts)
            )

        sampler._pool.servers[0].answered_at = float("-inf")  # after a pause
        stub.calls.clear()
        asyncio.run(complete_all())
        assert stub.calls["/v1/models"] == 1


def test_what_the_server_refuses_is_told_at_once(policy: Path, tmp_path: Path) -> None:
    stub = VLLMStub(policy)
    with engine(stub, policy, tmp_path) as (sampler, _, cfg):
        num_requests = len(stub.bodies)
        with pytest.raises(UserError, match="maximum context length is 64"):
            list(sampler.sample([[3] * 60], cfg.generation))
        assert len(stub.bodies) == num_requests + 1


def test_no_answer_in_time_is_an_error(policy: Path, tmp_path: Path) -> None:
    stub = VLLMStub(policy)
    with engine(stub, policy, tmp_path) as (sampler, _, cfg):
        sampler._pool.timeout_s = 0.3
        stub.blocked_prompts = {PROMPTS[0][0]}
        with pytest.raises(UserError, match=r"timeout_s = 0\.3"):
            draw(sampler, cfg)
        stub.release.set()


def test_another_model_than_the_policy_is_found_out(policy: Path, tmp_path: Path) -> None:
    other = save_policy(tmp_path / "other", TOKENIZER, initializer_range=0.5, seed=9)
    with pytest.raises(UserError, match="serves another model than the policy"):
        with engine(VLLMStub(other), policy, tmp_path, rank=4):
            pass


@pytest.mark.parametrize(
    ("stub_options", "rank", "vllm", "message"),
    [
        ({}, 0, {"model": "other"}, "serves \\['tiny'\\], not 'other'"),
        ({"mode": "raw_logprobs"}, 0, {}, "--logprobs-mode processed_logprobs"),
        ({"routes": ["dev"]}, 4, {}, "--enable-lora"),
        ({"routes": ["lora"]}, 0, {}, "VLLM_SERVER_DEV_MODE"),
    ],
)
def test_a_server_that_cannot_sample_for_a_run_is_told_before_weights_load(
    policy: Path, tmp_path: Path, stub_options: Any, rank: int, vllm: Any, message: str
) -> None:
    stub = VLLMStub(policy, **stub_options)
    with running_app(stub.app) as url:
        cfg = config(url, tmp_path / "no-such-policy", tmp_path, rank, **vllm)
        cfg = cfg.model_copy(update={"reward": cfg.reward.model_copy(update=ONLY_EOS)})
        with pytest.raises(UserError, match=message):
            train_translation([example("ab")], [], cfg)


ONLY_EOS = {"w_metricx": 0.0, "w_xcomet_span": 0.0, "no_eos_penalty": 1.0}


def test_a_wrong_key_and_a_dead_server_are_told(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with running_app(VLLMStub(policy).app) as url:
        with pytest.raises(UserError, match=r"401.*VLLM_API_KEY"):
            probe_server(config(url, policy, tmp_path).generation.vllm, adapters=False)
    with pytest.raises(UserError, match="cannot connect to"):
        away = config(f"http://127.0.0.1:{free_port()}", policy, tmp_path)
        probe_server(away.generation.vllm, adapters=False)


@pytest.mark.parametrize("rank", RANKS)
def test_a_whole_run_samples_and_evaluates_on_the_server(
    policy: Path, tmp_path: Path, rank: int
) -> None:
    stub = VLLMStub(policy)
    train = [example("abcd"[:n] + "ef", str(n)) for n in range(1, 5)]
    with running_app(stub.app) as url, running_service(FakeBackend("metricx")) as metricx:
        cfg = config(f"{url}/v1", policy, tmp_path / "run", rank, model=NAME)
        settings = cfg.model_dump(exclude_unset=True)
        settings["reward"] = {"metricx_urls": [metricx], "w_xcomet_span": 0.0}
        settings["rl"] = {"num_updates": 2, "batch_size": 4, "lr": 0.01}
        artifacts = train_translation(train, train[:2], TranslationConfig.model_validate(settings))
    lines = [
        json.loads(line) for line in (artifacts.run_dir / "log.jsonl").read_text().splitlines()
    ]
    assert [line["skipped"] for line in lines] == [False, False]
    for line in lines:
        assert 0 < line["sampler_gap_mean"] <= line["sampler_gap_max"] < 1e-4
        assert line["importance_weight_mean"] == pytest.approx(1, abs=1e-4)
        assert line["importance_capped_frac"] == 0
    greedy = [body for body in stub.bodies if body["temperature"] == 0]
    assert len(greedy) == 2 * 2  # held-out examples, before and after
    seeds = {body["seed"] for body in stub.bodies if body["temperature"] == 0.8}
    assert len(seeds) == 2 * 4
