"""GRPO by TRL with a reward for each token: MetricX for the completion, xCOMET's spans for tokens.

    python examples/trl_token_grpo.py --metricx-url http://127.0.0.1:8001 \
        --xcomet-url http://127.0.0.1:8002

The reward of a completion is 5 - MetricX; a token inside an error span gets span_weight times the
weight of the span's severity in addition. A completion that either service could not score has no
reward, and is left out of the update.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from scorekit.adapters.trl import reward_function
from scorekit.adapters.trl_tokens import SpanRewards
from scorekit.client import SyncScoringClient
from scorekit.errors import ScorekitError, UserError
from trainer.translation.data import chat_prompt, load_examples

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when transformers is imported
DEMO = Path(__file__).parents[1] / "demo"


def check_service(url: str, service: str) -> None:
    """Raise UserError if `url` is another service, ServiceUnreachable if nothing answers."""
    with SyncScoringClient(url, deadline_s=10) as client:
        actual = client.info().service
    if actual != service:
        raise UserError(f"{url} is a {actual} service, not {service}")


def prompt_rows(data: str, template: str) -> list[dict[str, Any]]:
    """Return a row for TRL of each source: one turn of the policy's chat template, and the
    source."""
    return [
        {
            "prompt": [{"role": "user", "content": chat_prompt(example, template)}],
            "src": example.src_text,
        }
        for example in load_examples(data)
    ]


def train(
    policy: Annotated[str, typer.Option(help="Folder or hub id.")] = str(DEMO / "models/policy"),
    data: Annotated[str, typer.Option(help="Sources: file, folder or hub id.")] = str(
        DEMO / "data/rl_prompts.jsonl"
    ),
    template: Annotated[str, typer.Option(help="Of scorekit/prompts.py, or a file.")] = "source",
    metricx_url: Annotated[str, typer.Option(envvar="METRICX_URL")] = "http://127.0.0.1:8001",
    xcomet_url: Annotated[str, typer.Option(envvar="XCOMET_URL")] = "http://127.0.0.1:8002",
    span_weight: Annotated[float, typer.Option(help="Of the spans beside MetricX.")] = 0.1,
    advantage_norm: Annotated[str, typer.Option(help="batch, group or grpo.")] = "batch",
    steps: Annotated[int, typer.Option(min=1)] = 24,
    sources: Annotated[int, typer.Option(min=1, help="Of a step.")] = 8,
    samples: Annotated[int, typer.Option(min=2, help="Of a source.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a completion.")] = 48,
    temperature: Annotated[float, typer.Option(min=0.01)] = 0.8,
    lr: Annotated[float, typer.Option(min=0)] = 1e-4,
    output: Annotated[Path, typer.Option(help="Folder for the policy.")] = Path("runs/trl_tokens"),
) -> None:
    """Train a policy by TRL with token advantages. The defaults suit the demo's policy."""
    check_service(metricx_url, "metricx")
    check_service(xcomet_url, "xcomet")

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    from scorekit.adapters.trl_tokens import TokenGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    metricx = reward_function(metricx_url, src_key="src", name="metricx")
    spans = SpanRewards(xcomet_url, tokenizer=tokenizer, weight=span_weight, name="xcomet")
    on_gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=sources * samples,
        num_generations=samples,
        max_completion_length=max_tokens,
        temperature=temperature,
        learning_rate=lr,
        reward_weights=[1.0, 0.0],  # xCOMET's score is logged; only its spans are a reward
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = TokenGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=[metricx, spans],
        args=config,
        train_dataset=Dataset.from_list(prompt_rows(data, template)),
        processing_class=tokenizer,
        advantage_norm=advantage_norm,
    )
    trainer.train()
    trainer.save_state()  # trainer_state.json holds what was logged
    trainer.save_model()


if __name__ == "__main__":
    try:
        typer.run(train)
    except ScorekitError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
