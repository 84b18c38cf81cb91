"""Parts of tests of TRL's GRPOTrainer with token advantages: services, and a trainer that is kept
small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from scorekit.adapters.trl import reward_function
from scorekit.adapters.trl_tokens import SpanRewards
from scorekit.schemas import TranslationSample
from scorekit.server.backend import Outcome
from scorekit.server.fake import FakeBackend, fake_score

DEMO = Path(__file__).parents[4] / "demo"
#: Settings of a client that gives up within seconds.
IMPATIENT = {"timeout_s": 2.0, "deadline_s": 6.0}


class MarkingBackend(FakeBackend):
    """Stands in for xCOMET: marks overlapping spans in every text, and fails for some texts.

    fails: share of the texts that get a score which is not finite.
    """

    def __init__(self, fails: float = 0.0) -> None:
        super().__init__("xcomet")
        self.fails = fails

    def _outcome(self, sample: TranslationSample) -> Outcome:
        score, size = fake_score(sample, 1.0), len(sample.mt)
        if score < self.fails:
            return {"score": float("nan")}
        spans: list[dict[str, Any]] = [
            {"start": size // 4, "end": size // 2, "severity": "MAJOR", "confidence": 0.5},
            {"start": size // 3, "end": size, "severity": "MINOR", "confidence": 0.5},
        ]
        return {"score": score, "error_spans": [s for s in spans if s["start"] < s["end"]]}


def prompt_rows(num_rows: int) -> list[dict[str, Any]]:
    """Return rows for TRL with sources of the demo."""
    lines = (DEMO / "data/rl_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    sources = [json.loads(line)["src_text"] for line in lines[:num_rows]]
    return [{"prompt": [{"role": "user", "content": src}], "src": src} for src in sources]


def make_trainer(
    folder: Path,
    reward_funcs: list[Any],
    arguments: dict[str, Any] | None = None,
    num_rows: int = 4,
    has_tokens: bool = True,
    **options: Any,
) -> Any:
    """Return a TokenGRPOTrainer of the demo's policy in float32 on the CPU.

    arguments: of GRPOConfig.
    has_tokens: if False, return TRL's own GRPOTrainer.
    options: of the trainer.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from scorekit.adapters.trl_tokens import TokenGRPOTrainer

    values: dict[str, Any] = {
        "max_steps": 1,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 12,
        "temperature": 0.8,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    config = GRPOConfig(output_dir=str(folder), **(values | (arguments or {})))
    policy = str(DEMO / "models/policy")
    return (TokenGRPOTrainer if has_tokens else GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=Dataset.from_list(prompt_rows(num_rows)),
        processing_class=AutoTokenizer.from_pretrained(policy),
        **options,
    )


def reward_funcs(metricx_url: str, xcomet_url: str, **settings: Any) -> list[Any]:
    """Return a reward function for MetricX and one for spans, with the demo's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(DEMO / "models/policy"))
    spans = SpanRewards(xcomet_url, tokenizer=tokenizer, src_key="src", name="xcomet", **settings)
    timeouts = {key: settings[key] for key in IMPATIENT if key in settings}
    return [reward_function(metricx_url, src_key="src", name="metricx", **timeouts), spans]
