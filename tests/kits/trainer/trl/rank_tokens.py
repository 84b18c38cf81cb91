"""Takes a step of TRL's trainer with token advantages in several processes, and writes the batch.

torchrun --nproc_per_node 2 -m tests.kits.trainer.trl.rank_tokens OUT METRICX_URL XCOMET_URL
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.kits.trainer.trl.runs import make_trainer, reward_funcs


def main(folder: Path, metricx_url: str, xcomet_url: str) -> None:
    """Train for a step; write what this process gave and got to OUT/RANK.json."""
    functions = reward_funcs(metricx_url, xcomet_url)
    arguments = {"per_device_train_batch_size": 4, "num_generations": 4, "optim": "sgd"}
    trainer = make_trainer(folder / "run", functions, arguments)
    batch: dict[str, Any] = {}
    compute, generate = trainer._advantages, trainer._generate_and_score_completions

    def recording_compute(valid: Any, token_rewards: Any) -> Any:
        batch.update(valid=valid, token_rewards=token_rewards, rewards=trainer._rewards.tolist())
        return compute(valid, token_rewards)

    def recording_generate(inputs: Any) -> Any:
        output = generate(inputs)
        batch["advantages"] = output["advantages"].tolist()
        batch["trained"] = int(output["tool_mask"].sum())
        batch["num_items"] = int(output["num_items_in_batch"])
        return output

    trainer._advantages, trainer._generate_and_score_completions = (
        recording_compute,
        recording_generate,
    )
    trainer.train()
    path = folder / f"{trainer.accelerator.process_index}.json"
    path.write_text(json.dumps(batch), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
