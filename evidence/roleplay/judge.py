"""A judge of role-play replies that is no reward: a larger language model of the same grammar.

It learns clean dialogues of all scenarios, also of those that no policy learns from. A reply is
judged by the mean log-probability of its tokens and of its end, after its prompt: how likely the
grammar would answer so. No reward computes this, and no policy is trained on it.
"""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from demo.train.chat_policy import END_OF_TEXT, STOP, save
from demo.train.common import fit, pad
from demo.train.roleplay.grammar import Dialogue, dialogue
from demo.train.roleplay.noise import noisy
from demo.train.roleplay.policy import new_model

Message = Mapping[str, str]
#: Steps of training, of BATCH dialogues each.
STEPS, BATCH, RATE = 2500, 8, 1.5e-3
#: Seeds of the dialogues that the judge learns, and of those that test it.
_LEARNED, _TESTED = 101, 102
#: Share of its dialogues in scenarios of the measured turns.
_HELD_OUT_SHARE = 0.3
#: Prompts and replies that are read at once.
_ROWS = 32


def new_judge(vocab_size: int) -> Any:
    """Return a random model of 4.5 M parameters; the policy has 1.6 M."""
    return new_model(vocab_size, hidden=256, inner=768, layers=5, heads=(8, 4))


def train_judge(
    tokenizer: Any, folder: Path, steps: int = STEPS, measured: Container[str] = ()
) -> None:
    """Train a judge and save it.

    tokenizer: that of the policies, with its chat template.
    measured: system turns of the dialogues that measure. The judge learns none of these.
    """
    rng = random.Random(_LEARNED)
    model = new_judge(len(tokenizer)).train()

    def row() -> list[int]:
        held_out, unseen = rng.random() < _HELD_OUT_SHARE, rng.random() < _HELD_OUT_SHARE
        chat = dialogue(rng, "", held_out=held_out, unseen_names=unseen)
        if chat.system in measured:
            return row()
        ids = tokenizer.apply_chat_template(chat.messages(len(chat.turns)), return_dict=False)
        return ids[: model.config.max_position_embeddings]

    def loss(step: int) -> torch.Tensor:
        rows = [row() for _ in range(BATCH)]
        mask = pad([[1] * len(ids) for ids in rows], 0)
        labels = pad(rows, -100)
        return model(pad(rows, END_OF_TEXT), attention_mask=mask, labels=labels).loss

    fit(list(model.parameters()), loss, steps, RATE, name="judge")
    save(model, tokenizer, folder)


class ReplyJudge:
    """Judges replies by a saved judge."""

    def __init__(self, folder: Path) -> None:
        """Load model and tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[str]) -> list[float]:
        """Return the mean log-probability, in nats a token, of each reply and its end."""
        rows = []
        for prompt, reply in zip(prompts, replies, strict=True):
            start = self.tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, return_dict=False
            )
            ids = self.tokenizer.encode(reply, add_special_tokens=False)
            rows.append((start, [*ids, STOP]))
        return [
            score for i in range(0, len(rows), _ROWS) for score in self._read(rows[i : i + _ROWS])
        ]

    @torch.inference_mode()
    def _read(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """Return the scores of prompts and replies, as ids."""
        ids = pad([start + reply for start, reply in rows], END_OF_TEXT)
        mask = pad([[1] * (len(start) + len(reply)) for start, reply in rows], 0)
        logits = self.model(ids, attention_mask=mask).logits.float()
        scores = []
        for row, (start, reply) in enumerate(rows):
            first, last = len(start), len(start) + len(reply)
            logprobs = logits[row, first - 1 : last - 1].log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(reply)[:, None])
            scores.append(chosen.mean().item())
        return scores


def check_judge(judge: ReplyJudge, count: int) -> dict[str, float]:
    """Return how often the judge prefers the grammar's own reply to a worse one, by its name.

    The worse ones: `noisy`, the same reply with a fault (demo/train/roleplay/noise.py); `level`,
    the same reply at the other speech level; `other`, the reply of another dialogue with this
    one's names. A name without any is left out.
    count: dialogues in scenarios of the measured turns. It learned others of these scenarios.
    """
    rng = random.Random(_TESTED)
    dialogues = [dialogue(rng, "", held_out=True, longest=2) for _ in range(count)]
    prompts = [d.messages(len(d.turns))[:-1] for d in dialogues]
    own_replies = [d.turns[-1][1] for d in dialogues]
    right = judge.score(prompts, [reply.text for reply in own_replies])
    worse = {
        "noisy": [noisy(reply, rng) for reply in own_replies],
        "level": [f'{reply.narration}\n"{reply.other_level}"' for reply in own_replies],
        "other": [
            _renamed(next_dialogue, target)
            for target, next_dialogue in zip(dialogues, dialogues[1:] + dialogues[:1], strict=True)
        ],
    }
    accuracy = {}
    for name, texts in worse.items():
        scores = judge.score(prompts, texts)
        rows = [
            (good, bad)
            for good, bad, reply, text in zip(right, scores, own_replies, texts, strict=True)
            if text != reply.text
        ]
        if rows:
            accuracy[name] = sum(good > bad for good, bad in rows) / len(rows)
    return accuracy


def _renamed(source: Dialogue, target: Dialogue) -> str:
    """Return the last reply of one dialogue with the character's and player's names of another."""
    text = source.turns[-1][1].text
    return text.replace(source.character, target.character).replace(source.player, target.player)
