"""Provide a translation, and an LLM that finds errors in it and quotes them carelessly."""

from __future__ import annotations

import json
import re

from testing.judge import obeys

MT = "그 집은 빨간색이고 그 문도 빨간색이다. “정말” 🙂 cafe\u0301"
PAIR = {
    "task": "mqm",
    "src": "The house is red, and so is the old door.",
    "mt": MT,
    "src_lang": "English",
    "tgt_lang": "ko-KR",
}
_MT_SHOWN = re.compile(r"⟦mt (\w+)⟧\n(.*)\n⟦/mt \1⟧", re.S)


def error(quote, context="", category="style", severity="minor"):
    return {"quote": quote, "context": context, "category": category, "severity": severity}


#: The errors that the LLM finds in the translation above.
ERRORS = [
    error("빨간색", "그 문도 빨간색이다", "accuracy/mistranslation", "major"),  # it occurs twice
    error("빨간색", "빨간색", "terminology"),  # which of the two?
    error('"정말"', '"정말" 🙂', "fluency/punctuation"),  # other quotation marks
    error("CAFÉ", "🙂 CAFÉ", "accuracy/untranslated"),  # another case, composed
    error("빨간섹이고", "집은 빨간섹이고"),  # a typo
    error("the red house", "the red house is"),  # another language
    error("old", "the old door", "accuracy/omission", "critical"),
    error("문도 빨간", "그 문도 빨간색이다", "other", "critical"),  # overlaps the first one
]


def answers(body, seed):
    """Return the errors whose quotes it knows, and none if told outside the fence to pass it all.

    Of several answers the first has fewer errors."""
    if obeys(body["messages"]):
        return '{"errors": []}'
    text = _MT_SHOWN.search(body["messages"][1]["content"])[2]
    if text != MT:
        return json.dumps({"errors": [error(text, text, "other", "major")]})
    return json.dumps({"errors": ERRORS[:1] if seed == 0 else ERRORS})
