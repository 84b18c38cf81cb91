"""A sampler on several stand-ins for vLLM servers, and a check of what it returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from testing.servers import running_app
from tests.kits.trainer.runs import letter_tokenizer, save_policy
from tests.kits.vllm_stub import KEY, NAME, VLLMStub
from trainer.rl.config import LoraConfig, PolicyConfig, SamplingConfig, VLLMConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import probe_server
from trainer.rl.engines.vllm import VLLMSampler
from trainer.rl.engines.vllm_protocol import FAULT_CAUSES
from trainer.rl.forward import completion_logprobs
from trainer.rl.policy import load_policy, stop_token_ids
from trainer.rl.sampler import SampledCompletion, SeededPrompt

#: Ways to train: adapters; all weights, on servers that label tokens; all weights, on others.
MODES = ("adapters", "labels", "drained")
#: Stats of a sampler whose servers gave only completions.
NO_FAULTS = {"sampler_faults": 0, **{f"sampler_faults_{cause}": 0 for cause in FAULT_CAUSES}}
GEN_CFG = SamplingConfig(max_new_tokens=6, temperature=0.8, num_samples_per_prompt=1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small policy."""
    folder = tmp_path_factory.mktemp("policy")
    return save_policy(folder, letter_tokenizer(), initializer_range=0.5)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the key of the stand-ins."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def make_stubs(policy: Path, mode: str, count: int = 2) -> list[VLLMStub]:
    routes = ("lora", "dev", "ids") if mode == "labels" else ("lora", "dev")
    return [VLLMStub(policy, routes=routes) for _ in range(count)]


@dataclass
class ServedRun:
    """A model whose weights change, and its sampler.

    models: copies, one for each version.
    oracle: computes what a server samples.
    """

    sampler: VLLMSampler
    model: nn.Module
    urls: list[str]
    oracle: VLLMStub
    models: list[nn.Module] = field(default_factory=list)

    def sync(self) -> None:
        """Send the model's weights as the next version."""
        self.models.append(copy.deepcopy(self.model))
        self.sampler.sync_weights(self.model, len(self.models) - 1)

    def update(self) -> None:
        """Move all trainable weights far from those of version 0, and send them.

        They do not grow with the versions: rounding of large logits would be seen as other weights.
        """
        torch.manual_seed(len(self.models))
        first = self.models[0].parameters()
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), first, strict=True):
                if parameter.requires_grad:
                    parameter.copy_(start + torch.randn_like(parameter) * 0.5)
        self.sync()

    def check(self, prompt: SeededPrompt, completion: SampledCompletion) -> None:
        """Check each token: its log-probability is that of the weights of its version.

        Tokens of one version throughout are those of the prompt's own seed, too.
        """
        ids, versions = completion.token_ids, completion.versions
        assert versions is not None and completion.logprobs is not None
        for version in set(versions):
            with torch.no_grad():
                rows, _, _ = completion_logprobs(
                    self.models[version], [list(prompt.ids)], [ids], prompt.temperature, 0
                )
            chosen = torch.tensor([v == version for v in versions])
            torch.testing.assert_close(
                torch.tensor(completion.logprobs)[chosen], rows[0][chosen], atol=1e-4, rtol=1e-4
            )
        if len(set(versions)) == 1:
            self._check_seed(prompt, ids, versions[0])

    @torch.no_grad()
    def _check_seed(self, prompt: SeededPrompt, ids: list[int], version: int) -> None:
        """Check that each id is what the prompt's seed draws after those before it.

        This is `expected_ids` in one pass of the model instead of one for each id.
        """
        assert ids and (len(ids) == prompt.max_new_tokens or ids[-1] in self.sampler.stops)
        assert not set(ids[:-1]) & set(self.sampler.stops)
        inputs = torch.tensor([[*prompt.ids, *ids[:-1]]])
        logits = self.models[version](inputs).logits[0, len(prompt.ids) - 1 :].double()
        generator = torch.Generator().manual_seed(prompt.seed)
        chances = (logits / prompt.temperature).softmax(-1)
        assert ids == [int(torch.multinomial(row, 1, generator=generator)) for row in chances]

    def expected_ids(self, prompt: SeededPrompt, version: int) -> list[int]:
        """Return what a server samples for this prompt with these weights."""
        body = {
            "prompt": list(prompt.ids),
            "max_tokens": prompt.max_new_tokens,
            "temperature": prompt.temperature,
            "top_k": 0,
            "seed": prompt.seed,
            "logprobs": None,
            "stop_token_ids": self.sampler.stops,
        }
        self.oracle.model = self.models[version]
        ids: list[int] = self.oracle._choice(None, body, 0)["token_ids"]
        return ids


@contextmanager
def serving(
    stubs: Sequence[VLLMStub], policy: Path, run_dir: Path, mode: str, **vllm: Any
) -> Iterator[ServedRun]:
    """Yield a run on these servers, which have version 0.

    vllm: keys of its config; with a `url` servers are not checked before.
    """
    with ExitStack() as stack:
        urls = [stack.enter_context(running_app(stub.app)) for stub in stubs]
        cfg = VLLMConfig.model_validate({"url": urls, "timeout_s": 60.0} | vllm)
        is_adapter = mode == "adapters"
        policy_cfg = PolicyConfig(path=str(policy), lora=LoraConfig(r=4 if is_adapter else 0))
        assert "url" in vllm or probe_server(cfg, adapters=is_adapter) == NAME
        model, tokenizer = load_policy(policy_cfg, torch.device("cpu"))
        sampler = VLLMSampler(
            cfg,
            NAME,
            stop_token_ids(model, tokenizer),
            DistributedContext(torch.device("cpu")),
            adapters=is_adapter,
            run_dir=run_dir,
        )
        with closing(sampler):
            run = ServedRun(sampler, model.eval(), urls, VLLMStub(policy))
            run.sync()
            yield run


def seeded(ids: Sequence[int], seed: int, affinity: str = "") -> SeededPrompt:
    return SeededPrompt(list(ids), (), 0.8, 6, seed, affinity)
