"""Compare the cost of an update with TRL's GRPOTrainer: same policy, prompts and machine.

The demo policy in float32 samples all sequences in one batch: TRL by transformers' generate(), the
trainer by its own continuous batch. No completion may end early (TRL passes min_new_tokens to
generate(), our sampler never chooses a stop id). The reward takes no time. There is no KL, no
entropy bonus, and the old log-probabilities are not computed again. So an update is one
generation, one forward and one backward pass over every sequence, and one optimizer step. Each run
is a separate process; its first steps are a warm-up and do not count.

    python -m bench.trl_step [--quick]
"""

from __future__ import annotations

import functools
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.common import ROOT, WORK, Measurement, in_own_process, run
from bench.sampling import peak_mib
from scorekit.schemas import Scored
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig, reward_output

POLICY = ROOT / "demo/models/policy"
PROMPTS = ROOT / "demo/data/rl_prompts.jsonl"
FOLDER = WORK / "trl_step"
TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Holds the sizes of a step and the number of runs.

    Runs alternate; each has `warm_up` and `steps` steps.
    """

    prompts: int = 32
    samples: int = 8
    tokens: int = 48
    warm_up: int = 1
    steps: int = 4
    runs: int = 3

    def __str__(self) -> str:
        return f"{self.prompts} prompts x {self.samples} samples x {self.tokens} tokens"


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    sizes = Sizes(4, 2, 8, 1, 2, 1) if quick else Sizes()
    runs_by_side = run_sides(sizes.runs, scorekit_side, trl_side, sizes)
    yield from compare_cost(sizes, runs_by_side, "steps_s")


def run_sides(
    num_runs: int, scorekit_side: Callable[..., Any], trl_side: Callable[..., Any], *args: Any
) -> dict[str, list[dict[str, Any]]]:
    """Run both sides alternately, each run in a process of its own, and return their results."""
    runs_by_side: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for _ in range(num_runs):
        for name, side in (("ours", scorekit_side), ("trl", trl_side)):
            runs_by_side[name].append(in_own_process(side, *args))
    return runs_by_side


def compare_cost(
    sizes: Any, runs_by_side: Mapping[str, list[dict[str, Any]]], seconds_key: str
) -> Iterator[Measurement]:
    """Yield the time and the memory of an update of both sides.

    sizes: a dataclass with a text for people.
    seconds_key: of a run's list of seconds.
    """
    seconds = {
        name: statistics.median(s for run_result in runs for s in run_result[seconds_key])
        for name, runs in runs_by_side.items()
    }
    memory = {
        name: max(run_result["peak_mib"] for run_result in runs)
        for name, runs in runs_by_side.items()
    }
    yield Measurement(
        f"update of {sizes}",
        seconds["ours"],
        "s",
        details=asdict(sizes) | {"runs": runs_by_side["ours"]},
    )
    yield Measurement(
        "  TRL's GRPOTrainer", seconds["trl"], "s", details={"runs": runs_by_side["trl"]}
    )
    yield Measurement(
        "  time of ours", seconds["ours"] / seconds["trl"], "times TRL's", at_most=1.05
    )
    yield Measurement("  peak memory of ours", memory["ours"], "MiB")
    yield Measurement("  TRL's", memory["trl"], "MiB")


class TextScorer:
    """A reward that costs nothing: a number computed from the text's length."""

    def score_batch(
        self, samples: Sequence[SampleForScoring], cfg: ScoringConfig | None = None
    ) -> RewardOutput:
        """Return the scores in the order of the samples."""
        return reward_output(
            [
                Scored.model_validate(
                    {
                        "id": None,
                        "ok": True,
                        "score": _score(sample.mt),
                        "tokens": 1,
                        "cached": False,
                        "truncated": {"src": False, "mt": False},
                        "mt_covered": len(sample.mt),
                    }
                )
                for sample in samples
            ]
        )


def _rewards(completions: list[Any], **_: Any) -> list[float | None]:
    return [_score(text) for text in completions]


def _score(text: str) -> float:
    return float(len(text) % 7)


def _full_length(model: Any, tokens: int) -> None:
    """Make every completion of this model as long as possible."""
    model.generate = functools.partial(model.generate, min_new_tokens=tokens)


