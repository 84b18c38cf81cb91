"""The speech level of spoken text: polite (해요체, 합쇼체) or plain (해체, 해라체).

The ending of a sentence decides, not the words in it: 께서 and -시- honor the person spoken of. The
ending is the sentence's last EF of Kiwi; the EC that an EF becomes before "…" and commas; or 요
after a word that is no verb (저도요). Codas (가요ㅋ, 좋아용), stage directions (가요. (웃음)) and
words after the ending (가요, 선배.) are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.roleplay.korean.kiwi import Morpheme, forms, sentences

#: ambiguous: 하게체 and 하오체, neither of the two. fragment: no ending with a level.
Level = Literal["polite", "plain", "ambiguous", "fragment"]

#: Endings as written. Kiwi's begin with a combining jamo if they join a syllable. 여, 유 and 쥬 are
#: 요 and 죠 in chats and in the dialect of Chungcheong.
_POLITE = re.compile(
    r".*(?:[요여유죠쥬]|니다|[ᆸ습읍답랍럽잡]니까|[ᆸ읍]시[다오]|[ᆸ읍]쇼|[ᆸ습읍]죠|[슴ᆷ]다|나이[다까]|오니[다까]|ᆸ소서)"
)
_AMBIGUOUS = forms(
    "네 게 게나 나 는가 ᆫ가 은가 던가 ᆯ런가 오 으오 소 세 세나 음세 ᆷ세 ᆯ세 구려 는구려 구먼 "
    "는구먼 소서 으소서 음 ᆷ 기"
)
#: Endings that leave a sentence open: they have no level, with or without an ellipsis.
_OPEN = forms(
    "고 며 으며 면서 으면서 면 으면 지만 어서 아서 니 으니 므로 으므로 려고 으려고 러 으러 "
    "도록 게끔 다가 자마자 어도 아도 더라도 거나 든지 든가 어야 아야 라서 이라서 ᆯ수록 을수록 "
    "고서 느라 느라고 ᆫ들 은들 되 으되 자니 다시피 듯 듯이 건만 거늘 더니 었더니"
)
#: Endings that are open before a comma, and close a sentence at its end: 비가 오는데.
_OPEN_INSIDE = forms("는데 ᆫ데 은데 던데 니까 으니까 거든 다고 라고 냐고 자고 다가 게")
#: Words that are a full answer.
_POLITE_WORDS = re.compile(r"[네예]+에*|넵|넹|넴|옙|네엡|아뇨|아니요|아니오|글쎄요|천만에요")
_PLAIN_WORDS = forms(
    "응 웅 엉 어 응응 그래 아니 아냐 아니야 안녕 미안 그렇지 야 오냐 가 와 봐 자 해 ㅇㅇ ㄴㄴ ㅇㅋ"
)
#: Stage directions: (웃음), [작게], *미소*.
_DIRECTION = re.compile(
    r"\([^()\n]{1,60}\)|（[^（）\n]{1,60}）|\[[^\[\]\n]{1,60}\]|\*[^*\n]{1,60}\*"
)


def levels(text: str, names: Sequence[tuple[int, int]] = ()) -> list[Level]:
    """Return the level of each sentence that has a letter.

    Stage directions are left out unless there is nothing else.
    names: see `sentences`.
    """
    spoken = _DIRECTION.sub(lambda match: " " * len(match[0]), text)
    text = spoken if spoken.strip() else text
    spans = [(start, end) for start, end in names if text[start:end].strip()]
    return [level(sentence) for sentence in sentences(text, spans) if _words(sentence)]


def level(sentence: Sequence[Morpheme]) -> Level:
    """Return the level of one sentence."""
    end = _without_marks(sentence)
    if not end:
        return "fragment"
    is_question = any(morpheme.form[:1] in "?？" for morpheme in sentence[len(end) :])
    if is_question and end[-1].tag == "EC" and end[-1].form in ("니", "으니"):
        return "plain"  # 배고프지 않니? Kiwi takes it for the ending of 배고프니 먹자
    result = _level_of_end(end)
    while result == "fragment" and (end := _before_last_comma(end)):
        inside = end[-1].tag == "EC" and end[-1].form in _OPEN_INSIDE
        result = "fragment" if inside else _level_of_end(end)
    return result


def _without_marks(sentence: Sequence[Morpheme]) -> list[Morpheme]:
    end = list(sentence)
    while end and _is_ignored(end[-1], end):
        end.pop()
    return end


def _level_of_end(end: Sequence[Morpheme]) -> Level:
    """Return the level of the last morpheme."""
    form, tag = end[-1].form, end[-1].tag
    if tag in ("EF", "EC") or (form == "요" and tag in ("JX", "MM", "IC")):
        return _of_ending(form, tag)
    if tag == "ETN" and form in _AMBIGUOUS:
        return "ambiguous"
    if tag == "JKV" and any(morpheme.tag in ("JX", "JKS") for morpheme in end):
        return "plain"  # 내 이름은 유나야: Kiwi takes the verb for a call
    is_single_word = len(end) == 1 or end[-2].tag in ("SP", "SF", "SE")
    if tag == "IC" or is_single_word:
        return _of_word(form, tag)
    return "fragment"


def _of_ending(form: str, tag: str) -> Level:
    if _POLITE.fullmatch(form):
        return "polite"
    if form in _AMBIGUOUS:
        return "ambiguous"
    return "fragment" if tag == "EC" and form in _OPEN else "plain"


def _of_word(form: str, tag: str) -> Level:
    """Return the level of a word that is an answer by itself, such as 네, 그럼요, 응."""
    if _POLITE_WORDS.fullmatch(form) or (tag == "IC" and form.endswith("요")):
        return "polite"
    if form.endswith(("세요", "세용", "네요", "니다")):
        return "polite"
    return "plain" if form in _PLAIN_WORDS else "fragment"


def _is_ignored(last: Morpheme, end: Sequence[Morpheme]) -> bool:
    """Return whether a morpheme is ignored: marks, codas, emoji, 만 (죄송합니다만)."""
    if last.tag == "SW" and last.form in _PLAIN_WORDS and len(end) == 1:
        return False
    if last.form == "롱" and len(end) > 1:
        return end[-2].tag in ("EF", "EC")  # 몰랐지롱
    if last.tag == "JX" and last.form == "만" and len(end) > 1:
        return end[-2].tag in ("EF", "EC")
    return (last.tag[0] == "S" and last.tag not in ("SL", "SH", "SN")) or last.tag[:2] in (
        "Z_",
        "W_",
    )


def _before_last_comma(end: Sequence[Morpheme]) -> list[Morpheme]:
    """Return the sentence without a call or an addition (선배; 진짜로; 식기 전에); [] without one.

    A noun right after the ending is left out, too.
    """
    for k in range(len(end) - 1, 0, -1):
        if end[k].tag == "SP" or (end[k - 1].tag == "EF" and end[k].tag[0] == "N"):
            return _without_marks(end[:k])
    return []


def _words(sentence: Sequence[Morpheme]) -> bool:
    return any(
        morpheme.tag[0] not in "SZW"
        or morpheme.tag in ("SL", "SH", "SN")
        or morpheme.form in _PLAIN_WORDS
        for morpheme in sentence
    )


@dataclass(frozen=True, slots=True)
class SpeechCount:
    """The number of sentences of a quote at the required level, at the other, and at none."""

    right: int
    wrong: int
    undecided: int

    @property
    def share(self) -> float:
        """Return the share among the sentences with a level; 0 without any."""
        return self.right / (self.right + self.wrong) if self.right else 0.0


def count(sentence_levels: Sequence[Level], required: Literal["polite", "plain"]) -> SpeechCount:
    """Compare the levels of a quote's sentences with the level of the row."""
    right = sum(sentence_level == required for sentence_level in sentence_levels)
    undecided = sum(
        sentence_level in ("ambiguous", "fragment") for sentence_level in sentence_levels
    )
    return SpeechCount(right, len(sentence_levels) - right - undecided, undecided)
