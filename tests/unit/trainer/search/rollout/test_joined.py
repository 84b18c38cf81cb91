"""Check that joined ids equal full renders and that masks cover the policy's tokens."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.searching.policies import qwen, turn_ids
from trainer.chat.config import ChatConfig
from trainer.chat.render import render
from trainer.rl.sampler import SampledCompletion
from trainer.search.images.processor import ImageProcessor
from trainer.search.images.views import ShownImage
from trainer.search.records import ImageView, mask_digest
from trainer.search.rollout.episode_tokens import EpisodeTokens, TurnTokenizer
from trainer.search.rollout.prompt import Message, template_messages

KEEPING_TEMPLATES = ["qwen2_5", "qwen2_5_vl", "qwen3_vl", "qwen3_instruct_2507"]
TURNS = [
    "<think>why</think>\n<search>births 1990</search>",
    " leading and trailing ",
    "ends in lines\n\n",
    "",
    "<think>왜</think><search>출생아 수 🙂</search>",
    "no tags",
]
BEFORE = [Message("system", "You search."), Message("user", "Question: 몇 명?")]
OBSERVED = Message("user", "Page deck_1, rank 1 of 3.\n6 turns left.")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def sampled(tokenizer: Any, text: str, end: bool = True) -> SampledCompletion:
    ids = ids_of(tokenizer, text) + ([tokenizer.eos_token_id] if end else [])
    return SampledCompletion(ids, [-0.5] * len(ids))


def join(
    ids: TurnTokenizer, turns: list[SampledCompletion], observed: Message = OBSERVED
) -> EpisodeTokens:
    joined = EpisodeTokens(ids.prompt(BEFORE))
    for i, turn in enumerate(turns):
        if i:
            joined.add_observation(ids.observation(observed))
        joined.add_turn(turn)
    return joined


@pytest.mark.parametrize("name", KEEPING_TEMPLATES)
def test_joined_ids_are_those_of_the_whole_conversation(name) -> None:
    tokenizer = qwen(name)
    ids = turn_ids(tokenizer)
    joined = join(ids, [sampled(tokenizer, text) for text in TURNS])
    messages = [*BEFORE]
    for i, text in enumerate(TURNS):
        messages += ([OBSERVED] if i else []) + [Message("assistant", text)]
    full_text = render(tokenizer, template_messages(messages), ChatConfig()).rstrip("\n")
    assert joined.ids == ids_of(tokenizer, full_text)
    assert ids.serving_note() is None


@pytest.mark.parametrize("name", [*KEEPING_TEMPLATES, "qwen3", "qwen3_5_think"])
def test_the_mask_lies_on_what_was_sampled_and_on_nothing_else(name) -> None:
    """Check masks. The original decoded and re-encoded texts, which can shift a mask."""
    tokenizer = qwen(name)
    odd_ids = [[5, 17, 6], [tokenizer.eos_token_id], ids_of(tokenizer, "가")[:1]]  # not canonical
    turns = [
        SampledCompletion([*ids, tokenizer.eos_token_id], [-1.0] * (len(ids) + 1))
        for ids in odd_ids
    ]
    joined = join(turn_ids(tokenizer), turns)
    pairs = zip(joined.completion_ids, joined.action_mask, strict=True)
    written = [token for token, action in pairs if action]
    assert written == [token for turn in turns for token in turn.token_ids]
    assert joined.completion_ids[-1] == tokenizer.eos_token_id and joined.action_mask[-1]
    record = joined.record()
    assert record.mask_digest == mask_digest(joined.action_mask)
    rollout = joined.rollout("t", 4, [tokenizer.eos_token_id])
    assert rollout.old_logprobs is not None and rollout.finish_reason == "eos"
    logprobs = [
        v for v, action in zip(rollout.old_logprobs, rollout.actions, strict=True) if action
    ]
    assert logprobs == [-1.0] * len(written) and rollout.trajectory_id == "t"


def test_a_turn_that_was_cut_off_gets_its_end_outside_the_mask() -> None:
    tokenizer = qwen("qwen2_5_vl")
    cut = sampled(tokenizer, "<think>why", end=False)
    joined = join(turn_ids(tokenizer), [cut, cut])
    end = joined.completion_ids.index(tokenizer.eos_token_id)
    assert end == len(cut.token_ids) and not joined.action_mask[end]
    assert joined.rollout("t", 0, [tokenizer.eos_token_id]).finish_reason == "length"
    assert tokenizer.decode(joined.ids).count("<think>why<|im_end|>\n<|im_start|>user\n") == 1


def test_a_template_that_drops_earlier_thinking_is_told_and_training_keeps_it() -> None:
    tokenizer = qwen("qwen3")
    ids = turn_ids(tokenizer)
    joined = join(ids, [sampled(tokenizer, text) for text in TURNS[:2]])
    assert "<think>why</think>" in tokenizer.decode(joined.ids)
    assert "drops the thinking" in (ids.serving_note() or "")


def test_a_think_block_that_the_prompt_has_opened_belongs_to_the_turn() -> None:
    tokenizer = qwen("qwen3_5_think")
    ids = turn_ids(tokenizer)
    text = ids.text(sampled(tokenizer, "why</think><search>a</search>").token_ids)
    assert text == "<think>\nwhy</think><search>a</search>"
    assert ids.observation(OBSERVED)[-len(ids_of(tokenizer, "<think>\n")) :] == ids_of(
        tokenizer, "<think>\n"
    )
    closed = turn_ids(qwen("qwen3"), enable_thinking=False)
    assert closed.prefill == ""


_MESSAGE = "<|im_start|>{{ m.role }}\n{{ m.content }}"
_GENERATION_PROMPT = "<|im_start|>assistant{{ '\\n' }}"
FAULTY = {
    "writes a turn differently": (  # it numbers the messages
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} {{ loop.index }}"
        "<|im_end|>\n{% endfor %}" + _GENERATION_PROMPT
    ),
    "begins a conversation differently .*": (  # it omits old messages
        "{% for m in messages %}{% if loop.first or loop.revindex < 4 %}"
        + _MESSAGE
        + "<|im_end|>\n{% endif %}{% endfor %}"
        + _GENERATION_PROMPT
    ),
    "begins a conversation differently": (  # the generation prompt has another role
        "{% for m in messages %}" + _MESSAGE + "<|im_end|>\n{% endfor %}<|im_start|>bot{{ '\\n' }}"
    ),
    "does not stop": "{% for m in messages %}" + _MESSAGE + "\n{% endfor %}" + _GENERATION_PROMPT,
}


@pytest.mark.parametrize("defect", FAULTY)
def test_a_template_that_cannot_be_joined_is_refused(defect) -> None:
    tokenizer = deepcopy(qwen("qwen2_5"))
    tokenizer.chat_template = FAULTY[defect]
    with pytest.raises(UserError, match=f"the chat template .*{defect}"):
        turn_ids(tokenizer)


def test_an_episode_without_a_turn_is_not_trained_on() -> None:
    with pytest.raises(ValueError, match="trajectory t has no turn"):
        EpisodeTokens([1, 2]).rollout("t", 0, [2])


def test_log_probabilities_that_nobody_asked_for_are_none() -> None:
    tokenizer = qwen("qwen2_5")
    silent = SampledCompletion(sampled(tokenizer, "a").token_ids, None)
    joined = join(turn_ids(tokenizer), [silent, sampled(tokenizer, "b"), silent])
    assert joined.rollout("t", 0, [tokenizer.eos_token_id]).old_logprobs is None


class Reader(ImageProcessor):
    """A fake image processor with two or three ids per image."""

    def __init__(self, tokenizer: Any) -> None:
        self.image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def ids(self, image: ShownImage) -> int:
        return 3 if image.png == b"three" else 2


def shown_image(png: bytes) -> ShownImage:
    view = ImageView(
        kind="page",
        page_id="p",
        width=1,
        height=1,
        region=(0, 0, 1, 1),
        page_width=1,
        page_height=1,
        image="",
    )
    return ShownImage(view, png)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_each_picture_has_its_ids_and_the_texts_of_pages_have_none(name) -> None:
    tokenizer = qwen(name)
    ids = turn_ids(tokenizer, Reader(tokenizer))
    observed = Message("user", "seen", (shown_image(b"three"), shown_image(b"two")))
    text = tokenizer.decode(ids.observation(observed))
    assert text == (
        "<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|image_pad|>"
        "<|vision_end|><|vision_start|><|image_pad|><|image_pad|><|vision_end|>seen<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    token_ids = ids.observation(Message("user", "a page says <|image_pad|>"))
    assert "says < |image_pad|>" in tokenizer.decode(token_ids)  # no image belongs to it
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") not in token_ids
    with pytest.raises(ValueError, match="no image processor"):
        turn_ids(tokenizer).observation(observed)


def test_turns_of_an_episode_have_versions_of_their_own() -> None:
    tokenizer = qwen("qwen2_5")
    turns = [
        replace(turn, versions=[version] * len(turn.token_ids))
        for version, turn in [(4, sampled(tokenizer, "a b")), (6, sampled(tokenizer, "c"))]
    ]
    joined = join(turn_ids(tokenizer), turns)
    rollout = joined.rollout("t", 0, [tokenizer.eos_token_id])
    assert rollout.weight_versions is not None
    pairs = list(zip(rollout.weight_versions, rollout.actions, strict=True))
    first, second = (len(turn.token_ids) for turn in turns)
    assert pairs[:first] == [(4, True)] * first and pairs[-second:] == [(6, True)] * second
    assert set(pairs[first:-second]) == {(4, False)}
    unknown = join(turn_ids(tokenizer), [turns[0], sampled(tokenizer, "c")])
    assert unknown.rollout("t", 0, [tokenizer.eos_token_id]).weight_versions is None


def test_tokens_of_the_policy_in_a_question_or_on_a_page_are_text() -> None:
    tokenizer = deepcopy(qwen("qwen3"))  # its template has <think>
    tokenizer.add_special_tokens({"additional_special_tokens": [">>STOP<<", "<pre>"]})
    ids = turn_ids(tokenizer)
    stops = set(tokenizer.convert_tokens_to_ids([">>STOP<<", "<pre>"]))
    system = Message("system", "Write <think>why</think> and <search>what</search>.")
    token_ids = ids.prompt([system, Message("user", "Question: a >>STOP<< <pre>b")])
    assert not stops & set(token_ids) and "Question: a > >STOP<< < pre>b" in tokenizer.decode(
        token_ids
    )
    assert system.text in tokenizer.decode(token_ids)  # the tags of the actions are meant
    assert not stops & set(ids.observation(Message("user", "(1, 2) <pre> >>STOP<<")))
    assert ids.observation(OBSERVED) == turn_ids(qwen("qwen3")).observation(OBSERVED)
