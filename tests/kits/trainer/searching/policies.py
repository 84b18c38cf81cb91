"""Policies of ids: packaged templates, a tiny tokenizer, and scripted samplers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.kits.real_tokenizers import small_qwen
from tests.kits.trainer.images import EOS, IMAGE, PAD, PROCESSOR, tiny
from trainer.chat.config import ChatConfig
from trainer.rl.config import SamplingConfig
from trainer.rl.forward import completion_logprobs
from trainer.rl.sampler import SampledCompletion, SeededPrompt
from trainer.search.config import SightConfig
from trainer.search.images.processor import ImageProcessor
from trainer.search.rollout.episode_tokens import TurnTokenizer

#: For `tests.kits.trainer.images.tiny`: squares of 8 pixels, of which it reads 64 at most.
TINY_SIGHT = {"factor": 8, "min_pixels": 1024, "max_pixels": 4096}
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n<>/_[],.:;'()-?=\"#"


def template(name: str) -> str:
    """Return a chat template as TRL packages it."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@cache
def qwen(name: str) -> Any:
    """Return Qwen3's small tokenizer, with the tokens of its vision models, with a template."""
    tokenizer = deepcopy(small_qwen())
    tokenizer.chat_template = template(name)
    return tokenizer


def turn_ids(
    tokenizer: Any, reader: ImageProcessor | None = None, stop: str = "<|im_end|>", **chat: Any
) -> TurnTokenizer:
    """Return the ids of conversations under the tokenizer's template."""
    stops = [tokenizer.convert_tokens_to_ids(stop)]
    return TurnTokenizer(tokenizer, ChatConfig(**chat), reader, stops)


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter, and the special tokens of
    `tests.kits.trainer.images.tiny`.
    """
    vocab = {letter: 3 + i for i, letter in enumerate(_LETTERS)}
    special = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    seeing = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    named = dict(zip(special, (PAD, EOS, 2), strict=True))
    named |= dict(zip(seeing, range(IMAGE, IMAGE + 4), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab | named, []))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in named])
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = template("qwen2_5_vl")
    return wrapped


def save_tiny(folder: Path, context: int = 8192) -> Path:
    """Write a tiny vision model as it would be published; return `folder`.

    context: ids that it reads.
    """
    model: Any = tiny("qwen2_5_vl")
    model.config.text_config.max_position_embeddings = context
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    return folder


def tiny_reader(model: Any, processor: Any, **sight: Any) -> ImageProcessor:
    """Return the image processor of the tiny model."""
    config = SightConfig.model_validate(TINY_SIGHT | sight)
    return ImageProcessor(processor, model.config, config)


class ToldSampler:
    """A sampler whose text is a function of the prompt's text."""

    def __init__(
        self,
        tokenizer: Any,
        answer: Callable[[str], str],
        end: bool = True,
    ) -> None:
        self.tokenizer, self.answer, self.end = tokenizer, answer, end
        self.calls: list[tuple[SeededPrompt, SamplingConfig]] = []

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool = True
    ) -> SampledCompletion:
        assert gen_cfg.num_samples_per_prompt == 1
        self.calls.append((prompt, gen_cfg))
        text = self.answer(self.tokenizer.decode(prompt.ids))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id] if self.end else ids
        ids = ids[: prompt.max_new_tokens]
        return SampledCompletion(ids, [-0.5] * len(ids) if with_logprobs else None)

    def sync_weights(self, model: Any, update: int) -> None: ...

    def stats(self) -> dict[str, float | int | None]:
        return {}

    def close(self) -> None: ...


class ScriptedStart:
    """Wraps a sampler. The first turns of each episode are scripted, so that images follow them."""

    def __init__(
        self, inner: Any, model: Any, first_texts: Sequence[str], banned_token_ids: Sequence[int]
    ) -> None:
        self.inner, self.model, self.banned_token_ids = inner, model, banned_token_ids
        tokenizer = tiny_tokenizer()
        self.first_ids = [
            [*tokenizer(text, add_special_tokens=False)["input_ids"], EOS] for text in first_texts
        ]

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool = True
    ) -> SampledCompletion:
        turn = list(prompt.ids).count(EOS) // 2 - 1  # behind system and question
        if turn >= len(self.first_ids):
            completion: SampledCompletion = await self.inner.complete(
                prompt, gen_cfg, with_logprobs=with_logprobs
            )
            return completion
        with torch.no_grad():
            logprobs, _, _ = completion_logprobs(
                self.model,
                [prompt.ids],
                [self.first_ids[turn]],
                1.0,
                PAD,
                images=[prompt.images],
                banned_token_ids=self.banned_token_ids,
            )
        return SampledCompletion(self.first_ids[turn], logprobs[0].tolist())

    def sync_weights(self, model: Any, update: int) -> None:
        self.inner.sync_weights(model, update)

    def stats(self) -> dict[str, float | int | None]:
        stats: dict[str, float | int | None] = self.inner.stats()
        return stats

    def close(self) -> None:
        self.inner.close()
