"""One of several processes that request the rewards of their episodes: `PLAN.json`.

The plan has the search config, the run's name, and for each step the questions of each process;
`machines`: whether each process pretends to be on a machine of its own. The main process prints the
merged stats of all steps; a mistake of the user ends each process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from tests.kits.trainer.search_answers import PICTURES, episode
from trainer.search import services as services_module
from trainer.search.answer.pipeline import merge_step_stats
from trainer.search.config import SearchConfig
from trainer.search.records import Trajectory
from trainer.search.reward import answer_stats
from trainer.search.services import open_services


def pay(plan: dict[str, Any]) -> None:
    import torch

    from trainer.rl.distributed import DistributedContext

    cfg = SearchConfig.model_validate(plan["config"])
    world = DistributedContext(torch.device("cpu"), patience_s=60)
    load_image = PICTURES.__getitem__
    if plan["machines"]:
        vars(services_module)["boot_id"] = lambda: f"machine {world.rank}"
    with (
        world.monitored(),
        open_services(cfg, run=plan["run"], load_image=load_image, world=world) as services,
    ):
        stream, error = services.stream, ""
        answered: list[Trajectory] = []
        for step, questions in enumerate(plan["steps"], 1):
            group_by_id = {}
            for number, question in enumerate(questions[world.rank]):
                sampled = episode("d_1", question=question, id=f"t{world.rank}-{number}")
                stream.submit(sampled.model_copy(update={"step": step}))
                group_by_id[f"t{world.rank}-{number}"] = "q1"
            try:
                answered += stream.collect(step, group_by_id, 60.0).values()
            except UserError as raised:
                error = str(raised)
            errors = world.gather([error])
            if any(errors):
                break
        assert services.answering is not None
        parts = world.gather([services.answering.stats() | stream.stats])
        outcomes = answer_stats(world.gather(answered))
        if world.is_main:
            stats = outcomes | merge_step_stats(parts)
            print(json.dumps({"errors": errors, "stats": stats}))


if __name__ == "__main__":
    try:
        pay(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except UserError as mistake:
        sys.exit(f"error: {mistake}")
