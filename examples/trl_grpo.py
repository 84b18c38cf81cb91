"""GRPO by TRL, rewarded by the scoring services.

    python examples/trl_grpo.py --metricx-url http://127.0.0.1:8001 --xcomet-url http://127.0.0.1:8002
    python examples/trl_grpo.py --definition examples/reward.yaml

The reward of a completion is 5 - MetricX + xcomet_weight * xCOMET, or what the definition says. One
that a service could not score has no reward: TRL leaves it out of its group's mean, and out of the
update.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from scorekit.adapters.trl import reward_function
from scorekit.client import SyncScoringClient
from scorekit.errors import ScorekitError, UserError
from scorekit.rewards import SyncCompositeReward
from trainer.translation.data import chat_prompt, load_examples

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when transformers is imported
DEMO = Path(__file__).parents[1] / "demo"
Reward = Callable[..., list[float | None]]


def sum_of_rewards(metricx: Reward, xcomet: Reward, xcomet_weight: float) -> Reward:
    """One function of two. TRL takes a list of functions, too, but counts what one of them could
    not score as 0 where the other could; MetricX's rewards are mostly below 0."""

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        both = [
            metricx(prompts, completions, **columns),
            xcomet(prompts, completions, **columns),
        ]
        totals = [
            None if a is None or b is None else a + xcomet_weight * b
            for a, b in zip(*both, strict=True)
        ]
        log = columns["log_metric"]
        for name, values in zip(("metricx_reward", "xcomet_score"), both, strict=True):
            known = [value for value in values if value is not None]
            if known:
                log(name, sum(known) / len(known))
        log("scored", sum(total is not None for total in totals) / len(totals))
        return totals

    return reward


def check_service(url: str, service: str) -> None:
    """Raises UserError where `url` is another service, ServiceUnreachable where nothing answers."""
    with SyncScoringClient(url, deadline_s=10) as client:
        actual = client.info().service
    if actual != service:
        raise UserError(f"{url} is a {actual} service, not {service}")


def rewards_of_services(metricx_url: str, xcomet_url: str, xcomet_weight: float) -> Reward:
    """Return the sum of two services' rewards, which are checked now."""
    check_service(metricx_url, "metricx")
    check_service(xcomet_url, "xcomet")
    return sum_of_rewards(
        reward_function(metricx_url, src_key="src"),
        reward_function(xcomet_url, src_key="src"),
        xcomet_weight,
    )


def composite_rewards(definition: Path) -> Reward:
    """Return the rewards of a definition, whose services are checked now."""
    with SyncCompositeReward(definition) as reward:
        reward.check(wait_s=10)
    return reward_function(definition=definition, src_key="src", name="composite")


def prompt_rows(data: str, template: str) -> list[dict[str, Any]]:
    """A row for TRL of each source: one turn of the policy's chat template, and the source."""
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
    xcomet_weight: Annotated[float, typer.Option(help="Of xCOMET beside MetricX.")] = 10.0,
    definition: Annotated[
        Path | None,
        typer.Option(help="YAML of a composite reward, in place of the three options before."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = 24,
    sources: Annotated[int, typer.Option(min=1, help="Of a step.")] = 8,
    samples: Annotated[int, typer.Option(min=2, help="Of a source.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a completion.")] = 48,
    temperature: Annotated[float, typer.Option(min=0.01)] = 0.8,
    lr: Annotated[float, typer.Option(min=0)] = 1e-4,
    output: Annotated[Path, typer.Option(help="Folder for the policy.")] = Path("runs/trl_grpo"),
) -> None:
    """Train a policy by TRL's GRPOTrainer. The defaults suit the demo's policy."""
    if definition is None:
        reward = rewards_of_services(metricx_url, xcomet_url, xcomet_weight)
    else:
        reward = composite_rewards(definition)
    rows = prompt_rows(data, template)

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=sources * samples,
        num_generations=samples,
        max_completion_length=max_tokens,
        temperature=temperature,
        learning_rate=lr,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(policy),
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
