"""Find out whether a person acts in a narration: their name is subject or topic of a factual
clause.

    민수가 고개를 끄덕였다.             acts
    민수가 웃자 유나도 웃었다.           acts: so does a clause before another, if it is a fact
    민수와 유나는 나란히 걸었다.         acts: one of two subjects
    민수의 손이 떨렸다.                 acts: a part of the body
    유나는 민수가 건넨 컵을 받았다.       does not: the clause of 민수 describes the cup
    민수가 웃으면 유나도 웃었다.         does not: a condition
    민수를 바라보며 유나가 웃었다.        does not: an object

The rule uses the first ending after the name that can belong to it. It is a heuristic: Korean omits
subjects, and then the words do not show the subject of a verb.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.roleplay.korean.kiwi import Morpheme, forms, sentences
from trainer.roleplay.korean.names import find_name, has_particle_behind

#: Endings of clauses that state a fact before the next clause, which may have another subject.
_FACTS = forms(
    "자 자마자 니 으니 니까 으니까 기에 길래 더니 지만 는데 ᆫ데 은데 으나 거니와 는가 하면"
)
#: Endings of clauses that state no fact: conditions, aims, concessions, doubts, likeness.
_NO_FACT = re.compile(
    r".*(?:면|거든|도록|게|러|려고|[어아여래]도|라도|더라도|[어아여]야|든|든지|수록|다시피|듯|듯이|"
    r"[는ᆫ은ᆯ을]지|[ᆯ을]까|느라|느라고)"
)
#: Endings that end the scope of a topic (유나는 웃었지만 민수가).
_ENDS_TOPIC = forms("고 지만 는데 ᆫ데 은데 으나 나")
_QUOTED = ("다고", "라고", "냐고", "자고", "다며", "라며")
_NOUNS = ("NNG", "NNP", "NNB", "NP", "XSN", "NR", "SL", "SH", "SW", "ETN", "MM")
#: Particles after which a noun may be subject, topic or object: the rest of the sentence decides.
_ANY_PART = forms("도 만 마저 조차 까지 부터 야말로 이야말로 또한")
_WITH = forms("와 과 랑 이랑 하고")
#: Parts of the body, and their expressions: as subjects they act for their owner.
_BODY = forms(
    "손 손끝 손가락 손목 주먹 팔 다리 발 발걸음 걸음 무릎 어깨 등 몸 온몸 허리 고개 머리 얼굴 표정 "
    "낯빛 안색 뺨 볼 귀 귓불 귓가 이마 눈 눈동자 눈빛 눈가 눈썹 눈시울 눈꺼풀 시선 코끝 입 입술 "
    "입가 입꼬리 턱 목 목소리 음성 숨 숨결 숨소리 호흡 가슴 심장 미소 웃음 웃음소리 눈물 한숨"
)
#: Verbs of perceptions or feelings of another person: 민수가 보이자, 민수가 걱정되어.
_PERCEIVED = forms("보이 들리 생각나 떠오르 걱정되 느껴지 비치")
#: Nouns after which a clause is a fact: 지르는 바람에, 접는데.
_FACT_NOUNS = forms("바람 통 데")


def acts(narration: str, name: str | None, other: str | None = None) -> bool:
    """Return whether `name` acts in the narration.

    other: a name that may contain this one.
    """
    name_spans = find_name(narration, name, other)
    if not name_spans or name == other:
        return False
    spans = sorted({*name_spans, *_outside(find_name(narration, other, None), name_spans)})
    starts = {start for start, _ in name_spans}
    return any(
        _acts_in(sentence, k)
        for sentence in sentences(narration, spans)
        for k, morpheme in enumerate(sentence)
        if morpheme.start in starts
    )


def has_particle(narration: str, name: str | None, other: str | None = None) -> bool:
    """Return whether the name comes anywhere with a particle after it: the literal rule."""
    return name != other and any(
        has_particle_behind(narration, end) for _, end in find_name(narration, name, other)
    )


def _outside(
    spans: Sequence[tuple[int, int]], other_spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    return [
        span
        for span in spans
        if not any(span[0] < end and start < span[1] for start, end in other_spans)
    ]


def _acts_in(sentence: Sequence[Morpheme], index: int) -> bool:
    """Return whether the name at this index of the sentence acts."""
    particle = _behind_noun(sentence, index)
    last = _last_ending(sentence)
    if particle >= len(sentence) or last is None or last <= particle:
        return False
    if sentence[particle].form in _WITH and sentence[particle].tag in ("JC", "JKB"):
        particle = _behind_noun(sentence, particle + 1)  # 민수와 유나는
        if particle == index + 2:
            return False
    elif sentence[particle].tag == "JKG":
        return _body_acts(sentence, index, particle, last)
    return _noun_acts(sentence, index, particle, last)


def _behind_noun(sentence: Sequence[Morpheme], start: int) -> int:
    """Return the index after a name and its title, or after any nouns."""
    index = start
    while index < len(sentence) and sentence[index].tag in ("XSN", "NNB", "NNG", "NNP", "NP"):
        index += 1
    return index


def _noun_acts(sentence: Sequence[Morpheme], index: int, particle: int, last: int) -> bool:
    """Return whether a noun acts, by the particles after it: 가, 만이, 는, 까지는, 도, 마저."""
    end = particle
    while end < last and (sentence[end].tag[0] == "J" or sentence[end].form in _ANY_PART):
        end += 1
    if end == particle:
        return False
    *inner, closing = sentence[particle:end]
    if any(morpheme.form not in _ANY_PART for morpheme in inner):
        return False
    if closing.tag == "JKS":
        return _subject_acts(sentence, index, end - 1, last)
    if closing.tag == "JX" and closing.form in ("은", "는", "ᆫ"):
        return _topic_acts(sentence, end - 1, last)
    if closing.form not in _ANY_PART or _open_subject(sentence, index):
        return False
    fact = _next_fact(sentence, end, last)
    return not _subjects(sentence, end, last if fact is None else fact)


def _body_acts(sentence: Sequence[Morpheme], name_index: int, particle: int, last: int) -> bool:
    """Return whether a part of somebody's body acts.

    민수의 손이 떨렸다, 민수의 입가에 미소가 번졌다; not 민수의 손이 차가웠다, which somebody else
    feels.
    """
    predicate = _verb_before(sentence, last)
    if predicate is None or predicate.tag in ("VA", "VCP", "VCN", "XSA"):
        return False
    for index in range(particle + 1, last):
        morpheme = sentence[index]
        if morpheme.tag in ("JKG", "JKO", "EC", "JC"):
            return False
        if morpheme.tag in ("JKS", "JX"):
            is_body = sentence[index - 1].form in _BODY
            return is_body and _noun_acts(sentence, name_index, index, last)
        if morpheme.tag == "JKB" and sentence[index - 1].form not in _BODY:
            return False
    return False


def _next_fact(sentence: Sequence[Morpheme], start: int, last: int) -> int | None:
    """Return the index of the next ending that states a fact before another clause; None without
    one."""
    for index in range(start, last):
        if sentence[index].tag == "EC" and sentence[index].form in _FACTS:
            return index if not _is_state(sentence, index) else None
    return None


def _is_state(sentence: Sequence[Morpheme], ending: int) -> bool:
    """Return whether the verb of an ending describes a state, or a perception."""
    predicate = _verb_before(sentence, ending)
    return predicate is not None and (
        predicate.tag in ("VA", "VCP", "VCN", "XSA") or predicate.form in _PERCEIVED
    )


def _verb_before(sentence: Sequence[Morpheme], end: int) -> Morpheme | None:
    """Return the last verb or adjective before an ending."""
    is_verb = (m for m in reversed(sentence[:end]) if m.tag[0] == "V" or m.tag[:2] == "XS")
    return next(is_verb, None)


def _last_ending(sentence: Sequence[Morpheme]) -> int | None:
    """Return the index of the ending that closes the sentence.

    That is its last EF, or an EC at its end, which an EF becomes before "…".
    """
    for k in range(len(sentence) - 1, -1, -1):
        if sentence[k].tag == "EF":
            return k
        if sentence[k].tag == "EC" and all(
            morpheme.tag[0] == "S" for morpheme in sentence[k + 1 :]
        ):
            return k
    return None


def _subjects(sentence: Sequence[Morpheme], start: int, end: int) -> bool:
    """Return whether a part of the sentence has a subject or a topic."""
    return any(
        sentence[k - 1].tag in _NOUNS
        and (sentence[k].tag == "JKS" or (sentence[k].tag == "JX" and sentence[k].form in "은는"))
        for k in range(max(1, start), end)
    )


def _open_subject(sentence: Sequence[Morpheme], index: int) -> bool:
    """Return whether a subject or topic before an index still has no verb there."""
    start = start_of_topics = 0
    for k in range(index):
        if sentence[k].tag == "EC" and not _goes_on(sentence, k):
            start = k
            start_of_topics = k if sentence[k].form in _ENDS_TOPIC else start_of_topics
    return any(
        _subjects(sentence, k, k + 1) and (sentence[k].tag == "JX" or k > start)
        for k in range(start_of_topics + 1, index)
    )


def _topic_acts(sentence: Sequence[Morpheme], particle: int, last: int) -> bool:
    """Return whether a topic acts.

    Its scope is the sentence, unless its first clause states no fact and the next one has
    its own subject (민수도 알다시피 유나는 바빴다).
    """
    for index in range(particle + 1, last):
        if sentence[index].tag != "EC":
            continue
        is_quoted = sentence[index].form.endswith(_QUOTED)
        if is_quoted or not _goes_on(sentence, index):
            is_fact = not is_quoted and _NO_FACT.fullmatch(sentence[index].form) is None
            return is_fact or not _subjects(sentence, index + 1, last)
    return True


def _goes_on(sentence: Sequence[Morpheme], k: int) -> bool:
    """Return whether the verb of an ending forms one verb with the next: 고 있다, 지 않다."""
    behind = sentence[k + 1 : k + 3]
    if sentence[k].form == "게" and sentence[k - 1].tag in ("VA", "XSA"):
        return True  # an adverb: 조심스럽게
    if sentence[k].form.endswith(_QUOTED):
        return True
    return bool(behind) and (
        behind[0].tag == "VX" or (behind[0].tag == "JX" and behind[-1].tag in ("VX", "VA"))
    )


def _subject_acts(sentence: Sequence[Morpheme], index: int, particle: int, last: int) -> bool:
    """Return whether a subject acts. It belongs to the first ending after it that can be its
    own."""
    has_topic = _open_subject(sentence, index)
    for k in range(particle + 1, last):
        morpheme = sentence[k]
        if morpheme.tag == "JKS" and sentence[k - 1].tag in _NOUNS:
            return not has_topic  # a subject inside: the outer morpheme has the end
        if morpheme.tag == "ETM" and sentence[k + 1].form in _FACT_NOUNS:
            return not _is_state(sentence, k)
        if morpheme.tag == "ETM" and not _describes(sentence, k):
            return False
        if morpheme.tag == "ETN":
            behind = [other.form for other in sentence[k + 1 : k + 3]]
            if behind[0] == "에" and _subjects(sentence, k, last):
                return not _is_state(sentence, k)  # 민수가 화를 내기에 유나는
            if "시작" not in behind:
                return False
        if morpheme.tag == "EC":
            is_decided = _clause_acts(sentence, k, last)
            if is_decided is not None:
                return is_decided
    return not has_topic


def _clause_acts(sentence: Sequence[Morpheme], ending: int, last: int) -> bool | None:
    """Return whether a subject acts in the clause that this ending closes; None if that is open.

    It is open if the subject can be that of the next clause, too.
    """
    form, has_other = sentence[ending].form, _subjects(sentence, ending + 1, last)
    if form.endswith(_QUOTED):
        return False if has_other else None  # 민수가 온다고 유나가 말했다
    if _goes_on(sentence, ending):
        return None
    if _NO_FACT.fullmatch(form):
        return False
    if _is_state(sentence, ending):
        return False if has_other else None
    if form in _FACTS:
        return True
    describes = next(
        (morpheme for morpheme in sentence[ending + 1 : last] if morpheme.tag in ("ETM", "JKS")),
        None,
    )
    return True if has_other and (describes is None or describes.tag == "JKS") else None


def _describes(sentence: Sequence[Morpheme], k: int) -> bool:
    """Return whether the verb before an ETM describes only the next noun, and not the name.

    민수가 빨간 컵을, 민수가 떨리는 손으로; not 민수가 건넨 컵을, 민수가 떠난 뒤로.
    """
    predicate = _verb_before(sentence, k)
    if sentence[k + 1].form == "채":
        return True  # 민수가 긴장한 채 문을 열었다
    if predicate is not None and predicate.tag in ("VA", "XSA", "VCP", "VCN"):
        return predicate.form not in ("있", "없")
    behind = next((n for n in range(k + 2, len(sentence)) if sentence[n].tag[0] == "J"), None)
    return (
        behind is not None
        and sentence[behind].form in ("로", "으로")
        and sentence[behind - 1].form in _BODY
    )
