"""Trains tiny policies that search and crop.

Random weights do not write valid actions. So the policies are first trained on two scripts, and
draw one of them for each episode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from scorekit.retrieval.client import Retriever
from testing.servers import running_app
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.images import EOS, PAD, PROCESSOR
from tests.kits.trainer.searching.episodes import ask, played
from tests.kits.trainer.searching.policies import (
    TINY_SIGHT,
    ToldSampler,
    tiny_reader,
    tiny_tokenizer,
    turn_ids,
)
from tests.kits.trainer.searching.seeing import ROOM, save_seeing, seeing
from trainer.rl.config import SamplingConfig
from trainer.rl.forward import completion_logprobs
from trainer.rl.model_files import save_tokenizer
from trainer.rl.rollout import Rollout, action_masks
from trainer.search.rollout.sampled import SampledPolicy

PAGES = {"deck_1": "births in korea", "deck_2": "births in europe", "deck_3": "rainfall"}
QUESTION = "How many births in Europe?"
#: As short as may be, since a token is a letter.
EPISODE: dict[str, Any] = {
    "instructions": "Search.",
    "observation_line": [],
    "max_turns": 4,
    "sight": TINY_SIGHT | {"crop_padding": 0, "min_crop": 8},
}
_END = "<think>c</think>\n<search_complete>true</search_complete>"
#: One finds the gold page and looks closer, the other does neither.
SCRIPTS = (
    (
        "<think>a</think>\n<search>europe</search>",
        "<think>b</think>\n<bbox>[0, 0, 40, 40]</bbox>",
        _END,
    ),
    ("<think>a</think>\n<search>rainfall</search>", _END),
)


@dataclass(frozen=True, slots=True)
class Taught:
    """A trained policy.

    policy: its folder.
    retriever: the URL of a running one.

    config: a file with the settings of a run of three updates, without `misc.run_dir`.
    """

    policy: Path
    config: Path
    retriever: str


@contextmanager
def taught(folder: Path, kind: str, **rl: Any) -> Iterator[Taught]:
    """Train a policy, and yield it with a running retriever and the config of a run.

    kind: the kind of a model that reads images, or "text".
    rl: settings of that section.
    """
    text = kind == "text"
    episode = EPISODE | {"observation": "text"} if text else EPISODE
    with running_app(StandInRetriever(PAGES).app) as url:
        model: Any = _text_model() if text else seeing(kind)
        reader = None if text else tiny_reader(model, PROCESSOR)
        ids = turn_ids(tiny_tokenizer(), reader)
        with closing(Retriever(url)) as pages:
            rows = _scripted(ids, pages, episode)
        _learn_by_heart(model, rows, [] if reader is None else reader.banned_token_ids)
        policy = folder / "policy"
        if text:
            model.save_pretrained(policy)
            save_tokenizer(tiny_tokenizer(), policy)
        else:
            save_seeing(policy, kind, model)
        questions = folder / "questions.jsonl"
        base_row: dict[str, Any] = {
            "question": QUESTION,
            "reference_answer": "8",
            "file_name": "deck.pdf",
        }
        question_rows = [base_row | {"id": id, "reference_page": 2} for id in ("q0", "q1")]
        questions.write_text("".join(json.dumps(row) + "\n" for row in question_rows))
        values = {
            "task": "search",
            "data": {"train": str(questions)},
            "retriever": {"url": url},
            "policy": {"path": str(policy)},
            "generation": {"max_new_tokens": 100},
            "rollout": {"n_agent": 4},
            "episode": episode,
            "reward": {"preset": "phase1"},
            "rl": {
                "num_updates": 3,
                "batch_size": 2,
                "minibatch_size": 4,
                "lr": 3e-4,
                "micro_batch_tokens": 1500,
                "importance_correction": "on",
                **rl,
            },
            "misc": {"device": "cpu", "threads": 1, "save_every_n_updates": 3},
        }
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        yield Taught(policy, config, url)


def _text_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config).eval()


def _scripted(ids: Any, pages: Any, episode: dict[str, Any]) -> list[Rollout]:
    """Return the ids of an episode for each script."""
    rows = []
    for script in SCRIPTS:

        def answer(prompt: str, script: Sequence[str] = script) -> str:
            return script[prompt.count("<|im_start|>assistant") - 1]

        policy = SampledPolicy(
            ToldSampler(ids.tokenizer, answer),
            ids,
            SamplingConfig(max_new_tokens=100),
            name="told",
            context=ROOM,
        )
        (done,) = played(policy, [ask(text=QUESTION)], pages=pages, **episode)
        assert done.end == "complete"
        rows.append(policy.ended_episodes[done.trajectory_id].rollout("", 0, ids.stops))
    return rows


def _learn_by_heart(model: nn.Module, rows: list[Rollout], banned_token_ids: Sequence[int]) -> None:
    """Train until the policy almost surely writes one of the scripts. Which one stays random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    mask = action_masks(rows)
    target_loss = len(rows) * 0.7  # nats: half of the episodes have the one script, half the other
    for _ in range(600):
        logprobs, _, _ = completion_logprobs(
            model,
            [row.prompt_input_ids for row in rows],
            [row.completion_token_ids for row in rows],
            1.0,
            0,
            images=[row.images for row in rows] if any(row.images for row in rows) else None,
            banned_token_ids=banned_token_ids,
        )
        loss = -(logprobs * mask).sum()
        if loss.item() < target_loss + 0.3 * len(rows):
            return
        optimizer.zero_grad()
        (loss / mask.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"not learned by heart: {loss.item():.1f} nats for {len(rows)} episodes")