def scorekit_side(sizes: Sizes) -> dict[str, Any]:
    """Run full updates of trainer.translation.train, including the files of the run."""

    from scorekit.config import load_config
    from trainer.runs.open import start_run
    from trainer.translation.config import TranslationConfig
    from trainer.translation.data import load_examples
    from trainer.translation.evaluation.evaluate import read_reports
    from trainer.translation.rewards.services import RewardClient
    from trainer.translation.train import open_trainer, workload_of

    shutil.rmtree(FOLDER, ignore_errors=True)
    settings = {
        "policy.path": POLICY,
        "generation.prompt_template": "source",
        "generation.max_new_tokens": sizes.tokens,
        "generation.temperature": TEMPERATURE,
        "generation.num_samples_per_prompt": sizes.samples,
        "generation.batch_size": sizes.prompts * sizes.samples,
        "reward.metricx_urls": "bench.trl_step:TextScorer",
        "reward.metricx_model_name": "null",
        "reward.metricx_tokenizer_name": "null",
        "reward.w_xcomet_span": 0,
        "rl.batch_size": sizes.prompts,
        "rl.num_updates": sizes.warm_up + sizes.steps,
        "rl.ppo_epochs": 1,
        "rl.kl_coef": 0,
        "rl.center_groups": "true",
        "misc.device": "cpu",
        "misc.run_dir": FOLDER,
    }
    cfg = load_config(
        TranslationConfig, None, [f"{key}={value}" for key, value in settings.items()]
    )
    examples = load_examples(str(PROMPTS), limit=sizes.prompts * cfg.rl.num_updates)
    ends: list[float] = []
    lines: list[dict[str, Any]] = []
    with start_run(cfg, read_reports, workload_of(cfg)) as start:
        trainer = open_trainer(start, RewardClient(cfg.reward), examples, {})
        sampler: Any = trainer.sampler
        sampler.banned_token_ids.extend(sampler.stops)  # no completion ends early
        ends.append(time.perf_counter())
        for update in range(1, cfg.rl.num_updates + 1):
            line = trainer.step(update)
            assert line is not None
            lines.append(line)
            ends.append(time.perf_counter())
    assert all(line["completion_length_mean"] == sizes.tokens for line in lines)
    parts = [{k: v for k, v in line.items() if k.endswith("_s")} for line in lines]
    return _as_result(ends, sizes) | {"parts": parts[sizes.warm_up :]}


def trl_side(sizes: Sizes) -> dict[str, Any]:
    """Run the same steps with TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from trainer.translation.data import load_examples
    from trainer.translation.prompting import build_prompt

    tokenizer = AutoTokenizer.from_pretrained(POLICY, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    steps = sizes.warm_up + sizes.steps
    examples = load_examples(str(PROMPTS), limit=sizes.prompts * steps)
    prompts = [build_prompt(example, tokenizer, "source")[0] for example in examples]
    ends = [time.perf_counter()]
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, *_: Any, **options: Any) -> None:
            lengths.extend(v for k, v in options["logs"].items() if k == "completions/mean_length")

    sequences = sizes.prompts * sizes.samples
    args = GRPOConfig(
        output_dir=str(FOLDER / "trl"),
        use_cpu=True,
        bf16=False,
        seed=0,
        max_steps=steps,
        per_device_train_batch_size=sequences,
        gradient_accumulation_steps=1,
        num_generations=sizes.samples,
        max_completion_length=sizes.tokens,
        temperature=TEMPERATURE,
        beta=0.0,
        num_iterations=1,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=args,
        processing_class=tokenizer,
        callbacks=[Clock()],
        reward_funcs=_rewards,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    )
    _full_length(trainer.model, sizes.tokens)
    trainer.train()
    assert lengths and all(length == sizes.tokens for length in lengths), lengths
    return _as_result(ends, sizes)


def _as_result(ends: Sequence[float], sizes: Sizes) -> dict[str, Any]:
    steps = [end - start for start, end in itertools.pairwise(ends)]
    return {"steps_s": steps[sizes.warm_up :], "peak_mib": peak_mib()}


if __name__ == "__main__":
    run("trl_step", __doc__, questions)
