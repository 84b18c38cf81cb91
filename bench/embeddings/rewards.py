"""Compare the cost of the five role-play rewards with a plain `SentenceTransformer.encode`.

Both sides get the same texts, and `encode` runs in the caller's process. A batch is one update of
configs/roleplay/seed.yaml as TRL passes it: 16 prompts, 4 replies each. The reward functions run
one after another, the embedder is a separate process; `encode` gets the distinct texts of the
batch. Same checkpoint as bench/embeddings/service.py, one thread each; no text is sent twice.

    python -m bench.embeddings.rewards [--quick]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from bench.common import ROOT, WORK, Measurement, compare, run, service, timed
from bench.embeddings.service import SHAPE, Encode
from scorekit.client.embeddings import Embeddings
from testing.checkpoints.embedder import make_folder
from trainer.roleplay.calibration import Anchors, Calibration
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import REWARDS, configure
from trainer.roleplay.similarity import Similarity

PROMPTS, SAMPLES = 16, 4
#: Those that ask nobody.
_IN_PROCESS = ("reward_format", "reward_role_split", "reward_character_consistency")


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    repeats = 1 if quick else 9
    folder = WORK / "models/embedder-25m"
    if not (folder / "modules.json").exists():
        make_folder(folder, **SHAPE)
    encode, batches = Encode(folder), Batches()
    flags = ("--model", str(folder), "--threads", "1", "--cache", "memory", "--device", "cpu")
    cfg = RewardConfig()
    with (
        service("services.embedder", *flags) as (_, url),
        Embeddings(url, batch_size=cfg.embedding_batch_size) as client,
    ):
        anchors = Anchors(low=0.0, high=1.0)
        dimension = client.info().dimension
        calibration = Calibration(
            model="bench", dimension=dimension, grounded=anchors, reference=anchors
        )
        configure(cfg, Similarity(client, calibration))
        call(batches())
        encode(texts_of(batches()))
        yield over_encode(batches, encode, repeats)
        yield from in_process(batches, repeats)


class Batches:
    """The demo's turns with replies to other turns, each time with another number in them."""

    def __init__(self) -> None:
        lines = (ROOT / "demo/data/roleplay/train.jsonl").read_text(encoding="utf-8").splitlines()
        self._rows = [json.loads(line) for line in lines[: PROMPTS * SAMPLES]]
        self._turn = count(100)

    def __call__(self) -> dict[str, list[Any]]:
        """Return the next batch, as keywords of a reward function."""
        turn, n = next(self._turn), PROMPTS * SAMPLES
        sampled_rows = [self._rows[k // SAMPLES] for k in range(n)]
        numbers = [f"{turn}-{k // SAMPLES}" for k in range(n)]
        prompts = [row["prompt"][:-1] for row in sampled_rows]
        return {
            "prompts": [
                [*before, {"role": "user", "content": f"{number} {row['prompt'][-1]['content']}"}]
                for before, number, row in zip(prompts, numbers, sampled_rows, strict=True)
            ],
            "completions": [
                [{"role": "assistant", "content": f"{turn}-{k} {row['reference']}"}]
                for k, row in enumerate(self._rows)
            ],
            "reference": [
                f"{number}번 {row['reference']}"
                for number, row in zip(numbers, sampled_rows, strict=True)
            ],
            **{
                name: [row[name] for row in sampled_rows]
                for name in ("player_name", "character_name", "speech_level")
            },
        }


def texts_of(batch: dict[str, list[Any]]) -> list[str]:
    """Return the texts to embed, each one once."""
    users = [prompt[-1]["content"] for prompt in batch["prompts"]]
    replies = [reply[0]["content"] for reply in batch["completions"]]
    return [*dict.fromkeys([*users, *batch["reference"], *replies])]


def call(batch: dict[str, list[Any]], names: tuple[str, ...] = ()) -> None:
    """Call the functions as TRL does; those of `names`, or all."""
    for reward in REWARDS:
        if not names or reward.name in names:
            reward.function(**batch, log_metric=lambda *_: None, log_extra=lambda *_: None)


def over_encode(batches: Batches, encode: Encode, repeats: int) -> Measurement:
    """Compare all five rewards with `encode` of the batch's texts."""
    timing = compare(lambda: call(batches()), lambda: encode(texts_of(batches())), repeats)
    timing["texts"] = len(texts_of(batches()))
    return Measurement(
        f"five rewards of {PROMPTS * SAMPLES} replies over encode() of their texts",
        100 * (timing["ours_s"] / timing["other_s"] - 1),
        "% more time",
        at_most=10.0,
        details=timing,
    )


def in_process(batches: Batches, repeats: int) -> Iterator[Measurement]:
    """Measure the three rewards that need no service, per reply."""
    for name in _IN_PROCESS:
        ms = 1000 * min(timed(_call_of(batches(), name)) for _ in range(repeats))
        yield Measurement(f"  {name}", ms / (PROMPTS * SAMPLES), "ms a reply")


def _call_of(batch: dict[str, list[Any]], name: str) -> Callable[[], None]:
    return lambda: call(batch, (name,))


if __name__ == "__main__":
    run("embedding_rewards", __doc__, questions)
