"""Whether a narration lets somebody act: their name is subject or topic of a finite clause.

    민수가 고개를 끄덕였다.             acts
    유나는 민수가 건넨 컵을 받았다.       does not: the clause of 민수 describes the cup
    민수가 다가오자 유나는 물러섰다.      does not: the clause of 민수 depends on what 유나 does
    민수를 바라보며 유나가 웃었다.        does not: an object

It goes by the first ending behind the name whose subject the name can be, which is a rule of thumb:
Korean leaves out subjects, and nothing in the words says whose a verb is then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.roleplay.korean.kiwi import Morpheme, forms, sentences
from trainer.roleplay.korean.names import particle_behind, places

#: Clauses that stand beside the next one, with subjects of their own.
_BESIDE = forms("고 며 으며 지만 는데 ᆫ데 은데 으나 나 거니와 더니 는가 하면")
#: Clauses that depend on the next one, whose subject is mostly another.
_UNDER = forms(
    "자 자마자 면 으면 니 으니 니까 으니까 는지 ᆫ지 은지 ᆯ지 을지 도록 게 어도 아도 거든 기에 "
    "길래 듯 듯이 다시피 ᆯ수록 을수록 든 든지 더라도 어야 아야"
)
#: Of those, what ends the reach of a topic before it (유나는 웃었지만 민수가).
_ENDS_TOPIC = forms("고 지만 는데 ᆫ데 은데 으나 나")
_QUOTED = ("다고", "라고", "냐고", "자고", "다며", "라며")
_LITERAL = re.compile(r"(?:께서는?|이가|이는|은|는|이|가|도|만)")
_NOUNS = ("NNG", "NNP", "NNB", "NP", "XSN", "NR", "SL", "SH", "SW", "ETN", "MM")


def acts(narration: str, name: str | None, other: str | None = None) -> bool:
    """Whether `name` acts in the narration. other: a name that may have this one in it."""
    found = places(narration, name, other)
    if not found or name == other:
        return False
    spans = sorted({*found, *_outside(places(narration, other, None), found)})
    starts = {start for start, _ in found}
    return any(
        _acts_in(sentence, k)
        for sentence in sentences(narration, spans)
        for k, one in enumerate(sentence)
        if one.start in starts
    )


def has_particle(narration: str, name: str | None, other: str | None = None) -> bool:
    """The literal rule: whether the name stands anywhere with a particle of subjects or topics."""
    return name != other and any(
        _LITERAL.fullmatch(particle_behind(narration, end))
        for _, end in places(narration, name, other)
    )


def _outside(
    spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    return [
        one for one in spans if not any(one[0] < end and start < one[1] for start, end in others)
    ]


def _acts_in(sentence: Sequence[Morpheme], at: int) -> bool:
    """Whether the name at this place of the sentence acts."""
    k = at + 1
    while k < len(sentence) and sentence[k].tag in ("XSN", "NNB", "NNG"):
        k += 1
    if k >= len(sentence):
        return False
    last = _last_ending(sentence)
    if sentence[k].tag == "JKS":
        return _subject_acts(sentence, at, k, last)
    if sentence[k].tag == "JX" and sentence[k].form in ("은", "는", "ᆫ"):
        return _topic_acts(sentence, k, last)
    if sentence[k].tag == "JX" and sentence[k].form in ("도", "만"):  # may mark objects, too
        alone = not _open_subject(sentence, at) and not _subjects(sentence, k + 1, len(sentence))
        return last is not None and alone
    return False


def _last_ending(sentence: Sequence[Morpheme]) -> int | None:
    """The place of the ending that closes the sentence: its last EF, or an EC at its end, which an
    EF becomes before "…"."""
    for k in range(len(sentence) - 1, -1, -1):
        if sentence[k].tag == "EF":
            return k
        if sentence[k].tag == "EC" and all(one.tag[0] == "S" for one in sentence[k + 1 :]):
            return k
    return None


def _subjects(sentence: Sequence[Morpheme], start: int, end: int) -> bool:
    """Whether a stretch of the sentence has a subject or a topic."""
    return any(
        sentence[k - 1].tag in _NOUNS
        and (sentence[k].tag == "JKS" or (sentence[k].tag == "JX" and sentence[k].form in "은는"))
        for k in range(max(1, start), end)
    )


def _open_subject(sentence: Sequence[Morpheme], at: int) -> bool:
    """Whether a subject or topic before a place still waits for its verb there."""
    start = start_of_topics = 0
    for k in range(at):
        if sentence[k].tag == "EC" and not _goes_on(sentence, k):
            start = k
            start_of_topics = k if sentence[k].form in _ENDS_TOPIC else start_of_topics
    return any(
        _subjects(sentence, k, k + 1) and (sentence[k].tag == "JX" or k > start)
        for k in range(start_of_topics + 1, at)
    )


def _topic_acts(sentence: Sequence[Morpheme], particle: int, last: int | None) -> bool:
    """A topic reaches to the end of its sentence, unless its first clause depends on one that has a
    subject of its own (민수도 알다시피 유나는 바빴다)."""
    if last is None or last <= particle:
        return False
    first = next(
        (
            k
            for k in range(particle + 1, last)
            if sentence[k].tag == "EC" and not _goes_on(sentence, k)
        ),
        None,
    )
    if first is None or sentence[first].form not in _UNDER:
        return True
    return not _subjects(sentence, first + 1, last)


def _goes_on(sentence: Sequence[Morpheme], k: int) -> bool:
    """Whether what an ending closes is one verb with the next: 고 있다, 지 않다, 다고 말하다."""
    behind = sentence[k + 1 : k + 3]
    if sentence[k].form == "게" and sentence[k - 1].tag in ("VA", "XSA"):
        return True  # an adverb: 조심스럽게
    if sentence[k].form.endswith(_QUOTED):
        return True
    return bool(behind) and (
        behind[0].tag == "VX" or (behind[0].tag == "JX" and behind[-1].tag in ("VX", "VA"))
    )


def _subject_acts(sentence: Sequence[Morpheme], at: int, particle: int, last: int | None) -> bool:
    """A subject belongs to the first ending behind it that can be its own."""
    if last is None or last <= particle:
        return False
    has_topic = _open_subject(sentence, at)
    for k in range(particle + 1, last + 1):
        one = sentence[k]
        if k == last:
            return not has_topic
        if one.tag == "JKS" and sentence[k - 1].tag in _NOUNS:
            return not has_topic  # a subject inside: the outer one has the end
        if one.tag == "ETM" and not _describes(sentence, k):
            return False
        if one.tag == "ETN" and not any(next_.form == "시작" for next_ in sentence[k + 1 : k + 3]):
            return False
        if one.tag == "EC" and not _goes_on(sentence, k):
            if one.form in _BESIDE and _subjects(sentence, k + 1, last):
                return True
            if one.form in _UNDER:
                return False
    return False


def _describes(sentence: Sequence[Morpheme], k: int) -> bool:
    """Whether the verb before an ETM describes the next noun alone, and is not the name's: 민수가
    빨간 컵을, 민수가 떨리는 손으로; not 민수가 건넨 컵을."""
    verb = next(
        (one for one in reversed(sentence[:k]) if one.tag[:1] == "V" or one.tag[:2] == "XS"), None
    )
    if verb is not None and verb.tag in ("VA", "XSA", "VCP", "VCN"):
        return True
    behind = next((one for one in sentence[k + 1 :] if one.tag[0] == "J"), None)
    return behind is not None and behind.tag == "JKB" and behind.form in ("로", "으로")
