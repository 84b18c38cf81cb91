"""Compare the reward model's service with transformers in the caller's process.

Same short conversations, same checkpoint, float32, one thread for the model; no sample is sent
twice. The sides run in turn, and each number is the ratio of the medians, of seconds and of
processor seconds: against a loop of single samples, and against the pipeline of text
classification with batches of 16, in which conversations are texts already. Two models: random
weights in Llama's shape (8 layers of 256), whose tokenizer splits a conversation into some 70
tokens; and the demo's reward model (2 layers), with some 20.

    python -m bench.reward_model.service [--quick]
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from bench.common import WORK, Measurement, compare, run, service
from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.schemas import Scored
from testing.checkpoints.reward import make_reward_model
from testing.pairs import read_pairs

DEMO = Path(__file__).parents[2] / "demo/models/reward"
SAMPLES, CALLERS, REPEATS = 96, 200, 3


class Fresh:
    """Returns the demo's pairs as conversations, each time with another number in front."""

    def __init__(self, samples: int) -> None:
        self._pairs = read_pairs(samples)
        self._turn = count(100)

    def __call__(self) -> list[list[dict[str, str]]]:
        """Return the next conversations."""
        turn = next(self._turn)
        return [
            [
                {"role": "user", "content": f"{turn} {pair.src}"},
                {"role": "assistant", "content": pair.mt},
            ]
            for pair in self._pairs
        ]


class InProcess:
    """Scores with transformers as most users do."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        self.model.train(False)
        self.pipe = pipeline("text-classification", self.model, tokenizer=self.tokenizer)

    def one_by_one(self, chats: Sequence[Any]) -> list[float]:
        """Return the scores of a loop."""
        import torch

        scores = []
        for chat in chats:
            inputs: Any = self.tokenizer.apply_chat_template(
                chat, return_tensors="pt", return_dict=True
            )
            with torch.inference_mode():
                scores.append(self.model(**inputs).logits[0, 0].item())
        return scores

    def in_batches(self, chats: Sequence[Any]) -> list[float]:
        """Return the scores of the pipeline, in batches of 16."""
        texts: list[Any] = [
            self.tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats
        ]
        options = {"function_to_apply": "none", "batch_size": 16, "add_special_tokens": False}
        return [row["score"] for row in self.pipe(texts, **options)]


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    folder = WORK / "models/reward-llama"
    if not (folder / "model.safetensors").exists():
        make_reward_model(folder, hidden=256, layers=8, max_length=512)
    yield from of_model("8 layers of 256", folder, quick)
    yield from of_model("the demo's", DEMO, quick)


def of_model(label: str, folder: Path, quick: bool) -> Iterator[Measurement]:
    """Yield the measurements of a model."""
    chats, baseline = Fresh(32 if quick else SAMPLES), InProcess(str(folder))
    of_callers = Fresh(CALLERS)
    repeats = 1 if quick else REPEATS
    flags = ("--model", str(folder), "--threads", "1", "--cache", "memory", "--device", "cpu")
    with service("services.reward_model", *flags) as (pid, url), SyncScoringClient(url) as client:
        seconds = ProcessorSeconds(pid)

        def score() -> list[float]:
            results = client.score([{"messages": chat} for chat in chats()])
            return [result.score for result in results if result.ok]

        async def ask_each() -> None:
            async with ScoringClient(url, max_in_flight=CALLERS) as callers:
                await callers.limits()
                samples = [{"messages": chat} for chat in of_callers()]
                await asyncio.gather(*(callers.score([sample]) for sample in samples))

        score(), baseline.one_by_one(chats()[:8]), baseline.in_batches(chats()[:32])
        read = client.score([{"messages": chat} for chat in chats()])
        tokens = [result.tokens for result in read if isinstance(result, Scored)]
        length = {"tokens_of_a_conversation": statistics.mean(tokens)}
        for name, candidate, other, target in (
            ("a loop of single samples", score, lambda: baseline.one_by_one(chats()), 3.0),
            ("pipeline(batch_size=16)", score, lambda: baseline.in_batches(chats()), 1.3),
            (
                f"the loop: {CALLERS} callers of one sample each",
                lambda: asyncio.run(ask_each()),
                lambda: baseline.one_by_one(of_callers()),
                None,
            ),
        ):
            timing = compare(
                seconds.counted("ours", candidate), seconds.counted("other", other), repeats
            )
            yield Measurement(
                f"reward model over HTTP ({label}), short conversations, against {name}",
                timing["times_faster"],
                "times its rate",
                at_least=target,
                details=timing | length,
            )
            yield Measurement(
                "  the same in processor seconds, those of service and client together",
                seconds.ratio(),
                "times fewer",
                details=seconds.take(),
            )
        same = chats()
        results = client.score([{"messages": chat} for chat in same])
        expected = baseline.one_by_one(same)
        difference = max(abs(r.score - e) for r, e in zip(results, expected, strict=True) if r.ok)
        yield Measurement("  largest difference of a score", difference, "", at_most=1e-4)


class ProcessorSeconds:
    """Counts the processor seconds of runs, by this process and that of the service. On a busy
    machine they differ less than the seconds of a clock: a loop that computes without a pause is
    held back more than a process that waits."""

    def __init__(self, pid: int) -> None:
        self._service = psutil.Process(pid)
        self._seconds: dict[str, list[float]] = {"ours": [], "other": []}

    def counted(self, side: str, run: Callable[[], Any]) -> Callable[[], None]:
        """Return a function that runs and counts."""

        def run_and_count() -> None:
            before = self._now()
            run()
            self._seconds[side].append(self._now() - before)

        return run_and_count

    def ratio(self) -> float:
        """Return how many times fewer seconds our side takes: the ratio of the medians."""
        return statistics.median(self._seconds["other"]) / statistics.median(self._seconds["ours"])

    def take(self) -> dict[str, list[float]]:
        """Return the seconds of each run so far, and forget them."""
        seconds, self._seconds = self._seconds, {"ours": [], "other": []}
        return seconds

    def _now(self) -> float:
        times = self._service.cpu_times()
        return time.process_time() + times.user + times.system


if __name__ == "__main__":
    run("reward_model", __doc__, questions)
