"""Check that generation markers keep a template's text and enclose each reply."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl

from scorekit.errors import UserError
from tests.kits.trainer.chat import CHATML, byte_tokenizer, chat_tokenizer, template_text, turns
from trainer.chat.config import ChatConfig
from trainer.chat.render import render, render_spans, tokenize
from trainer.chat.template_check import (
    has_markers,
    mark_texts,
    repaired_template,
    training_template,
    without_markers,
)

NAMES = sorted(path.stem for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
DIALOGUE = turns("안녕?", "네, 안녕하세요 😀", "왜?", "  그냥요 뷁\n", system="시스템")
CHAT = ChatConfig()


_tokenizer = cache(byte_tokenizer)


def text_of(template: str, row: Any, chat: ChatConfig = CHAT, **options: Any) -> str:
    """Return the rendered text, or the error message of a template that refuses the row."""
    try:
        return render(_tokenizer(template), row, chat, **options)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", NAMES)
def test_no_character_of_a_template_changes(name: str) -> None:
    text = template_text(name)
    for chat in (CHAT, ChatConfig(enable_thinking=False)):
        for row in (DIALOGUE, DIALOGUE[1:], DIALOGUE[1:3], DIALOGUE[:2]):
            for prompt in (False, True):
                expected = text_of(text, row, chat, generation_prompt=prompt)
                assert text_of(mark_texts(text), row, chat, generation_prompt=prompt) == expected
    assert text_of(without_markers(text), DIALOGUE) == text_of(text, DIALOGUE)


@pytest.mark.parametrize(
    "edge", ["\n\n{0}", "  {0}", "{0}\n\n", "{0}  ", "\n {0}\n ", "{{ '' }}{0}"]
)
def test_spaces_at_the_ends_of_a_template_stay(edge: str) -> None:
    for text in (CHATML.strip(), template_text("qwen3"), template_text("gemma3")):
        changed = edge.replace("{0}", text)
        assert text_of(mark_texts(changed), DIALOGUE) == text_of(changed, DIALOGUE)


@pytest.mark.parametrize(
    "marker", ["{% generation %}", "{%- generation %}", "{%-generation-%}", "{%+ generation -%}"]
)
def test_markers_are_known_in_every_form(marker: str) -> None:
    text = f"a {marker}b{{% endgeneration %}}"
    assert has_markers(text) and not has_markers(without_markers(text))
    assert not has_markers(f"{{# not {marker}, which is a comment #}}")


def test_the_template_that_trl_knows_is_taken_where_it_is_right() -> None:
    trl_template = training_template(chat_tokenizer("llama3"), [DIALOGUE], CHAT)
    assert trl_template.template == template_text("llama3_training")
    assert "TRL" in trl_template.origin
    # TRL's template also labels a "\n".
    marked_template = training_template(chat_tokenizer("qwen2_5"), [DIALOGUE], CHAT)
    assert marked_template.template == mark_texts(template_text("qwen2_5"))


def test_a_template_of_ones_own_is_marked_too() -> None:
    custom_template = CHATML.replace("<|im_start|>", "### ").replace("assistant", "봇")
    custom_template = custom_template.replace(
        "+ message['role'] +", "+ ('봇' if message['role'] != 'user' else '나') +"
    )
    tokenizer = byte_tokenizer(custom_template)
    trained_template = training_template(tokenizer, [DIALOGUE[1:]], CHAT)
    rendered = render_spans(tokenizer, DIALOGUE[1:], CHAT, template=trained_template.template)
    assert [rendered.text[begin:end] for begin, end in rendered.spans] == [
        "네, 안녕하세요 😀<|im_end|>",
        "  그냥요 뷁\n<|im_end|>",
    ]


def test_the_mask_has_every_byte_of_the_last_character() -> None:
    """Check that each token of a span's last character is trained."""
    bare = CHATML.replace(" + '<|im_end|>\\n'", "").replace("<|im_start|>", "\n")
    tokenizer = byte_tokenizer(mark_texts(bare))
    row = turns("안녕", "뷁")
    encoded = tokenizer.apply_chat_template(
        row, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    tokens = tokenize(tokenizer, render_spans(tokenizer, row, CHAT))
    assert encoded["input_ids"] == tokens.ids
    reply_tokens = [
        token for token, owner in zip(tokens.ids, tokens.owners, strict=True) if owner >= 0
    ]
    assert tokenizer.decode(reply_tokens) == "뷁" and len(reply_tokens) == 3
    assert sum(encoded["assistant_masks"]) == 3


@pytest.mark.parametrize("name", ["llama3_training", "gemma3_training", "qwen3_training"])
def test_where_a_span_ends_in_ascii_the_mask_is_that_of_transformers(name: str) -> None:
    tokenizer = byte_tokenizer(template_text(name))
    encoded = tokenizer.apply_chat_template(
        DIALOGUE, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    tokens = tokenize(tokenizer, render_spans(tokenizer, DIALOGUE, CHAT))
    assert encoded["input_ids"] == tokens.ids
    assert encoded["assistant_masks"] == [int(owner >= 0) for owner in tokens.owners]


def test_wrong_markers_are_replaced() -> None:
    wrong = template_text("qwen2_5_training")
    repaired = repaired_template(byte_tokenizer(wrong), [DIALOGUE], CHAT, wrong)
    rendered = render_spans(byte_tokenizer(), DIALOGUE, CHAT, template=repaired.template)
    assert rendered.text[slice(*rendered.spans[0])] == "네, 안녕하세요 😀<|im_end|>"
    assert rendered.text == text_of(wrong, DIALOGUE)
