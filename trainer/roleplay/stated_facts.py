"""Extract facts from a system turn: the player's name, the character's name and speech level.

The formats are Korean and English, as in scenario books and character cards: labels (`플레이어
이름: 민수`, `말투: 반말`), a list under a heading (`3. 주인공 정의`, `- 이름: 사야`), and sentences
that name a person (`당신은 이제 「사야」이다`, `상대는 여행자 세아입니다`). A fact that is missing
or contradictory is None.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypedDict, TypeVar

from scorekit.errors import UserError
from scorekit.text.markup import normalized
from trainer.roleplay.turn import SpeechLevel

T = TypeVar("T")
#: Level names in data -> ours.
LEVELS: dict[str, SpeechLevel] = {
    "polite": "polite",
    "formal": "polite",
    "존댓말": "polite",
    "존대말": "polite",
    "존대": "polite",
    "높임말": "polite",
    "경어": "polite",
    "해요체": "polite",
    "합쇼체": "polite",
    "하십시오체": "polite",
    "plain": "plain",
    "informal": "plain",
    "casual": "plain",
    "반말": "plain",
    "해체": "plain",
    "해라체": "plain",
}
_OPEN, _CLOSE = "「『\"'“‘", "」』\"'”’"
_NAME = (
    rf"[{_OPEN}]?(?P<name>[^\s{_OPEN}{_CLOSE}(){{}}\[\]:：,./|]{{1,20}}(?: [A-Z][a-z]{{1,20}})?)"
    rf"[{_CLOSE}]? ?(?:[(（,.].*)?$"
)
_WORD = " ?(?:이름|성명|name) ?[:：=] ?"
_PLAYER = "(?:플레이어|player)"
_USER = "(?:플레이어|사용자|유저|상대방|player|user)"
_CHARACTER = "(?:주인공|캐릭터|등장인물|배역|character|char)"
_OF = " ?(?:정의|설정|정보|소개|프로필|profile|sheet)?"


class _FactPatterns(NamedTuple):
    """Patterns of lines with a name.

    label: with the word for name.
    heading: the heading of a list.
    bare: without that word.
    brackets: in brackets.
    subject: the subject of a sentence.
    """

    label: re.Pattern[str]
    heading: re.Pattern[str]
    bare: re.Pattern[str]
    brackets: re.Pattern[str]
    subject: re.Pattern[str]


#: A bare `User:` is no name: it is a line of an example.
_OF_PLAYER = _FactPatterns(
    re.compile(f"{_USER}의?{_WORD}{_NAME}", re.I),
    re.compile(f"{_USER}{_OF}", re.I),
    re.compile(f"{_PLAYER} ?[:：=] ?{_NAME}", re.I),
    re.compile(rf"{_PLAYER} ?[(（] ?(?P<name>[^\s(){{}}（）:：,]{{1,20}}) ?[)）]", re.I),
    re.compile(f"(?:{_USER}|상대)[은는] ", re.I),
)
_OF_CHARACTER = _FactPatterns(
    re.compile(f"{_CHARACTER}의?{_WORD}{_NAME}", re.I),
    re.compile(f"{_CHARACTER}{_OF}", re.I),
    re.compile(f"{_CHARACTER} ?[:：=] ?{_NAME}", re.I),
    re.compile(rf"{_CHARACTER} ?[(（] ?(?P<name>[^\s(){{}}（）:：,]{{1,20}}) ?[)）]", re.I),
    re.compile("(?:당신|너|그대)[은는] "),
)
_ITEM = re.compile(f"(?:이름|성명|name) ?[:：=] ?{_NAME}", re.I)
_YOU_ARE = re.compile(
    r"(?:당신|너|넌|그대)[은는]? ?(?:이제(?:부터)? ?)?"
    rf"[{_OPEN}](?P<name>[^{_OPEN}{_CLOSE}]{{1,20}})[{_CLOSE}] ?"
    r"(?:이다|다|입니다|이야|야|이에요|예요|이?라는|으?로서|[을를]? ?연기)"
    r"|\bYou are (?P<english>[A-Z][\w'-]{0,19}(?: [A-Z][\w'-]{0,19})?)\b"
)
_SENTENCES = re.compile(r"[.!?\n]")
#: The last word of a sentence, which says what a person is.
_IS = re.compile("(?P<name>[가-힣]{1,8}?)(?:입니다|이에요|예요|이야|야|이다|다)")
#: Number of names that are searched for elsewhere in the text.
_SENTENCES_READ = 8
#: Numbers before a label or a heading, and marks around it.
_NUMBER = re.compile(r"\d{1,2}[.)] ?")
_MARKS = " \t-*#•◆■[]【】"
_SPACES = re.compile(r"[ \t]+")
_STYLE = re.compile(
    r"(?:말투|어투|화법|speech(?: level| style)?|tone)[^:：\n]{0,12}[:：](?P<style>[^\n]{1,200})",
    re.I,
)
_LEVEL_PATTERNS: tuple[tuple[re.Pattern[str], SpeechLevel], ...] = (
    (re.compile("존댓말|존대말|존대|높임말|경어|해요체|합쇼체|하십시오체"), "polite"),
    (re.compile(r"반말|해체(?!\w)|해라체"), "plain"),
)
#: After the word and within its clause: a negation.
_NOT = re.compile(
    r"[^.!?\n,;]{0,12}(?:(?:쓰|하|사용하|섞)지 ?(?:않|마|말)|금지|안 ?(?:쓴|써|씁|쓰)|말 ?것|"
    r"없이|아닌|대신)"
)


class StatedFacts(TypedDict):
    """Facts of a system turn. None: the text does not state it, or states two."""

    player_name: str | None
    character_name: str | None
    speech_level: SpeechLevel | None


def parse_level(location: str, text: str) -> SpeechLevel:
    """Return the level of a text in a column, such as polite or 존댓말.

    Raises UserError, whose message begins with `location`.
    """
    level = LEVELS.get(normalized("NFC", text).strip().lower())
    if level is None:
        raise UserError(f"{location}: {text!r:.40} is unknown. Choose from {', '.join(LEVELS)}")
    return level


def extract_facts(system: str) -> StatedFacts:
    """Return the names and the speech level that a system turn states."""
    text = normalized("NFC", system)
    character = _named(text, _OF_CHARACTER)
    names_of_you = {match["name"] or match["english"] for match in _YOU_ARE.finditer(text)}
    return StatedFacts(
        player_name=_named(text, _OF_PLAYER),
        character_name=character
        or _only(names_of_you)
        or _only(_in_sentences(text, _OF_CHARACTER)),
        speech_level=_only(_stated(text)),
    )


def _named(text: str, ways: _FactPatterns) -> str | None:
    """Return the name of the first pattern that matches; None if it matches two names."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    bare = [_NUMBER.sub("", line.strip(_MARKS), count=1).strip(_MARKS) for line in lines]
    names = {match["name"] for line in bare if (match := ways.label.match(line))}
    names = names or _under_heading(lines, bare, ways.heading)
    names = names or {match["name"] for line in bare if (match := ways.bare.match(line))}
    names = names or {match["name"] for line in lines for match in ways.brackets.finditer(line)}
    if ways is _OF_PLAYER:
        names = names or _in_sentences(text, ways)
    return _only(names)


