"""Meta text: what a chat model says about its work, before, after or instead of a translation.

Each function is pure and returns the matching text, or None. If the source says the same, in any
language known here, its translation may, too: a talk may begin with "I'm sorry, but I can't". So
each pattern has an excuse, which is searched in the source. The patterns are in meta_text.toml.

Structure is stronger evidence than phrases: words about translating, a line, sentence, bracket or
label that the source lacks. `python -m bench.filters` measures what is detected.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from scorekit.text.pattern_rows import add_parts, compile_patterns
from scorekit.text.sentences import split_sentences

TABLE = Path(__file__).parent / "meta_text.toml"
#: Characters of a source that are searched for an excuse, and of a translation for a tail.
_HEAD = 300


def _read_patterns() -> dict[str, re.Pattern[str]]:
    data = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    parts: dict[str, str] = {}
    add_parts(parts, data["parts"])
    return compile_patterns(data["patterns"], parts)


PATTERNS = _read_patterns()


def meta_phrase(src: str, mt: str) -> str | None:
    """Return what is said about the translation or to the client at its start, unless the source
    does. Examples: "Here is the translation:", "번역:", "네, 알겠습니다."."""
    head = src[:_HEAD]
    for name in ("label", "aside"):
        if (match := PATTERNS[name].match(mt)) and not _is_excused(name, head):
            return match.group().strip()
    if clause := PATTERNS["clause"].match(mt):
        for name in ("names_language", "announces"):
            if PATTERNS[name].search(clause.group()) and not _is_excused(name, head):
                return clause.group().strip()
    line = mt.lstrip()[:_HEAD].partition("\n")[0]
    if (match := PATTERNS["talk"].search(line)) and not _is_excused("talk", src):
        return line[: match.end()]
    match = PATTERNS["assent"].match(mt)
    if not match or _is_excused("assent", src[:80]) or _sentences(mt) <= _sentences(src):
        return None
    return match.group().strip()


def refusal(src: str, mt: str) -> str | None:
    """Return the start of a refusal to translate, unless the source has one.
    Examples: "I'm sorry, but I can't help with that", "죄송합니다만, 이 요청은"."""
    for name in ("regret", "decline", "request"):
        if match := PATTERNS[name].match(mt):
            return None if _is_excused(name, src[:_HEAD]) else match.group().strip()
    return None


def added_note(src: str, mt: str) -> str | None:
    """Return the start of an addition after the translation ("Note: ...", "(직역: ...)", a second
    wording, "Let me know if ..."), unless the source has one; or the last line, if the source has
    fewer lines."""
    for name, searched, count in (
        ("talk", src, None),
        ("note", src, None),
        ("between", src, None),
        ("gloss", src, _brackets),
        ("tail", src[-_HEAD // 2 :], _chat_sentences),
    ):
        start = max(0, len(mt) - _HEAD) if name == "tail" else 0
        matches = PATTERNS[name].finditer(mt, start)
        match = next((m for m in matches if _follows_text(mt, m.start())), None)
        if match and not _is_excused(name, searched) and (count is None or count(mt) > count(src)):
            return match.group().strip()
    return mt.strip().rpartition("\n")[2] if _has_more_lines(src, mt) else None


def _is_excused(name: str, searched: str) -> bool:
    return PATTERNS[f"{name}_excuse"].search(searched) is not None


def _sentences(text: str) -> int:
    return sum(len(split_sentences(line)) for line in text.split("\n") if line.strip())


def _chat_sentences(text: str) -> int:
    """Return the number of sentences, which an emoji or `~` before a space may end, too."""
    return _sentences(PATTERNS["soft_ends"].sub(". ", text))


def _brackets(text: str) -> int:
    return sum(map(text.count, "(（[【"))


def _has_more_lines(src: str, mt: str) -> bool:
    """Return True if a source of one line became more, or one of several has a further
    paragraph."""
    lines = [line.strip() for line in src.strip().split("\n")]
    mt_lines = [line.strip() for line in mt.strip().split("\n")]
    if len(lines) == 1:
        return bool(lines[0]) and len(mt_lines) > 1
    return _paragraphs(mt_lines) > _paragraphs(lines)


def _paragraphs(lines: list[str]) -> int:
    return sum(bool(line) and not before for before, line in zip(["", *lines], lines, strict=False))


def _follows_text(text: str, position: int) -> bool:
    return any(char.isalnum() for char in text[:position])
