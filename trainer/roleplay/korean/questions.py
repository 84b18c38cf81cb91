"""Find questions: by a question mark, by an ending that asks, or by a question word.

A sentence without a mark is a question only if its words show it, because an answer far from a
question loses all of `reward_grounded_to_user`. 밥 먹었어요 may state or ask: it is no question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from trainer.roleplay.korean.kiwi import Morpheme, forms, sentences

_MARK = re.compile("[?？⁇⁈⁉]")
#: Endings that always ask, without their polite form.
_ASKING = forms("니 으니 냐 으냐 느냐 나 는가 ᆫ가 은가 던가 련 으련 느냐고 냐고 ᆯ까나")
_ASKING_LONG = re.compile(r".*(?:[ᆯ을]까|[ᆸ습읍답랍럽잡]니까|나이까)")  # not 니까: since
_ASKING_POLITE = forms("는지 ᆫ지 은지 ᆯ지 을지")  # only with 요: 잘 지내시는지요
#: Endings of a wish (집에 갈래요) that ask if they refer to the listener, or to both.
_WISH = forms("ᆯ래 을래")
_TOGETHER = forms("같이 함께 우리")
_LISTENER = forms("너 당신 그대 너희 자네")
_SPEAKER = forms("나 저")
#: Endings that ask only with a question word before them.
_OPEN = forms(
    "어 아 여 야 에 예 세 으세 시 지 죠 는데 ᆫ데 은데 던데 대 ᆫ대 는대 래 더라 게 려고 으려고 자고 "
    "ᆯ래 을래 고 람 디 거야"
)
_QUESTION_WORDS = forms(
    "뭐 무엇 무어 누구 어디 언제 얼마 얼마나 왜 어째서 무슨 어느 어떤 웬 몇 며칠 웬일 "
    "어떻 어떻게 어쩌 어쩌다 어찌 어떡하 어딨"
)
_TAGS = ("NP", "NNG", "NR", "MAG", "MM", "VA", "VV")
#: After a question word: it then means some, any or every (누구도, 뭐든, 언제나, 누구보다), or it
#: asks nothing (어느 날, 뭐 좀, 언제 한번).
_INDEFINITE_PARTICLES = forms("도 든 든지 든가 나 이나 라도 이라도 보다")
_INDEFINITE_WORDS = forms("날 새 순간 정도 덧 좀 한 한번")
#: After 몇 and 얼마 and their unit: an indefinite time (몇 년 전에, 얼마 안 남았어).
_SOME_TIME = forms("전 후 뒤 만 째 동안 사이 안 뿐")
#: Endings of indirect questions (왜 그랬는지 몰라), or of open clauses (뭐라 해도).
_CLOSED = re.compile(r"(?:[는ᆫ은ᆯ을]지|[는ᆫ은]가|[ᆯ을]까|랄까|나|든|든지|든가|건|[어아여래]도|.*라도)")


def asks(text: str) -> bool:
    """Return whether a sentence of the text is a question.

    It has a question mark; or ends in 니, 냐, ᆯ까, 나요, ᆸ니까 ...; or has a question word and an
    ending that may ask (왜 그랬어, 누구야); or offers something (같이 갈래, 드실래요).
    """
    return _MARK.search(text) is not None or any(map(_asks, sentences(text)))


def _asks(sentence: Sequence[Morpheme]) -> bool:
    words = [morpheme for morpheme in sentence if morpheme.tag[0] not in "SZW"]
    if words and words[-1].form == "요" and words[-1].tag == "JX":
        words.pop()
        is_polite = True
    else:
        is_polite = bool(words) and words[-1].form.endswith("요")
    if not words:
        return False
    if words[-1].tag not in ("EF", "EC"):
        return _is_bare_question_word(sentence, words)
    ending = words[-1].form.removesuffix("요")
    if ending in _ASKING or _ASKING_LONG.fullmatch(ending):
        return True
    if ending in _ASKING_POLITE:
        return is_polite
    if ending in _WISH and _speaks_of_both(words):
        return True
    can_ask = ending in _OPEN or (ending in ("라고", "다고") and words[-2].tag == "VCP")
    return can_ask and not _orders_not_to(words) and _has_question_word(sentence)


def _is_bare_question_word(sentence: Sequence[Morpheme], words: Sequence[Morpheme]) -> bool:
    """Return whether there is only a question word with particles: 왜, 누구랑, 뭐가요."""
    first, *particles = words
    return _is_question_word(sentence, sentence.index(first)) and all(
        morpheme.tag[0] == "J" for morpheme in particles
    )


def _speaks_of_both(words: Sequence[Morpheme]) -> bool:
    """Return whether a wish offers something: 같이 갈래, 드실래요, 가지 않을래; not 너한테 갈래."""
    pairs = list(pairwise(words))
    persons = {word.form for word, behind in pairs if behind.tag in ("JX", "JKS")}
    persons |= {word.form for word, behind in pairs if behind.tag[0] != "J"}
    return any(
        word.form in _TOGETHER
        or (word.tag == "EP" and word.form in ("시", "으시"))
        or (word.tag == "VX" and word.form == "않" and not persons & _SPEAKER)
        for word in words
    ) or bool(persons & _LISTENER)


def _orders_not_to(words: Sequence[Morpheme]) -> bool:
    """Return whether the sentence ends in 지 마."""
    return len(words) > 1 and words[-2].tag == "VX" and words[-2].form == "말"


def _has_question_word(sentence: Sequence[Morpheme]) -> bool:
    """Return whether a question word belongs to the clause that ends the sentence."""
    return any(
        _is_question_word(sentence, index) and not _is_closed(sentence, index)
        for index in range(len(sentence))
    )


def _is_question_word(sentence: Sequence[Morpheme], index: int) -> bool:
    """Return whether a morpheme asks, and is neither a filler (뭐, 괜찮아) nor indefinite."""
    word, behind = sentence[index], sentence[index + 1 : index + 4]
    if word.form not in _QUESTION_WORDS or word.tag not in _TAGS:
        return False
    if not behind:
        return True
    is_filler = behind[0].tag == "SP"
    particles = behind[1:2] if behind[0].tag in ("JKB", "JKO") else []
    is_indefinite = behind[0].form in _INDEFINITE_WORDS or any(
        morpheme.tag[0] == "J" and morpheme.form in _INDEFINITE_PARTICLES
        for morpheme in (behind[0], *particles)
    )
    is_some_time = word.form in ("몇", "며칠", "얼마") and any(
        morpheme.form in _SOME_TIME for morpheme in behind[:2]
    )
    before = sentence[index - 1].form if index else ""
    is_idiom = (word.form, behind[0].tag) == ("어쩌", "ETM") or (  # 어쩔 수 없다
        (before, word.form) == ("지", "뭐")  # 넘어졌지 뭐야
    )
    return not (is_filler or is_indefinite or is_some_time or is_idiom)


def _is_closed(sentence: Sequence[Morpheme], index: int) -> bool:
    """Return whether a clause ends between a question word and the end of the sentence.

    Then the word does not ask the listener. 얼마나 may also be an exclamation (얼마나 기다렸는데).
    """
    inside = [morpheme for morpheme in sentence[index:] if morpheme.tag[0] not in "SZW"]
    if sentence[index].form == "얼마나" and inside[-1].form.removesuffix("요") in ("는데", "ᆫ데"):
        return True
    forms_inside = [morpheme.form for morpheme in inside]
    if "같" in forms_inside and not {"ᆯ", "을"} & set(forms_inside):
        return True  # 누가 온 것 같아; not 누가 올 것 같아
    return any(
        morpheme.tag in ("EC", "EF") and _CLOSED.fullmatch(morpheme.form)
        for morpheme in inside[:-1]
    )
