"""A process that requests answers to questions until it is killed: `CONFIG.json FOLDER COUNT`.

It prints the number of each question whose answer it has.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.kits.trainer.search_answers import PICTURES, answering, episode


async def pay(config: dict[str, Any], folder: Path, count: int) -> None:
    pipeline = answering(config, folder)

    async def answer_one(number: int) -> None:
        sampled = episode("deck_1", question=f"number {number}", id=f"t{number}")
        done = await pipeline.finish(sampled, PICTURES.__getitem__)
        assert done.answer is not None
        print(number, done.answer.status, flush=True)

    await pipeline.check()
    await asyncio.gather(*(answer_one(number) for number in range(count)))
    print("calls", pipeline.spent["generator"].calls, flush=True)
    await pipeline.close()


if __name__ == "__main__":
    asyncio.run(pay(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
