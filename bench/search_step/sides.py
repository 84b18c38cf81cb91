"""Runs an update of a searcher: with our trainer, or with TRL's GRPOTrainer on the same episodes.

TRL plays the episodes with a `rollout_func`. Each side runs in its own process.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from bench.common import ROOT, WORK
from bench.sampling import peak_mib

FOLDER = WORK / "search_step"
CONFIG = ROOT / "configs/search/demo_phase1.yaml"
POLICY = ROOT / "demo/models/search_policy"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Holds the sizes of an update and the number of runs.

    Runs alternate; each has `warm_up` and `updates` updates.
    """

    questions: int = 4
    samples: int = 8
    minibatch: int = 8
    warm_up: int = 1
    updates: int = 2
    runs: int = 2

    @property
    def all_updates(self) -> int:
        """Return the updates of a run, with the warm-up."""
        return self.warm_up + self.updates

    @property
    def episodes(self) -> int:
        """Return the episodes of an update."""
        return self.questions * self.samples

    @property
    def steps(self) -> int:
        """Return the optimizer steps of an update."""
        return self.episodes // self.minibatch

    def __str__(self) -> str:
        return f"{self.episodes} episodes, {self.steps} steps of {self.minibatch}"


def search_config(sizes: Sizes, retriever: str, run_dir: Path, **more: Any) -> Any:
    """Return the demo's first phase, at this size, without its KL: TRL's side has none."""
    from scorekit.config import load_config
    from trainer.search.config import SearchConfig

    values = {
        "data.train_limit": sizes.questions,
        "data.eval": "null",
        "retriever.url": retriever,
        "rollout.n_agent": sizes.samples,
        "rl.batch_size": sizes.questions,
        "rl.minibatch_size": sizes.minibatch,
        "rl.num_updates": sizes.all_updates,
        "rl.lr": 1e-6,
        "rl.kl_coef": 0,
        "misc.device": "cpu",
        "misc.matmul": "auto",
        "misc.run_dir": run_dir,
    } | {key.replace("__", "."): value for key, value in more.items()}
    return load_config(SearchConfig, CONFIG, [f"{key}={value}" for key, value in values.items()])


def scorekit_side(sizes: Sizes, retriever: str) -> dict[str, Any]:
    """Run full updates of trainer.search.training, including the files of the run."""
    from trainer.search.data import load_train
    from trainer.search.training.train import run_search

    folder = FOLDER / "ours"
    shutil.rmtree(folder, ignore_errors=True)
    cfg = search_config(sizes, retriever, folder)
    with (
        mock.patch("trainer.search.reward.with_reward", _text_reward),
        timed_updates() as ends,
    ):
        artifacts = run_search(load_train(cfg), {}, cfg)
    lines, texts = artifacts.updates, _texts(folder, 1)
    assert len(lines) == sizes.all_updates
    mean = sum(map(_reward, texts)) / len(texts)
    assert abs(lines[0]["reward_mean"] - mean) < 1e-6, "the rewards are not those of TRL's side"
    parts = [{k: v for k, v in line.items() if k.endswith("_s")} for line in lines]
    return _result(ends, sizes, texts) | {"parts": parts[sizes.warm_up :]}