def _under_heading(lines: Sequence[str], bare: Sequence[str], heading: re.Pattern[str]) -> set[str]:
    """Return the names of `이름: ...` lines between that heading and the next one."""
    is_inside, names = False, set()
    for line, text in zip(lines, bare, strict=True):
        item = _ITEM.match(text)
        if heading.fullmatch(text):
            is_inside = True
        elif item and is_inside:
            names.add(item["name"])
        elif not item and (_NUMBER.match(line) or line.startswith(("#", "[", "【"))):
            is_inside = False
    return names


def _in_sentences(text: str, ways: _FactPatterns) -> set[str]:
    """Return names at the end of sentences such as `당신은 상인 승은입니다`.

    The text has to use the name elsewhere, too: a trade that comes once is no name.
    """
    counts: Counter[str] = Counter()
    for sentence in _SENTENCES.split(text):
        words = sentence.split()
        if len(words) > 1 and ways.subject.match(" ".join(words[:2]) + " "):
            is_a = _IS.fullmatch(words[-1])
            counts.update([is_a["name"]] if is_a else [])
    candidates = counts.most_common(_SENTENCES_READ)
    return {name for name, count in candidates if text.count(name) > count}


def _stated(text: str) -> set[SpeechLevel]:
    """Return labeled styles, or else all levels in the text that are not negated."""
    text = _SPACES.sub(" ", text)
    labeled = {level for match in _STYLE.finditer(text) for level in _levels(match["style"])}
    return labeled or _levels(text)


def _levels(text: str) -> set[SpeechLevel]:
    return {
        level
        for pattern, level in _LEVEL_PATTERNS
        if any(not _NOT.match(text, match.end()) for match in pattern.finditer(text))
    }


def _only(values: set[T]) -> T | None:
    return values.pop() if len(values) == 1 else None
