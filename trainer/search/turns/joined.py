"""The ids of an episode: joined as they come, never tokenised again.

What the policy samples stays as it was sampled. What stands between two of its turns is the
difference of two renders of the chat template, made behind a placeholder in place of the turn: so
it does not hang on what was sampled, nor on what a template does to earlier turns (Qwen3 takes
their thinking out). The action mask is made here, with the ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from scorekit.errors import UserError
from trainer.chat.config import ChatConfig
from trainer.chat.render import render
from trainer.rl.rollout import Rollout
from trainer.rl.sampler import Sampled
from trainer.search.records import TokenRecord, mask_digest
from trainer.search.sight.reading import PictureReader, SeenPicture
from trainer.search.sight.views import Shown
from trainer.search.turns.prompt import Message, template_messages

_PLACE = "@@"
_BEFORE = (Message("system", "s"), Message("user", "u"))
_OPENED, _THOUGHT = "<think>", "why</think>\n<search>what</search>"
#: What a generation prompt may open for the policy, and an earlier turn be without.
_PREFILL = re.compile(r"\s*<think>\s*(</think>\s*)?")


class TurnIds:
    """The ids of prompts and observations under one chat template.

    reader: of a policy that sees; stops: ids at which the policy's turn ends. prefill: of a think
    block that the generation prompt has opened for it; "". Raises UserError where the template
    cannot be joined: which turns it writes hangs on more than themselves.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat: ChatConfig,
        reader: PictureReader | None,
        stops: Sequence[int],
    ) -> None:
        self.tokenizer, self._chat, self.reader = tokenizer, chat, reader
        self.stops = list(stops)
        self._known = lru_cache(512)(self._text_ids)  # a group asks alike, at one time
        self.prefill = self._check()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """What stands before the first turn."""
        return self._ids(self._rendered(messages), messages)

    def observation(self, message: Message) -> list[int]:
        """What stands between a turn and the next, from the id that ends a turn on."""
        return self._ids(self._tail(message), [message])

    def text(self, sampled: Sequence[int]) -> str:
        """A turn as it is parsed: what the prompt has opened belongs to it, its end does not."""
        ids = list(sampled)
        if ids and ids[-1] in self.stops:
            del ids[-1]
        decoded = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return f"{self.prefill}{decoded}"

    def unopened(self, text: str) -> str | None:
        """A turn's text without the think block's beginning that the prompt has opened, as it
        would be sampled; None where it does not begin so."""
        if not self.prefill:
            return text
        opened = self.prefill if text.startswith(self.prefill) else self.prefill.strip()
        return text.removeprefix(opened) if text.startswith(opened) else None

    def serving_note(self) -> str | None:
        """Where a chat server with this template, which renders earlier turns anew, gives the
        policy another context than it is trained in: what is different."""
        written = _THOUGHT if self.prefill else _OPENED + _THOUGHT
        turn = Message("assistant", self.prefill + written)
        whole = self._rendered([*_BEFORE, turn, Message("user", "v")])
        if whole.startswith(self._rendered(_BEFORE) + written):
            return None
        what = "changes" if "why" in whole else "drops the thinking of"
        return (
            f"the chat template {what} earlier turns, which training keeps as they were sampled: "
            "a server that is sent messages (an evaluation by URL) shows the policy another "
            "context than it learns in; send it ids, or take a template that keeps them"
        )

    # -- renders ----------------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Message]) -> str:
        parts = template_messages(messages)
        return render(self.tokenizer, parts, self._chat, generation_prompt=True)

    def _tail(self, message: Message) -> str:
        placeholder = Message("assistant", _PLACE)
        whole = self._rendered([*_BEFORE, placeholder, message])
        return whole[whole.index(_PLACE) + len(_PLACE) :]

    def _ids(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Tokenised, with as many ids for each picture as it stands for."""
        ids = self._known(text)
        images = [shown for message in messages for shown in message.images]
        if self.reader is None:
            if images:
                raise ValueError("pictures for a policy that sees none")
            return list(ids)
        image_id, left, joined = self.reader.image_id, iter(images), list[int]()
        if ids.count(image_id) != len(images):
            raise ValueError(f"{ids.count(image_id)} marks for {len(images)} pictures")
        for one in ids:
            joined += [one] * self.reader.ids(next(left)) if one == image_id else [one]
        return joined

    def _text_ids(self, text: str) -> tuple[int, ...]:
        # verbose: it would warn of what is longer than its own limit, which `context` holds
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # -- checks -----------------------------------------------------------------------------------

    def _check(self) -> str:
        """The prefill. Raises UserError."""
        one, two = Message("user", "first words"), Message("user", "other words")
        place = Message("assistant", _PLACE)
        prompt = self._rendered(_BEFORE)
        head, *tails = self._rendered([*_BEFORE, place, one, place, two]).split(_PLACE)
        opened = prompt.removeprefix(head)
        if not prompt.startswith(head) or (opened and not _PREFILL.fullmatch(opened)):
            raise UserError(
                "the chat template does not begin a conversation as it begins its prompt, so that "
                "an episode cannot be joined of its turns: name another in chat.template"
            )
        if len(tails) != 2 or tails != [self._tail(one).removesuffix(opened), self._tail(two)]:
            raise UserError(
                "the chat template writes a turn otherwise where others come before or behind it, "
                "so that an episode cannot be joined of its turns: name another in chat.template"
            )
        first = self._text_ids(tails[0])[:1]
        if not set(first) <= set(self.stops) or not first:
            ends = self.tokenizer.decode(list(first))
            raise UserError(
                f"the chat template ends a turn with {ends!r}, at which the policy does not stop: "
                "add its id to eos_token_id in the policy's generation_config.json"
            )
        return opened if "</think>" not in opened else ""


@dataclass(slots=True)
class JoinedEpisode:
    """The ids of an episode so far. logprobs: of the sampler, 0 between its turns; None: unasked.
    images: what the ids show, with their hashes."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    images: list[SeenPicture] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All."""
        return self.prompt_ids + self.completion_ids

    def add_turn(self, sampled: Sampled) -> None:
        """What the policy wrote."""
        self._add(sampled.token_ids, action=True)
        if sampled.logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += sampled.logprobs

    def add_observation(self, ids: Sequence[int]) -> None:
        """What came in between. A turn that was cut off has not its own end: then it is this one's,
        and not an action."""
        own_end = self.completion_ids[-1:] == list(ids[:1])
        added = ids[1:] if own_end else ids
        self._add(added, action=False)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(added)

    def show(self, shown: Sequence[Shown], reader: PictureReader | None) -> None:
        """The pictures of ids that were added."""
        if reader is not None:
            self.images += [reader.read(one) for one in shown]
            self.hashes += [one.view.image for one in shown]

    def record(self) -> TokenRecord:
        """As it is stored."""
        return TokenRecord(
            prompt_ids=self.prompt_ids,
            completion_ids=self.completion_ids,
            action_mask=self.action_mask,
            mask_digest=mask_digest(self.action_mask),
            images=self.hashes,
        )

    def rollout(self, trajectory_id: str, group: int, stops: Sequence[int]) -> Rollout:
        """As it is trained on. Raises ValueError where the policy wrote nothing."""
        if not self.completion_ids:
            raise ValueError(f"trajectory {trajectory_id} has no turn of the policy")
        return Rollout(
            group=group,
            prompt_input_ids=self.prompt_ids,
            completion_token_ids=self.completion_ids,
            finish_reason="eos" if self.completion_ids[-1] in stops else "length",
            action_mask=self.action_mask,
            old_logprobs=self.logprobs,
            images=self.images,
            trajectory_id=trajectory_id,
        )

    def _add(self, ids: Sequence[int], *, action: bool) -> None:
        self.completion_ids += ids
        self.action_mask += [action] * len(ids)
