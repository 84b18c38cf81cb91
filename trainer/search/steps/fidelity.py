"""Check a rewritten row: only the words of its thoughts may differ, and not what they mean.

Only words of the two lists below may be added or removed: they are grammar, or words about the
search itself. All other words are content: a name, a number, a quantity, a position on a page, a
negation. A thought with a statement must keep all content in order. A thought that only names a
goal may lose or reorder content, but not add any. The lists are for English and Korean; in other
languages almost only the original passes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from scorekit.numeric import above
from scorekit.text.markup import normalized
from scorekit.text.writing_scripts import SCRIPTS
from trainer.search.actions import Invalid, parse
from trainer.search.steps.targets import has_tag, invented, plain, thought_spans, thoughts

#: How a rewritten thought departs from its original.
Departure = Literal["another language", "new content", "another claim"]

#: The reasons why a rewritten row is invalid.
Breach = Literal[
    "other structure",
    "another action",
    "a tag in a thought",
    "a claim of seeing",
    "an invented observation",
    "unreadable",
    "empty",
    "too long",
    Departure,
]


_SHORT = 200  # letters that are always allowed

_IMAGE_WORD = (
    "(?:image|picture|photo|photograph|screenshot|figure|chart|graph|diagram|slide|table|map"
    "|crop)s?"
)


_PAGE = rf"(?:{_IMAGE_WORD}|(?:page|document|screen|title|caption|legend|panel|plot|view)s?)"


_SHOWS = (
    "(?:shows?|showed|showing|displays?|displayed|depicts?|reveals?|says|states?|indicates?"
    "|contains?|lists?|illustrates?|presents?|reads|mentions?|gives|confirms?)"
)


_DET = r"(?:(?:the|this|that|these|those|an?|its|my)\s+)?"


_KO_PAGE = (
    "(?:이미지|그림|사진|화면|슬라이드|페이지|표|차트|그래프|도표|문서|캡처|지도|스크린샷)들?"
)


#: Name -> pattern of a claim, for texts from `plain`.
CLAIMS: Final[Mapping[str, re.Pattern[str]]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "i see": r"\b(?:i|we|you|one)(?:[’']ve)?\s+(?:(?:can|could|now|clearly|already|do|did|just"
        r"|also|have|actually)\s+)*(?:see|saw|seen|observe|observed|notice|noticed|spot|spotted"
        r"|read|make out|made out)\b",
        "can be seen": r"\b(?:can|could|may) (?:\w+ )?be (?:\w+ )?(?:seen|read|observed)\b"
        r"|\b(?:as|is|are|was|were) (?:\w+ )?(?:seen|observed)\b",
        "the image shows": rf"\b{_PAGE}(?: \w+){{0,3}}? {_SHOWS}\b",
        "it shows": rf"\b(?:it|this|that|which|here)(?: \w+)? {_SHOWS}\b",
        "in the image": rf"\b(?:in|on|from|within|by)\s+{_DET}(?:\w+\s+){{0,4}}?{_IMAGE_WORD}\b",
        "visible": r"\b(?:visibl[ey]|legibl[ey]|displayed|depicted|pictured|illustrated|shown)\b",
        "looking at": r"\b(?:looking|look) at (?:the|this|that|these)\b",
        "보인다": r"(?<![가-힣])(?:돋|엿|들여다)?보(?:인(?!자)|이(?![스콧사])|입니|임|여|였|일\s)",
        "봤다": r"(?<![가-힣])(?:봤|보았|목격|(?:관찰|식별|포착)(?:된|되|됐|됩|했|하였))",
        "볼 수 있다": r"(?:볼|읽을|알아볼|찾아볼|확인할|관찰할)\s?수\s?있",
        "확인된다": r"확인(?:된|되|됐|됩|했|하였)",
        "이미지에서": rf"(?<![가-힣]){_KO_PAGE}\s?(?:에|엔|속|상에|안에|(?:을|를)\s?보[면니])",
        "나와 있다": r"(?:나와|적혀|쓰여|씌어|써|실려|그려져|담겨)\s?있",
        "표시된다": r"(?:표시|기재|명시|표기)(?:된|되|돼|됐|됩)|나타(?:나|난|납|났)",
    }.items()
}


def _words_of(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


#: English words that may be added or removed.
_FREE: Final = _words_of(
    "a an the i me my we us our it its you your he she they them their this that these those what",
    "which who whom whose how many much of in on at for to with about into as and or but so",
    "because since therefore thus hence then now next again also too still just well okay ok ah",
    "hmm however while do does did doing done am need needs needed want wants let lets let's try",
    "trying go going start begin beginning look looking search searching find finding query",
    "queries ask asking up out number numbers value information info detail details term terms",
    "keyword keywords words way must should will would shall can please simply step current",
    "currently i'll i'd i'm we'll i've",
)


#: Words of uncertainty. A rewrite must not have fewer.
_HEDGES: Final = _words_of(
    "maybe perhaps possibly probably likely may might could seem seems think guess believe suppose",
    "whether if unsure unclear presumably apparently",
)


#: Words of statements. A rewrite must not have more.
_STATES: Final = _words_of("is are was were be been being has have had having 's 're")


_NEGATIONS: Final = _words_of("not no n't never none nothing neither nor without cannot")


_GOALS: Final = _words_of(
    "need needs want must should will shall let let's try look looking search searching next",
    "i'll going find query",
)


_GOAL_START = re.compile(
    r"(?:(?:so|now|then|next|first|again|also|and|well|okay|please|to)\b[, ]*)*"
    r"(?:(?:i|we) (?:still |also |now |will |should |must |need to |want to |have to |can |shall )+"
    r"|i'll |let me |let us |let's |try to )*"
    r"(?:look|find|search|check|query|try|get|locate|zoom|crop|open|read|need|want)\b"
)


_GOAL_BREAK = re.compile(r"\b(?:because|since|which|that|as|but|while|and (?:it|the))\b|[:;–—]")


_FIRST = re.compile(
    r"(?:^|(?<=[.!?;\n] ))(?:first|firstly|second|finally)\b(?=,|\s+(?:i|we|let)\b)"
)


#: The Korean lists: words without their endings, and endings with a meaning.
_KO_FREE: Final = _words_of(
    "나 내 저 우리 이제 먼저 우선 다음 그리고 그래서 그러므로 따라서 또 또한 다시 더 추가 그런데",
    "하지만 그러나 즉 위해 위하 위한 대해 대하 대한 관해 관한 것 수 등 및 필요 찾 찾아 찾아보",
    "검색 검색해 검색해보 알아 알아보 살펴 살펴보 하 해 해보 보 싶 한 한다 할 되 된 있어야 그럼",
    "그러면 지금 한번 계속",
)


_KO_ENDING = re.compile(
    r"(?:(?:이|하|되|해|했|였|았|었|겠|시)?(?:습니다|ㅂ니다|입니다|합니다|됩니다|니다)"
    r"|(?:아|어|여|해)?야(?:만)?(?:겠|지|한다|하)?(?:다|요)?|하려면|하려고|려면|려고|하자|자|겠다|하겠다"
    r"|(?:이|하|되|으)?(?:므로|니까|니|며|고|면서|면|지만|는데|은데|ㄴ데|아서|어서|해서|여서|라서|다)"
    r"|(?:이다|인|일|이고|이며|이라|라고|이라고|한다|하는|할|한|하기|하여|해|해야|된|되는|된다|는다|ㄴ다)"
    r"|은|는|이|가|의|에|에는|에게|에서|에서는|으로|로|으로는|와|과|도|들|들은|들이)$"
)


_KO_MEANING = re.compile(r"(?:을|를|보다|만|까지|부터|마다|밖에|처럼|대신|뿐)(?=에|은|는|이|도|$)")


_KO_NEGATION = re.compile(r"없|않|아니|못|말고|(?<![가-힣])안(?= )")


_KO_HEDGE = re.compile(
    r"것 같|수(?:도|는)? 있|아마|혹시|듯|모르|추정|[은는인한된할을을일]지(?![가-힣])"
)


_KO_GOAL = re.compile(
    r"야 (?:한|하|할|해|합)|하자|보자|[아어해]자|자\.|겠|려고|려면|필요|싶|하기로|검색"
)


_KO_STATES = re.compile(r"(?<!수 )(?<!수도 )있(?!어야)|이다|입니다|이며|이고|이므로|였")


_TOKEN = re.compile(
    r"\d+(?:[.,:/]\d+)*|n't\b|[가-힣]+|[^\W\d_가-힣]+(?:['-][^\W\d_가-힣]+)*|[%$€£¥₩°+=<>]"
)


_SENTENCE = re.compile(r"(?<![.!?;])[.!?;]++(?=\s|$)")  # of a flat text


_LETTERS: Final = {name: re.compile(f"[{points}]") for name, points in SCRIPTS.items()}


def departure(before: str, after: str) -> Departure | None:
    """Return how the thought `after` departs from `before`; None if it says the same."""
    if not _scripts(after) <= _scripts(before) or _main_script(before) != _main_script(after):
        return "another language"
    old, new = _flat(before), _flat(after)
    was, content = list(_content(old)), list(_content(new))
    if Counter(content) - Counter(was):
        return "new content"
    if content != was and not _is_goal(old):
        return "another claim"
    return None if _claims_no_more(old, new) else "another claim"


def _claims_no_more(old: str, new: str) -> bool:
    """Return whether a text has no more statements, and is not surer, than another."""
    texts = [(text, list(_words(text))) for text in (old, new)]

    def counts(names: frozenset[str], pattern: re.Pattern[str]) -> list[int]:
        """Return how often the words and the pattern are in each text."""
        return [
            sum(word in names for word in words) + len(pattern.findall(text))
            for text, words in texts
        ]

    hedges, states = counts(_HEDGES, _KO_HEDGE), counts(_STATES, _KO_STATES)
    goals, negations = counts(_GOALS, _KO_GOAL), counts(_NEGATIONS, _KO_NEGATION)
    return (
        hedges[0] <= hedges[1]
        and old.count("?") <= new.count("?")
        and min(1, goals[0]) <= goals[1]
        and states[0] >= states[1]
        and _pasts(old) >= _pasts(new)
        and negations[0] == negations[1]
    )


def _flat(text: str) -> str:
    """Return a casefolded text with one spelling for each form of a word."""
    flat = normalized("NFKC", text).casefold().replace("’", "'").replace("−", "-")
    flat = " ".join(flat.split())
    flat = _FIRST.sub("", flat)
    flat = re.sub(r"\bcan'?t\b|\bcannot\b", "can not", flat)
    flat = re.sub(r"\bhave to\b|\bhas to\b|\bhaving to\b", "must", flat)
    flat = re.sub(r"\bi'm\b", "i am", flat)
    flat = re.sub(r"\bis what (i|we) need\b|\bwhat (i|we) need is\b", "i need", flat)
    flat = flat.replace("필요가 있", "필요하")
    return re.sub(r"\b(it|that|what|there|here|he|she)'s\b", r"\1 's", flat)


def _words(flat: str) -> Iterator[str]:
    yield from _TOKEN.findall(flat.replace("n't", " n't "))
    yield from re.findall(r"(?<= )'(?:s|re)\b", flat)


def _content(flat: str) -> Iterator[str]:
    """Yield the content words of a text, with a negation as "not"."""
    ignored = _FREE | _HEDGES | _STATES
    for token in _words(flat):
        if "가" <= token[0] <= "힣":
            yield from _korean(token)
        elif token in _NEGATIONS:
            yield "not"
        elif token[0].isdigit():
            yield re.sub(r",(?=\d{3}(?!\d))", "", token)
        elif token not in ignored:
            yield re.sub(r"'s$|(?<=[^s])s$", "", token) if len(token) > 3 else token


def _korean(token: str) -> Iterator[str]:
    """Yield the stem of a Korean word, then its endings with a meaning."""
    if _KO_NEGATION.search(token):
        yield "not"
    stem, meaning = token, _KO_MEANING.search(token[1:])
    if meaning is not None:
        stem = token[: meaning.start() + 1]
    else:
        while len(stem) > 1 and (ending := _KO_ENDING.search(stem, 1)):
            shorter = stem[: ending.start()]
            if stem != token and len(shorter) == 1 and shorter not in _KO_FREE:
                break  # probably a noun that looks like it has an ending
            stem = shorter
    if stem not in _KO_FREE and not _KO_ENDING.fullmatch(stem):
        yield stem
        if meaning is not None:
            yield "를" if meaning.group() == "을" else meaning.group()


def _is_goal(flat: str) -> bool:
    """Return whether a text only says what to look for."""
    sentences = [part.strip() for part in _SENTENCE.split(flat) if part.strip()]
    return all(_is_goal_sentence(sentence) for sentence in sentences)


def _is_goal_sentence(sentence: str) -> bool:
    if re.search("[가-힣]", sentence):
        states = _KO_STATES.search(sentence) or _KO_NEGATION.search(sentence) or _pasts(sentence)
        return bool(_KO_GOAL.search(sentence)) and not states
    if _GOAL_BREAK.search(sentence) or not _GOAL_START.match(sentence):
        return False
    return set(_words(sentence)).isdisjoint(_STATES | _NEGATIONS | _HEDGES)


def _pasts(text: str) -> int:
    """Return the number of Korean syllables of the past tense.

    They end in double s; those of `is` and of a wish are excluded.
    """
    return sum(
        (ord(letter) - 0xAC00) % 28 == 20
        for letter in text
        if "가" <= letter <= "힣" and letter not in "있겠"
    )


def _scripts(text: str) -> set[str]:
    return {name for name, letters in _LETTERS.items() if letters.search(text)}


def _main_script(text: str) -> str | None:
    """Return the most frequent script of a text; None without letters."""
    max_count, name = max((len(letters.findall(text)), name) for name, letters in _LETTERS.items())
    return name if max_count else None


def claims(thought: str) -> dict[str, int]:
    """Return the number of claims in a thought by the name of their pattern."""
    text = plain(thought)
    return {name: len(pattern.findall(text)) for name, pattern in CLAIMS.items()}


def _without_thoughts(text: str) -> str:
    """Return a turn with empty think blocks."""
    parts, position = [], 0
    for start, end in thought_spans(text):
        parts.append(text[position:start])
        position = end
    return "".join([*parts, text[position:]])


def with_thought(text: str, thought: str) -> str:
    """Return a turn with another thought in its think block.

    Raises ValueError unless it has exactly one block.
    """
    ((start, end),) = thought_spans(text)
    return text[:start] + thought + text[end:]


def thought_breach(before: str, after: str, longer_at_most: float) -> Breach | None:
    """Return why a rewritten thought is invalid, or None."""
    if any((ord(c) < 32 and c not in "\n\t") or "\ud800" <= c <= "\udfff" for c in after):
        return "unreadable"
    if has_tag(after):
        return "a tag in a thought"
    if not after.strip() and before.strip():
        return "empty"
    if len(after) > _SHORT and above(len(after), longer_at_most * len(before)):
        return "too long"
    if invented(after) is not None and invented(before) is None:
        return "an invented observation"
    allowed = claims(before)
    if any(count > allowed[name] for name, count in claims(after).items()):
        return "a claim of seeing"
    return departure(before, after)


def row_breach(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    longer_at_most: float,
) -> Breach | None:
    """Return why a rewritten conversation is invalid, or None.

    It compares only the two results, independently of the code that rewrote one of them.
    """
    if len(before) != len(after):
        return "other structure"
    for old, new in zip(before, after, strict=True):
        if old == new:
            continue
        if old["role"] != "assistant" or _but_content(old) != _but_content(new):
            return "other structure"
        if breach := _turn_breach(old["content"], new["content"], longer_at_most):
            return breach
    return None


def _turn_breach(old: str, new: str, longer_at_most: float) -> Breach | None:
    if len(thoughts(old)) != len(thoughts(new)):
        return "a tag in a thought" if has_tag("".join(thoughts(new))) else "other structure"
    for before, after in zip(thoughts(old), thoughts(new), strict=True):
        if breach := thought_breach(before, after, longer_at_most):
            return breach
    if _without_thoughts(old) != _without_thoughts(new):
        return "another action"
    action = parse(old)
    same = not isinstance(action, Invalid) and parse(new) == action
    return None if same else "another action"


def _but_content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "content"}
