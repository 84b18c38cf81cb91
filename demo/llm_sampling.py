"""Batched sampling of a small causal LM. No sequence depends on the other sequences of its batch.

A sampled sequence is a function of its prompt, its settings and its seed: each has its own random
generator, and the arithmetic is float64, so that another batch size or more padding changes a
probability by 1e-15, which is too little to change a token. This is affordable for a model of 4
million parameters, not for a large one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Sequences that are sampled together.
BATCH = 192
#: Waiting sequences among which those of like length are looked for.
LOOK_AHEAD = 4 * BATCH


@dataclass(frozen=True, slots=True)
class Completion:
    """Holds a sampled text.

    finish_reason: "stop" (end token or stop string) or "length".
    """

    text: str
    finish_reason: str
    tokens: int


@dataclass(eq=False, slots=True)
class Wanted:
    """A sequence to sample. temperature 0: greedy; seed None: any."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    done: Future[Completion] = field(default_factory=Future)


class _Row:
    """Holds the state of a sequence that is being sampled."""

    def __init__(self, request: Wanted) -> None:
        self.request = request
        self.ids: list[int] = []
        self._random = np.random.default_rng(request.seed)

    def next_uniform(self) -> float:
        """Return one random number per token, for greedy rows too, so that the t-th token
        always gets the t-th number.
        """
        return float(self._random.random())


class Sampler:
    """Samples waiting requests batch by batch, with a model and tokenizer in one thread."""

    def __init__(self, model: Any, tokenizer: Any, stop_ids: Sequence[int], pad_id: int) -> None:
        self.tokenizer = tokenizer
        self.context_length = int(model.config.max_position_embeddings)
        self._model = model.double().eval()
        self._stop_ids = frozenset(stop_ids)
        self._pad_id = pad_id
        self._inbox: queue.SimpleQueue[Wanted] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Wanted) -> Future[Completion]:
        """Queue a sequence; its prompt and max_tokens must fit `context_length`."""
        self._inbox.put(request)
        return request.done

    def _run(self) -> None:
        waiting: list[Wanted] = []
        while True:
            if not waiting:
                waiting.append(self._inbox.get())
            while not self._inbox.empty():
                waiting.append(self._inbox.get())
            batch = _like_the_first(waiting)
            chosen = set(map(id, batch))
            waiting = [request for request in waiting if id(request) not in chosen]
            live = [request for request in batch if request.done.set_running_or_notify_cancel()]
            try:
                self._sample([_Row(request) for request in live])
            except Exception as error:  # of this batch alone; the callers are told
                for request in live:
                    if not request.done.done():
                        request.done.set_exception(error)

    @torch.inference_mode()
    def _sample(self, rows: list[_Row]) -> None:
        """Draw until every row is finished; each has its completion as soon as it ends."""
        from transformers import DynamicCache

        if not rows:
            return
        cache = DynamicCache()
        prompts = list(dict.fromkeys(row.request.prompt for row in rows))  # n choices share one
        ids, attended = self._pad(prompts)  # [U, P]
        logits = self._forward(ids, attended, cache)  # [U, V]
        prompt_indices = torch.tensor([prompts.index(row.request.prompt) for row in rows])
        cache.batch_select_indices(prompt_indices)
        logits, attended = logits[prompt_indices], attended[prompt_indices]
        while True:
            for row, token in zip(rows, draw(logits, rows), strict=True):
                row.ids.append(token)
            keep = [i for i, row in enumerate(rows) if not self._finish(row)]
            if not keep:
                return
            if len(keep) < len(rows):
                cache.batch_select_indices(torch.tensor(keep))
                attended = attended[keep]
                rows = [rows[i] for i in keep]
            ids = torch.tensor([row.ids[-1:] for row in rows])  # [B, 1]
            attended = torch.cat([attended, torch.ones_like(ids)], dim=-1)
            logits = self._forward(ids, attended, cache)  # [B, V]

    def _forward(self, ids: Tensor, attended: Tensor, cache: Any) -> Tensor:
        """Return the logits after the last id of each row. [B, S], [B, P + t] -> [B, V]."""
        positions = (attended.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self._model(
            input_ids=ids,
            attention_mask=attended,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _pad(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Return prompts padded on the left, and which ids are theirs: both [U, P]."""
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self._pad_id)
        attended = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attended[row, width - len(prompt) :] = 1
        return ids, attended

    def _finish(self, row: _Row) -> bool:
        """Set the results of rows whose last token ended them; return whether the given row has
        ended.
        """
        completion = self._completion(row)
        if completion is not None:
            row.request.done.set_result(completion)
        return completion is not None

    def _completion(self, row: _Row) -> Completion | None:
        if row.ids[-1] in self._stop_ids:
            return Completion(self._text(row.ids[:-1]), "stop", len(row.ids))
        if row.request.stop:
            text = self._text(row.ids)
            ends = [text.find(stop) for stop in row.request.stop if stop in text]
            if ends:
                return Completion(text[: min(ends)], "stop", len(row.ids))
        if len(row.ids) >= row.request.max_tokens:
            return Completion(self._text(row.ids), "length", len(row.ids))
        return None

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def draw(logits: Tensor, rows: Sequence[_Row]) -> list[int]:
    """Return the next token of each row, by the inverse of the cumulated probabilities.

    logits: [B, V].
    """
    greedy = logits.argmax(-1)
    heat = torch.tensor([row.request.temperature for row in rows], dtype=logits.dtype)
    uniform = torch.tensor([[row.next_uniform()] for row in rows], dtype=logits.dtype)
    scaled = logits / torch.where(heat > 0, heat, 1.0)[:, None]
    probs = scaled.softmax(-1)
    if any(row.request.top_p < 1 for row in rows):
        probs = _nucleus(probs, torch.tensor([[row.request.top_p] for row in rows]))
    below = probs.cumsum(-1)
    sampled = torch.searchsorted(below, uniform * below[:, -1:], right=True).squeeze(-1)
    sampled = sampled.clamp(max=logits.shape[-1] - 1)
    return [int(token) for token in torch.where(heat > 0, sampled, greedy)]


def _nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the most likely tokens that reach top_p together, and set the others to 0.

    Shapes: [B, V], [B, 1] -> [B, V].
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    out = ranked.cumsum(-1) - ranked >= top_p
    return torch.zeros_like(probs).scatter(-1, order, ranked.masked_fill(out, 0.0))


def _like_the_first(waiting: Sequence[Wanted]) -> list[Wanted]:
    """Return the request that has waited longest, and those of similar length. This keeps
    padding small and starves none.
    """
    length = len(waiting[0].prompt)
    ahead = waiting[:LOOK_AHEAD]
    return sorted(ahead, key=lambda request: abs(len(request.prompt) - length))[:BATCH]
