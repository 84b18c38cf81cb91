"""Takes steps of TRL's trainer with a rule of groups, and writes the rewards of this process.

torchrun --nproc_per_node 2 -m tests.kits.trainer.trl.rank_groups OUT COMPLETIONS_A_PROCESS...
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from scorekit.adapters.trl import reward_function
from scorekit.errors import UserError
from tests.kits.trainer.trl.runs import make_trainer


def group_sizes(samples: list[dict[str, Any]]) -> list[float]:
    """Return the size of the group for each of its samples."""
    return [float(len(samples)) for _ in samples]


def step(folder: Path, batch_size: int) -> list[Any]:
    """Train for a step, and return the group sizes that the rule saw, or the error."""
    rule = {"rule": "tests.kits.trainer.trl.rank_groups:group_sizes", "group": True}
    function = reward_function(definition={"components": {"size": rule}})
    outputs: list[Any] = []

    def recording(**columns: Any) -> list[float | None]:
        try:
            outputs.extend(function(**columns))
        except UserError as error:
            outputs.append(str(error))
            raise
        return outputs

    arguments = {"per_device_train_batch_size": batch_size, "num_generations": 4}
    trainer = make_trainer(folder / "run", [recording], arguments, has_tokens=False)
    with contextlib.suppress(UserError):
        trainer.train()
    return outputs


def main(folder: Path, batch_sizes: list[int]) -> None:
    """Write what a step of each size gave to OUT/RANK.json."""
    outputs = [step(folder, size) for size in batch_sizes]
    path = folder / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(outputs), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