def trl_side(sizes: Sizes, retriever: str) -> dict[str, Any]:
    """Run the same updates with TRL.

    Its rollout_func plays the episodes with our driver and sampler, because TRL has none for text;
    the rest is TRL's.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    folder = FOLDER / "trl"
    shutil.rmtree(folder, ignore_errors=True)
    player = _Player(search_config(sizes, retriever, folder), sizes, retriever)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % sizes.steps == 0:
                ends.append(time.perf_counter())

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32),
        args=_trl_arguments(sizes, folder),
        processing_class=player.policy_inputs.tokenizer,
        callbacks=[Clock()],
        reward_funcs=lambda completions, earned, **_: earned,
        rollout_func=player.rollout,
        train_dataset=Dataset.from_list([{"prompt": question.id} for question in player.train]),
    )
    trainer.train()
    parts = [{"rollout_s": seconds} for seconds in player.seconds]
    return _result(ends, sizes, player.first_texts) | {"parts": parts[sizes.warm_up :]}


def _trl_arguments(sizes: Sizes, folder: Path) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        seed=0,
        max_steps=sizes.steps * sizes.all_updates,
        per_device_train_batch_size=sizes.minibatch,
        gradient_accumulation_steps=1,
        steps_per_generation=sizes.steps,
        num_generations=sizes.samples,
        max_completion_length=4096,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


@dataclass(frozen=True, slots=True)
class _Played:
    """An episode: its question, its ids, its text and its reward."""

    question: str
    joined: Any
    text: str
    reward: float


class _Player:
    """Plays episodes with our driver, for TRL's rollout_func."""

    def __init__(self, cfg: Any, sizes: Sizes, retriever: str) -> None:
        from scorekit.retrieval.client import Retriever
        from trainer.search.data import load_train
        from trainer.search.rollout.sampled import inspect_policy

        self._cfg, self._sizes, self._pages = cfg, sizes, Retriever(retriever)
        self.train, self.policy_inputs = load_train(cfg), inspect_policy(cfg)
        self.first_texts: list[str] = []
        self.seconds: list[float] = []

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Play episodes for TRL, which passes the id of a question for each episode."""
        from trainer.runs.batches import batch_indices

        update = trainer.state.global_step // self._sizes.steps + 1
        order = batch_indices(len(self.train), self._sizes.questions, update, self._cfg.misc.seed)
        started = time.perf_counter()
        played = self._play(trainer, update, [self.train[index].model_copy() for index in order])
        self.seconds.append(time.perf_counter() - started)
        if update == 1:
            self.first_texts = [episode.text for episode in played]
        by_id: dict[str, list[_Played]] = {}
        for episode in played:
            by_id.setdefault(episode.question, []).append(episode)
        ordered = [by_id[prompt].pop() for prompt in prompts]
        return {
            "prompt_ids": [episode.joined.prompt_ids for episode in ordered],
            "completion_ids": [episode.joined.completion_ids for episode in ordered],
            "logprobs": [episode.joined.logprobs for episode in ordered],
            "env_mask": [
                [int(action) for action in episode.joined.action_mask] for episode in ordered
            ],
            "earned": [episode.reward for episode in ordered],
        }

    def _play(self, trainer: Any, update: int, questions: Sequence[Any]) -> list[_Played]:
        """Play all episodes of an update, with the ids and so the random streams of our trainer."""
        from scorekit.seeds import stream_seed
        from trainer.rl.engines.generate import GenerateSampler
        from trainer.rl.policy import stop_token_ids
        from trainer.search.rollout.episode import run_episodes
        from trainer.search.rollout.sampled import SampledPolicy

        model = trainer.accelerator.unwrap_model(trainer.model)
        tokenizer, cfg = self.policy_inputs.tokenizer, self._cfg
        policy = SampledPolicy(
            GenerateSampler(model, tokenizer, banned_token_ids=self.policy_inputs.banned_token_ids),
            self.policy_inputs.ids(cfg, stop_token_ids(model, tokenizer)),
            cfg.generation,
            name="trl",
            context=self.policy_inputs.context,
            seed=stream_seed("episodes", cfg.misc.seed, update),
        )
        position = {id(question): index for index, question in enumerate(questions)}
        episodes = run_episodes(
            questions,
            policy,
            self._pages,
            cfg.episode,
            new_id=lambda question, sample: f"{update}-{position[id(question)]}-{sample}",
            on_done=lambda episode: None,
            save_image=lambda sha256, png: None,
            samples=self._sizes.samples,
        )
        model.train()
        return [
            _Played(
                episode.question.id,
                policy.ended_episodes[episode.trajectory_id],
                completed_text(episode),
                _reward(completed_text(episode)),
            )
            for episode in episodes
        ]


@contextmanager
def timed_updates() -> Iterator[list[float]]:
    """Record the times at which a run's log is opened and its updates end."""
    from trainer.runs.run_log import RunLog

    ends: list[float] = []
    write, begin = RunLog.write_update, RunLog.__init__

    def noted(runlog: Any, line: Any) -> None:
        write(runlog, line)
        ends.append(time.perf_counter())

    def record_start(runlog: Any, *args: Any, **options: Any) -> None:
        begin(runlog, *args, **options)
        ends.append(time.perf_counter())

    with mock.patch.object(RunLog, "write_update", noted):
        with mock.patch.object(RunLog, "__init__", record_start):
            yield ends


def completed_text(trajectory: Any) -> str:
    """Return the text that the policy wrote in an episode."""
    return "\n".join(turn.text for turn in trajectory.turns if not turn.forced)


def _reward(text: str) -> float:
    """Return a reward that costs nothing, as a function of the text."""
    return hashlib.sha256(text.encode()).digest()[0] / 255


def _text_reward(trajectory: Any, cfg: Any) -> Any:
    """Compute a reward from the text in place of the formula."""
    from trainer.search.records import EpisodeReward

    reward = EpisodeReward(status="ok", value=_reward(completed_text(trajectory)))
    return trajectory.model_copy(update={"reward": reward})


def _texts(folder: Path, step: int) -> list[str]:
    from trainer.search.trajectories.store import FOLDER as STORE
    from trainer.search.trajectories.store import TrajectoryStore

    return [completed_text(episode) for episode in TrajectoryStore(folder / STORE).read([step])]


def _result(ends: Sequence[float], sizes: Sizes, texts: Sequence[str]) -> dict[str, Any]:
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    return {
        "updates_s": seconds[sizes.warm_up :],
        "peak_mib": peak_mib(),
        "first_texts": sorted(texts),
    }
