"""Join the ids of an episode turn by turn, without tokenizing a turn again.

Sampled ids stay as they are. The ids between two turns are the difference of two renders of the
chat template with a placeholder as the turn. So they do not depend on the sampled text, nor on what
a template does to earlier turns (Qwen3 removes their thinking). The action mask is built here with
the ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from scorekit.errors import UserError
from trainer.chat.config import ChatConfig
from trainer.chat.render import render
from trainer.rl.control_tokens import control_tokens
from trainer.rl.rollout import Rollout
from trainer.rl.sampler import SampledCompletion
from trainer.search.images.processor import ImageProcessor, ProcessedImage
from trainer.search.images.views import ShownImage
from trainer.search.records import TokenRecord, mask_digest
from trainer.search.rollout.actions import TAGS
from trainer.search.rollout.prompt import Message, template_messages

_PLACE = "@@"
_BEFORE = (Message("system", "s"), Message("user", "u"))
_OPENED, _THOUGHT = "<think>", "why</think>\n<search>what</search>"
#: A think block that a generation prompt may open, and that earlier turns may not have.
_PREFILL = re.compile(r"\s*<think>\s*(</think>\s*)?")


class TurnTokenizer:
    """The ids of prompts and observations under one chat template.

    reader: of a policy that sees images.
    stops: ids that end a turn of the policy.
    prefill: the start of a think block in the generation prompt, or "".
    Raises UserError if turns cannot be joined under the template, because the text of a turn
    depends on other turns.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat: ChatConfig,
        reader: ImageProcessor | None,
        stops: Sequence[int],
    ) -> None:
        self.tokenizer, self._chat, self.reader = tokenizer, chat, reader
        self.stops = list(stops)
        # A group has equal texts at the same time.
        self._cached_ids = lru_cache(512)(self._text_ids)
        self._cached_text = lru_cache(512)(self._without_control_tokens)
        self.prefill = self._check()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids before the first turn."""
        return self._ids(self._render(messages), messages)

    def observation(self, message: Message) -> list[int]:
        """Return the ids between two turns, starting with the id that ends a turn."""
        return self._ids(self._tail(message), [message])

    def text(self, sampled: Sequence[int]) -> str:
        """Return the text of a turn for the parser: with the prefill, without the end id."""
        ids = list(sampled)
        if ids and ids[-1] in self.stops:
            del ids[-1]
        decoded = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return f"{self.prefill}{decoded}"

    def unopened(self, text: str) -> str | None:
        """Return a turn's text without the prefill, as it would be sampled.

        None if the text does not begin with the prefill.
        """
        if not self.prefill:
            return text
        opened = self.prefill if text.startswith(self.prefill) else self.prefill.strip()
        return text.removeprefix(opened) if text.startswith(opened) else None

    def serving_note(self) -> str | None:
        """Return a warning if a chat server with this template changes the policy's context.

        Such a server renders earlier turns again, and training keeps them as sampled. None: equal.
        """
        written = _THOUGHT if self.prefill else _OPENED + _THOUGHT
        turn = Message("assistant", self.prefill + written)
        rendered = self._render([*_BEFORE, turn, Message("user", "v")])
        if rendered.startswith(self._render(_BEFORE) + written):
            return None
        change = "changes" if "why" in rendered else "drops the thinking of"
        return (
            f"the chat template {change} earlier turns, which training keeps as they were sampled: "
            "a server that gets messages (an evaluation by URL) gives the policy another "
            "context than in training. Send it ids, or use a template that keeps them."
        )

    # -- renders ----------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message]) -> str:
        safe = [
            message
            if message.role == "assistant"
            else replace(message, text=self._cached_text(message.text))
            for message in messages
        ]
        parts = template_messages(safe)
        return render(self.tokenizer, parts, self._chat, generation_prompt=True)

    def _tail(self, message: Message) -> str:
        placeholder = Message("assistant", _PLACE)
        rendered = self._render([*_BEFORE, placeholder, message])
        return rendered[rendered.index(_PLACE) + len(_PLACE) :]

    def _ids(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Tokenize a text and repeat the image id for each image as often as it needs."""
        ids = self._cached_ids(text)
        images = [image for message in messages for image in message.images]
        if self.reader is None:
            if images:
                raise ValueError("there are images, but the policy has no image processor")
            return list(ids)
        image_id, remaining, joined = self.reader.image_id, iter(images), list[int]()
        if ids.count(image_id) != len(images):
            raise ValueError(f"{ids.count(image_id)} image marks for {len(images)} images")
        for token_id in ids:
            times = self.reader.ids(next(remaining)) if token_id == image_id else 1
            joined += [token_id] * times
        return joined

    def _without_control_tokens(self, text: str) -> str:
        """Return a text of a message with this tokenizer's control tokens as text.

        Texts from outside have passed `neutral` before, which knows the forms of most of them. The
        tags of the policy's actions are meant.
        """
        controls = control_tokens(self.tokenizer, template_kwargs=self._chat.template_kwargs)
        return controls.as_text(text, "outside", allowed=TAGS)

    def _text_ids(self, text: str) -> tuple[int, ...]:
        # verbose: the tokenizer would warn of texts beyond its limit; `context` bounds them
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # -- checks -----------------------------------------------------------------------------------

    def _check(self) -> str:
        """Check the template and return the prefill. Raises UserError."""
        first, second = Message("user", "first words"), Message("user", "other words")
        turn = Message("assistant", _PLACE)
        prompt = self._render(_BEFORE)
        head, *tails = self._render([*_BEFORE, turn, first, turn, second]).split(_PLACE)
        opened = prompt.removeprefix(head)
        if not prompt.startswith(head) or (opened and not _PREFILL.fullmatch(opened)):
            raise UserError(
                "the chat template begins a conversation differently from its prompt, so the turns "
                "of an episode cannot be joined. Name another one in chat.template."
            )
        if len(tails) != 2 or tails != [self._tail(first).removesuffix(opened), self._tail(second)]:
            raise UserError(
                "the chat template writes a turn differently depending on the turns around it, so "
                "the turns of an episode cannot be joined. Name another one in chat.template."
            )
        end = self._text_ids(tails[0])[:1]
        if not set(end) <= set(self.stops) or not end:
            ends = self.tokenizer.decode(list(end))
            raise UserError(
                f"the chat template ends a turn with {ends!r}, at which the policy does not stop. "
                "Add its id to eos_token_id in the policy's generation_config.json."
            )
        return opened if "</think>" not in opened else ""


