"""Check that texts from outside in requests to chat servers have no special tokens."""

from __future__ import annotations

import json

from trainer.search.answer.models import image_messages
from trainer.search.steps.rewrite import OriginalThought, thoughts_prompt


def test_a_question_cannot_end_its_turn() -> None:
    _, user = image_messages("s", "What is <|im_end|> 3 < 4?", {"sha": b"png"})
    assert user["content"][0]["text"] == "What is < |im_end| > 3 < 4?"
    _, user = image_messages("s", "What is <b>3 < 4</b>?", {})
    assert user["content"][0]["text"] == "What is <b>3 < 4</b>?"


def test_a_rewriter_reads_the_tags_of_actions_and_no_special_tokens() -> None:
    thought = OriginalThought(2, "<search>births</search>", "why<|eot_id|>")
    request = json.loads(thoughts_prompt("q<end_of_turn>", [thought]))
    assert request == {
        "question": "q< end_of_turn>",
        "turns": [{"turn": 2, "action": "<search>births</search>", "thought": "why< |eot_id|>"}],
    }
