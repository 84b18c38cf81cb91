"""Sample and ask for rewards by OpenRLHF's own code, in the environment of `make env-verl`.

.venv-verl/bin/python -m tests.kits.trainer.openrlhf_probe CASE.json

CASE.json: {"url", "policy", "sources", "samples"}. It prints one JSON object: the completions, and
what OpenRLHF makes of their rewards. OpenRLHF's code is unchanged from the prompt to the
advantages: its executor asks `--reward.remote_url`, its experiences hold the answers, and its maker
shapes them. The policy is sampled by transformers in place of vLLM. What needs a GPU (vLLM,
DeepSpeed, flash attention) is only imported there, and never called: stand-ins are imported here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 12


class PolicyEngine:
    """Stands in for OpenRLHF's vLLM actor: samples a policy of transformers."""

    def __init__(self, policy: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)

    async def generate(self, prompt_ids: list[int], params: Any, **_: Any) -> Any:
        """Return the output of one prompt, as vLLM forms it."""
        ids = torch.tensor([prompt_ids])
        answer = self._model.generate(
            ids, do_sample=True, temperature=params.temperature, max_new_tokens=params.max_tokens
        )[0, len(prompt_ids) :].tolist()
        reason = "length" if len(answer) == params.max_tokens else "stop"
        output = SimpleNamespace(token_ids=answer, finish_reason=reason, logprobs=None)
        return SimpleNamespace(outputs=[output])


#: What OpenRLHF imports beside its own code for a GPU.
ON_GPUS = (
    "vllm",
    "vllm.inputs",
    "vllm.utils",
    "deepspeed",
    "flash_attn.bert_padding",
    "flash_attn.utils.distributed",
    "openrlhf.utils.deepspeed",
)


def import_openrlhf() -> tuple[Any, Any, Any]:
    """Return OpenRLHF's classes that ask for rewards, hold them, and shape them."""
    sys.modules.update((name, MagicMock()) for name in ON_GPUS)
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    return SingleTurnAgentExecutor, SamplesGenerator, RemoteExperienceMaker


def main() -> None:
    """Print what the trainer makes of the rewards."""
    case = json.loads(Path(sys.argv[1]).read_text())
    executor_class, generator_class, maker_class = import_openrlhf()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(case["policy"])
    engine, executor = PolicyEngine(case["policy"]), executor_class([case["url"]])
    params = SimpleNamespace(max_tokens=MAX_NEW_TOKENS, temperature=0.8, logprobs=None)
    sources = [source for source in case["sources"] for _ in range(case["samples"])]

    async def sample(source: str) -> Any:
        chat = [{"role": "user", "content": source}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        label = json.dumps({"src": source})
        return await executor.execute(prompt, label, params, 256, tokenizer, engine)

    async def sample_all() -> list[Any]:
        return await asyncio.gather(*map(sample, sources))

    responses = asyncio.run(sample_all())
    strategy = SimpleNamespace(args=_arguments(len(sources), case["samples"]))
    generator = generator_class(strategy, None, None, tokenizer, [])
    experiences = [generator._process_response_into_experience(r, max_len=256) for r in responses]
    kl = SimpleNamespace(value=0.0)
    maker = maker_class(None, None, None, None, kl, strategy, tokenizer)
    (batch,) = maker.split_rollout_samples(experiences)
    batch.kl = torch.zeros(batch.action_mask.shape)  # that of a run without a reference model
    (shaped,) = maker.compute_advantages_and_returns([batch])
    completions = [
        tokenizer.decode(
            response["observation_tokens"][response["action_ranges"][0][0] :],
            skip_special_tokens=True,
        )
        for response in responses
    ]
    answer = {
        "completions": completions,
        "rewards": shaped.rewards.tolist(),
        "logs": {name: shaped.info[name].tolist() for name in responses[0]["extra_logs"]},
        "advantages": [
            row[mask.bool()].tolist()
            for row, mask in zip(shaped.advantages, shaped.action_mask, strict=True)
        ],
    }
    print(json.dumps(answer))


def _arguments(batch: int, samples: int) -> Any:
    """Return the arguments of OpenRLHF's command that its maker reads: GRPO's advantages."""
    advantage = SimpleNamespace(estimator="group_norm", gamma=1.0)
    return SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=samples, micro_batch_size=batch),
        train=SimpleNamespace(dynamic_batch_enable=False),
        algo=SimpleNamespace(advantage=advantage),
        reward=SimpleNamespace(clip_range=(-10.0, 10.0)),
    )


if __name__ == "__main__":
    main()
