"""Test the vLLM engine with images against a stand-in with a real tiny Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scorekit.errors import UserError
from testing.servers import running_app
from tests.kits.trainer.images import IMAGE, NEVER, PAD, PROCESSOR, image_ids, noise_image, tiny
from tests.kits.trainer.runs import letter_tokenizer
from tests.kits.vllm_stub import KEY, VLLMStub
from trainer.rl.config import PolicyConfig, SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.forward import completion_logprobs
from trainer.rl.policy import load_policy
from trainer.rl.sampler import Sampler

CPU = torch.device("cpu")
SHOWN = [[noise_image(16, 8, 0), noise_image(8, 8, 1)], [], [noise_image(8, 16, 2)]]
PROMPTS = [
    [5, 6, *image_ids(SHOWN[0][0].grid), 7, *image_ids(SHOWN[0][1].grid), 8],
    [9, 10, 11],
    [12, *image_ids(SHOWN[2][0].grid), 13],
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny("qwen2_5_vl").float().save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def sampling(url: str, **changes: Any) -> SamplingConfig:
    settings = {"max_new_tokens": 6, "num_samples_per_prompt": 2, "temperature": 0.8}
    return SamplingConfig.model_validate(
        {**settings, "engine": "vllm", "vllm": {"url": url, "timeout_s": 30.0}, **changes}
    )


@contextmanager
def engine(
    stub: VLLMStub, policy: Path, run_dir: Path
) -> Iterator[tuple[Sampler, nn.Module, SamplingConfig]]:
    """Yield the sampler on the stub server, with the model's weights."""
    with running_app(stub.app) as url:
        cfg = sampling(url)
        served = probe_engine(cfg, adapters=False, images=True)
        model, tokenizer = load_policy(PolicyConfig(path=str(policy)), CPU)
        with closing(
            open_sampler(
                cfg,
                served,
                model,
                tokenizer,
                DistributedContext(CPU),
                adapters=False,
                run_dir=run_dir,
                banned_token_ids=NEVER,
            )
        ) as sampler:
            sampler.sync_weights(model, 0)
            yield sampler, model, cfg


def test_episodes_go_on_behind_images_as_in_this_process(policy: Path, tmp_path: Path) -> None:
    stub = VLLMStub(policy, routes=("dev", "images"), processor=PROCESSOR)
    with engine(stub, policy, tmp_path) as (sampler, model, cfg):
        local_sampler = GenerateSampler(model, letter_tokenizer(), banned_token_ids=NEVER)
        greedy = cfg.model_copy(update={"temperature": 0.0, "num_samples_per_prompt": 1})
        so_far, images_by_prompt = (
            [list(prompt) for prompt in PROMPTS],
            [list(row) for row in SHOWN],
        )
        for turn in range(2):
            options = {"images": images_by_prompt, "with_logprobs": False}
            completions = dict(sampler.sample(so_far, greedy, **options))
            assert completions == dict(local_sampler.sample(so_far, greedy, **options))
            new = noise_image(8, 8, 10 + turn)
            for i, (completion,) in completions.items():
                so_far[i] += [*completion.token_ids, *image_ids(new.grid), 14]
                images_by_prompt[i].append(new)
        samples = dict(sampler.sample(so_far, cfg, images=images_by_prompt, seed=1))
        pairs = [(i, sample) for i, group in samples.items() for sample in group]
        with torch.no_grad():
            expected, _, mask = completion_logprobs(
                model,
                [so_far[i] for i, _ in pairs],
                [sample.token_ids for _, sample in pairs],
                0.8,
                PAD,
                images=[images_by_prompt[i] for i, _ in pairs],
                banned_token_ids=NEVER,
            )
    logprobs = torch.tensor([value for _, sample in pairs for value in sample.logprobs or ()])
    torch.testing.assert_close(logprobs, expected[mask], atol=1e-4, rtol=1e-4)
    assert not {i for _, sample in pairs for i in sample.token_ids} & set(NEVER)
    sent = [body for body in stub.bodies if "content_parts" in body]
    assert all(body["token_ids"].count(IMAGE) == len(body["content_parts"]) for body in sent)
    texts = [body for body in stub.bodies if body.get("token_ids") == PROMPTS[1]]
    assert texts and not any("content_parts" in body for body in texts)


def test_a_server_that_reads_images_as_other_ids_is_told(policy: Path, tmp_path: Path) -> None:
    """Check that a server that resizes the images it gets is reported."""

    def halved(images: Any, **options: Any) -> Any:
        small = [image.resize((max(8, image.width // 2), image.height)) for image in images]
        return PROCESSOR(images=small, **options)

    stub = VLLMStub(policy, routes=("dev", "images"), processor=halved)
    with engine(stub, policy, tmp_path) as (sampler, _, cfg):
        with pytest.raises(
            UserError, match=r"reads a prompt with images as 5 ids, the trainer as 6"
        ):
            list(sampler.sample(PROMPTS[2:], cfg, images=SHOWN[2:]))


def test_a_server_that_takes_no_images_is_told_before_anything_is_loaded(policy: Path) -> None:
    with running_app(VLLMStub(policy).app) as url:
        assert probe_engine(sampling(url), adapters=False) is not None
        with pytest.raises(UserError, match="Start it with --enable-scale-out"):
            probe_engine(sampling(url), adapters=False, images=True)
