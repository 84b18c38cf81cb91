"""Run one episode for one question and report each turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.search.config import SearchConfig, SearchRewardConfig
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.episode import run_episodes
from trainer.search.services import has_page, open_policy_and_services, run_name
from trainer.search.trajectories.store import FOLDER, TrajectoryStore


def reward_of_one(reward: SearchRewardConfig, *, answer: bool, gold: bool) -> SearchRewardConfig:
    """Return the reward config for one question.

    A component that the question cannot have gets the weight 0; otherwise its episode would have no
    reward.
    answer: the generator shall answer, so the judge has a weight, there is no gate, and a forced
    end does not earn 0.
    """
    judge = (reward.w_judge or 1.0) if answer else 0.0
    ndcg = reward.w_ndcg if gold else 0.0
    form = reward.w_format or (0.0 if judge or ndcg else 1.0)
    update: dict[str, object] = {"w_judge": judge, "w_ndcg": ndcg, "w_format": form}
    if answer:
        update["gate"] = False
        if reward.forced_completion == "zero":
            update["forced_completion"] = "score"
    return reward.model_copy(update=update)


def ask(
    cfg: SearchConfig,
    question: Question,
    folder: Path,
    *,
    on_turn: Callable[[Trajectory], None],
) -> Trajectory:
    """Let the policy search for a question's evidence, and store the episode in `folder`.

    on_turn: is called after each turn. Without a reference answer there is no verdict. Without gold
    pages there is no NDCG. Raises UserError, ServiceUnreachable.
    """
    if (folder / FOLDER).exists():
        raise UserError(
            f"{folder}: contains trajectories already. Choose another folder with --out."
        )
    stores: list[TrajectoryStore] = []
    run = run_name(folder)
    with open_policy_and_services(
        cfg, run=run, load_image=lambda name: stores[0].read_image(name)
    ) as services:
        for page in question.gold:
            if not has_page(services.retriever, page):
                raise UserError(f"--gold {page}: the index has no such page")
        folder.mkdir(parents=True, exist_ok=True)
        stores.append(TrajectoryStore(folder / FOLDER, run))
        write_atomic(folder / "index.json", services.index.model_dump_json(indent=1))
        run_episodes(
            [question],
            services.policy,
            services.retriever,
            cfg.episode,
            new_id=lambda *_: "1-0-0",
            on_done=services.stream.submit,
            on_turn=on_turn,
            save_image=stores[0].save_image,
            run=run,
            step=1,
            original_pixels=cfg.original_pixels,
        )
        group_by_id = {"1-0-0": question.id}
        (final,) = services.stream.collect(1, group_by_id, cfg.rollout.deadline_s).values()
        stores[0].write_step(1, [final])
        return final
