"""A searcher without weights, which follows a short list of rules.

It sees only the images that it receives (`demo.search.reading`), and knows no answers. Its
trajectories are the cold start of a policy, and the baseline that a policy has to beat.
"""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from demo.search.reading import Box, Reader, Sight, is_legible

#: Searches and turns after which it gives itself content with what it has.
_MOST_SEARCHES, _MOST_TURNS = 5, 9
_WORD = re.compile(r"[^\W_]+(?:[.,]\d+)*", re.UNICODE)
_STOP = frozenset(
    [
        "a",
        "an",
        "and",
        "at",
        "average",
        "by",
        "could",
        "counted",
        "did",
        "do",
        "does",
        "for",
        "from",
        "had",
        "has",
        "have",
        "hope",
        "how",
        "in",
        "is",
        "it",
        "its",
        "large",
        "long",
        "many",
        "more",
        "most",
        "much",
        "of",
        "on",
        "or",
        "one",
        "people",
        "per",
        "than",
        "that",
        "the",
        "there",
        "to",
        "was",
        "were",
        "what",
        "when",
        "where",
        "which",
        "who",
        "whose",
        "with",
        "each",
        "average",
        "year",
        "years",
    ]
)
_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_HANGUL = re.compile("[가-힣]")


def next_turn(messages: Sequence[Mapping[str, Any]], reader: Reader, rng: random.Random) -> str:
    """Return the next turn of an episode, in the tags of the prompt.

    It depends on the conversation and on `rng`. Only `rng` differs between two episodes of one
    question.
    """
    question = asked_question(messages)
    words = [word for word in _WORD.findall(question) if word.lower() not in _STOP]
    keys = _key_words(words)
    images = list(shown_images(messages))
    sights = [reader.locate(png) for png in images]
    located = [sight for sight in sights if sight is not None]
    queries = [q for m in messages if m["role"] == "assistant" for q in _QUERY.findall(_text(m))]
    turns = sum(message["role"] == "assistant" for message in messages)
    seen_keys = {key for key in keys if any(_shows_word(sight, key) for sight in located)}
    observation = _text(messages[-1])
    if "1 turn left." in observation.splitlines():
        return _turn("This is my last turn.", complete_tag())
    if turns >= _MOST_TURNS or (located and seen_keys == set(keys)):
        return _turn("What was asked for stands on what I was shown.", complete_tag())
    last = sights[-1] if sights else None
    if last is not None and (box := small_print(last)) and not _is_crop(located[:-1], last):
        hidden_keys = sorted(set(keys) - {key for key in keys if not _page_has_word(last, key)})
        if hidden_keys or rng.random() < 0.5:
            return _turn("Some of this page is too small to read.", crop_tag(box, last))
    if len(queries) >= _MOST_SEARCHES:
        return _turn("More searches have not helped.", complete_tag())
    query = _query(words, keys, queries, rng)
    missing = ", ".join(sorted(set(keys) - seen_keys)) or "the figures"
    return _turn(f"Not seen yet: {missing}.", f"<search>{query}</search>")


def _turn(thought: str, action: str) -> str:
    return f"<think>{thought}</think>\n{action}"


def complete_tag() -> str:
    """Return the tag that ends an episode."""
    return "<search_complete>true</search_complete>"


def crop_tag(box: Box, sight: Sight) -> str:
    """Return the tag that crops a box of the page, in pixels of the image that shows it."""
    x1, y1, _, _ = sight.region
    sides = [(box[0] - x1), (box[1] - y1), (box[2] - x1), (box[3] - y1)]
    return f"<bbox>[{', '.join(str(max(0, round(s * sight.scale))) for s in sides)}]</bbox>"


def asked_question(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the question of a conversation."""
    first = next(message for message in messages if message["role"] == "user")
    return _text(first).removeprefix("Question: ")


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def shown_images(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the images of a conversation, PNG."""
    for message in messages:
        if isinstance(message["content"], str):
            continue
        for part in message["content"]:
            if part["type"] == "image_url":
                yield base64.b64decode(part["image_url"]["url"].partition(",")[2])


def _key_words(words: Sequence[str]) -> list[str]:
    """Return the words that a page with the answer must have: names and numbers.

    Korean names cannot be recognized, so all Korean words of two or more syllables count, without
    their particle.
    """
    telling = []
    for index, word in enumerate(words):
        if _HANGUL.search(word):
            stem = re.sub("(에서|에는|으로|의|은|는|이|가|을|를|과|와|에|로|도)$", "", word)
            telling += [stem] if len(stem) > 1 and index < len(words) - 1 else []
        elif any(letter.isdigit() for letter in word) or (index and word[0].isupper()):
            telling.append(word)
    return telling or list(words)


def _shows_word(sight: Sight, word: str) -> bool:
    """Return whether an image shows a word legibly."""
    return any(
        word.lower() in text.lower() and is_legible(sight, box) for text, box in sight.page.lines
    )


def _page_has_word(sight: Sight, word: str) -> bool:
    """Return whether the image's page has a word at all, even if it is too small to read."""
    return any(word.lower() in text.lower() for text, _ in sight.page.lines)


def small_print(sight: Sight) -> Box | None:
    """Return the box around all text that the image shows too small to read."""
    x1, y1, x2, y2 = sight.region
    small = [
        box
        for _, box in sight.page.lines
        if x1 <= box[0] and y1 <= box[1] and box[2] <= x2 and box[3] <= y2
        if not is_legible(sight, box)
    ]
    if not small:
        return None
    left, top = min(b[0] for b in small), min(b[1] for b in small)
    return left, top, max(b[2] for b in small), max(b[3] for b in small)


def _is_crop(before: Sequence[Sight], last: Sight) -> bool:
    """Return whether the last image shows part of a page that was shown before."""
    return any(sight.page is last.page for sight in before)


def _query(
    words: Sequence[str], keys: Sequence[str], previous_queries: Sequence[str], rng: random.Random
) -> str:
    """Return a query that was not sent before: all words, then the key words, then a random
    subset.
    """
    tried = [" ".join(words), " ".join(keys)]
    for _ in range(20):
        subset = [word for word in words if word in keys or rng.random() < 0.5]
        rng.shuffle(subset)
        tried.append(" ".join(subset))
    return next((query for query in tried if query and query not in previous_queries), tried[0])