@dataclass(slots=True)
class EpisodeTokens:
    """The ids of an episode so far.

    logprobs: of the sampler, 0 between turns; None: not requested.
    weight_versions: of the sampler's weights, between turns that of the id before; None: unknown.
    images: the images of the ids.
    hashes: their SHA-256."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    weight_versions: list[int] | None = field(default_factory=list)
    images: list[ProcessedImage] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Return prompt and completion ids."""
        return self.prompt_ids + self.completion_ids

    def add_turn(self, sampled: SampledCompletion) -> None:
        """Add the sampled ids of a turn."""
        self._add(sampled.token_ids, action=True)
        if sampled.logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += sampled.logprobs
        if sampled.versions is None:
            self.weight_versions = None
        elif self.weight_versions is not None:
            self.weight_versions += sampled.versions

    def add_observation(self, ids: Sequence[int]) -> None:
        """Add the ids between two turns. After a truncated turn they include its end id, which is
        then not an action."""
        own_end = self.completion_ids[-1:] == list(ids[:1])
        added = ids[1:] if own_end else ids
        self._add(added, action=False)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(added)
        if self.weight_versions is not None:
            last_version = self.weight_versions[-1] if self.weight_versions else 0
            self.weight_versions += [last_version] * len(added)

    def show(self, images: Sequence[ShownImage], reader: ImageProcessor | None) -> None:
        """Add the images of the last added ids."""
        if reader is not None:
            self.images += [reader.read(image) for image in images]
            self.hashes += [image.view.image for image in images]

    def record(self) -> TokenRecord:
        """Return the record that is stored."""
        return TokenRecord(
            prompt_ids=self.prompt_ids,
            completion_ids=self.completion_ids,
            action_mask=self.action_mask,
            mask_digest=mask_digest(self.action_mask),
            images=self.hashes,
        )

    def rollout(
        self,
        trajectory_id: str,
        group: int,
        stops: Sequence[int],
        temperature: float | None = None,
    ) -> Rollout:
        """Return the rollout for training.

        temperature: of the question; None: the run's. Raises ValueError if the policy wrote
        nothing.
        """
        if not self.completion_ids:
            raise ValueError(f"trajectory {trajectory_id} has no turn of the policy")
        return Rollout(
            group=group,
            prompt_input_ids=self.prompt_ids,
            completion_token_ids=self.completion_ids,
            finish_reason="eos" if self.completion_ids[-1] in stops else "length",
            action_mask=self.action_mask,
            old_logprobs=self.logprobs,
            weight_versions=self.weight_versions,
            images=self.images,
            trajectory_id=trajectory_id,
            temperature=temperature,
        )

    def _add(self, ids: Sequence[int], *, action: bool) -> None:
        self.completion_ids += ids
        self.action_mask += [action] * len(ids)
