"""Test the demo's role-play policy: a small folder whose template has a single error."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from demo.train.chat_policy import STOP
from demo.train.roleplay.policy import BROKEN_TEMPLATE

POLICY = Path(__file__).parents[3] / "demo/models/roleplay_policy"


def test_the_end_of_a_reply_is_rendered_and_not_learned():
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    assert tokenizer.chat_template == BROKEN_TEMPLATE
    reply = '민아는 웃었다.\n"안녕하세요!"'
    turns = [{"role": "user", "content": "안녕!"}, {"role": "assistant", "content": reply}]
    rendered = tokenizer.apply_chat_template(
        turns, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = list(zip(rendered["input_ids"], rendered["assistant_masks"], strict=True))
    assert tokenizer.decode([i for i, is_trained in pairs if is_trained]) == reply
    assert [is_trained for i, is_trained in pairs if i == STOP] == [0, 0]
    assert tokenizer.eos_token_id == STOP == GenerationConfig.from_pretrained(POLICY).eos_token_id


def test_it_is_small():
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 8_000_000
