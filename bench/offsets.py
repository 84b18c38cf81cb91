"""Measure how long it takes to give each token of a batch its span reward.

The batch has 512 completions of 512 tokens, cut from the Korean side of demo/data/pydocs.jsonl,
with 5 error spans each. Measured are `compute_token_char_offsets` and `spans_to_token_rewards`
together, with the demo policy's tokenizer (sentencepiece with byte fallback) and with a byte-level
BPE trained on the same text. Rare characters are inserted, so that both tokenizers have tokens that
are parts of a character. The unit is seconds of processor time, because all work is done by one
thread.

    python -m bench.offsets [--quick]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.common import ROOT, Measurement, run
from demo.madlad_shard import documents
from scorekit.credit.offsets import compute_token_char_offsets
from scorekit.credit.spans import spans_to_token_rewards
from scorekit.schemas import ErrorSpan, Severity
from trainer.translation.rewards.config import RewardConfig

TOKENS = 512
SPANS = 5
SEVERITIES: tuple[Severity, ...] = ("MINOR", "MAJOR", "CRITICAL")
RARE = "龘𠮷ꙮ🦜쀍"  # in no vocabulary of the two


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    count = 16 if quick else 512
    text = "\n".join(documents("ko"))
    for name, tokenizer in (
        ("sentencepiece, byte fallback", _demo_tokenizer()),
        ("byte-level BPE", _byte_level(text)),
    ):
        completions = _completions(tokenizer, text, count)
        spans = [_spans(tokenizer, ids, seed) for seed, ids in enumerate(completions)]
        credit(tokenizer, completions[:8], spans[:8])  # what the tokenizer keeps is kept
        runs = [credit(tokenizer, completions, spans) for _ in range(5)]
        both = statistics.median(a + b for a, b in runs)
        yield Measurement(
            f"token rewards of {count} x {TOKENS} tokens, {name}",
            both,
            "s",
            at_most=0.5,
            details={
                "offsets_s": statistics.median(a for a, _ in runs),
                "spans_s": statistics.median(b for _, b in runs),
                "runs_s": [a + b for a, b in runs],
                "vocabulary": len(tokenizer),
                "characters": sum(len(tokenizer.decode(ids)) for ids in completions),
            },
        )


def credit(
    tokenizer: Any, completions: list[list[int]], spans: list[tuple[str, list[ErrorSpan]]]
) -> tuple[float, float]:
    """Return the processor seconds of the offsets, and of the token rewards."""
    offsets: list[list[tuple[int, int]]] = []
    weights = RewardConfig().severity_weights.model_dump()

    def find() -> None:
        offsets.extend(compute_token_char_offsets(tokenizer, ids) for ids in completions)

    def reward() -> None:
        for of_completion, (text, errors) in zip(offsets, spans, strict=True):
            spans_to_token_rewards(text, of_completion, errors, weights)

    return _cpu_seconds(find), _cpu_seconds(reward)


def _cpu_seconds(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _completions(tokenizer: Any, text: str, count: int) -> list[list[int]]:
    """Return completions of the text with a rare character after every 200 characters.

    Each completion starts at another position of the text.
    """
    completions = []
    for n in range(count):
        start = n * 997 % (len(text) - 2200)
        segment = text[start : start + 2200]
        rare = "".join(segment[i : i + 200] + RARE[n % len(RARE)] for i in range(0, 2200, 200))
        ids = tokenizer(rare, add_special_tokens=False)["input_ids"][: TOKENS - 1]
        completions.append([*ids, tokenizer.eos_token_id])
    return completions


def _spans(tokenizer: Any, ids: list[int], seed: int) -> tuple[str, list[ErrorSpan]]:
    draw = random.Random(seed)
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    spans = []
    for _ in range(SPANS):
        start = draw.randrange(len(text) - 40)
        end = start + draw.randint(2, 40)
        spans.append(
            ErrorSpan(
                start=start,
                end=end,
                severity=draw.choice(SEVERITIES),
                confidence=0.5,
                text=text[start:end],
            )
        )
    return text, spans


def _demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(ROOT / "demo/models/policy"))


def _byte_level(text: str) -> Any:
    """Return a byte-level tokenizer like those of Qwen and GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4_000,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # the start of the text says enough, and takes a tenth of the time
    tokenizer.train_from_iterator(text[:50_000].split("\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


if __name__ == "__main__":
    run("offsets", __doc__, questions)
