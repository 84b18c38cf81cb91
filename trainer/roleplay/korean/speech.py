"""The speech level of what is said: polite (해요체, 합쇼체) or plain (해체, 해라체).

What counts is how a sentence ends, not the words in it: 께서 and -시- honour whom it speaks of. The
ending is the sentence's last EF of Kiwi; the EC that an EF becomes before "…" and commas; or 요
after a word that is no verb (저도요). Codas (가요ㅋ, 좋아용), stage directions (가요. (웃음)) and
what is called or said behind the ending (가요, 선배.) are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.roleplay.korean.kiwi import Morpheme, forms, sentences

#: ambiguous: 하게체 and 하오체, neither of the two. fragment: no ending that tells.
Level = Literal["polite", "plain", "ambiguous", "fragment"]

#: Endings as they are written. Kiwi's begin with a combining jamo where they join a syllable.
#: 여, 유 and 쥬 are 요 and 죠 as they are written in chats and spoken in Chungcheong.
_POLITE = re.compile(
    r".*(?:[요여유죠쥬]|니다|[ᆸ습읍답랍럽잡]니까|[ᆸ읍]시[다오]|[ᆸ읍]쇼|[ᆸ습읍]죠|[슴ᆷ]다|나이[다까]|오니[다까]|ᆸ소서)"
)
_AMBIGUOUS = forms(
    "네 게 게나 나 는가 ᆫ가 은가 던가 ᆯ런가 오 으오 소 세 세나 음세 ᆷ세 ᆯ세 구려 는구려 구먼 "
    "는구먼 소서 으소서 음 ᆷ 기"
)
#: Endings that leave a sentence open: they say nothing, with or without an ellipsis.
_OPEN = forms(
    "고 며 으며 면서 으면서 면 으면 지만 어서 아서 니 으니 므로 으므로 려고 으려고 러 으러 "
    "도록 게끔 다가 자마자 어도 아도 더라도 거나 든지 든가 어야 아야 라서 이라서 ᆯ수록 을수록 "
    "고서 느라 느라고 ᆫ들 은들 되 으되 자니 다시피 듯 듯이 건만 거늘 더니 었더니"
)
#: Those that are open before a comma, and close a sentence at its end: 비가 오는데.
_OPEN_INSIDE = forms("는데 ᆫ데 은데 던데 니까 으니까 거든 다고 라고 냐고 자고 다가 게")
#: Words that are a whole answer.
_POLITE_WORDS = re.compile(r"[네예]+에*|넵|넹|넴|옙|네엡|아뇨|아니요|아니오|글쎄요|천만에요")
_PLAIN_WORDS = forms(
    "응 웅 엉 어 응응 그래 아니 아냐 아니야 안녕 미안 그렇지 야 오냐 가 와 봐 자 해 ㅇㅇ ㄴㄴ ㅇㅋ"
)
#: What is done and not said: (웃음), [작게], *미소*.
_DIRECTION = re.compile(
    r"\([^()\n]{1,60}\)|（[^（）\n]{1,60}）|\[[^\[\]\n]{1,60}\]|\*[^*\n]{1,60}\*"
)


def levels(text: str, names: Sequence[tuple[int, int]] = ()) -> list[Level]:
    """Return the level of each sentence that has a letter, stage directions left out unless there
    is nothing else. names: see `sentences`."""
    said = _DIRECTION.sub(lambda match: " " * len(match[0]), text)
    text = said if said.strip() else text
    spans = [(start, end) for start, end in names if text[start:end].strip()]
    return [level(sentence) for sentence in sentences(text, spans) if _words(sentence)]


def level(sentence: Sequence[Morpheme]) -> Level:
    """The level of one sentence."""
    end = _without_marks(sentence)
    if not end:
        return "fragment"
    asked = any(one.form[:1] in "?？" for one in sentence[len(end) :])
    if asked and end[-1].tag == "EC" and end[-1].form in ("니", "으니"):
        return "plain"  # 배고프지 않니? for Kiwi it is the one of 배고프니 먹자
    found = _told_by(end)
    while found == "fragment" and (end := _before_last_comma(end)):
        inside = end[-1].tag == "EC" and end[-1].form in _OPEN_INSIDE
        found = "fragment" if inside else _told_by(end)
    return found


def _without_marks(sentence: Sequence[Morpheme]) -> list[Morpheme]:
    end = list(sentence)
    while end and _passed_over(end[-1], end):
        end.pop()
    return end


def _told_by(end: Sequence[Morpheme]) -> Level:
    """What the last morpheme tells."""
    form, tag = end[-1].form, end[-1].tag
    if tag in ("EF", "EC") or (form == "요" and tag in ("JX", "MM", "IC")):
        return _of_ending(form, tag)
    if tag == "ETN" and form in _AMBIGUOUS:
        return "ambiguous"
    if tag == "JKV" and any(one.tag in ("JX", "JKS") for one in end):
        return "plain"  # 내 이름은 유나야: Kiwi takes the verb for a call
    alone = len(end) == 1 or end[-2].tag in ("SP", "SF", "SE")
    if tag == "IC" or alone:
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


def _passed_over(last: Morpheme, end: Sequence[Morpheme]) -> bool:
    """Marks, codas, emoji, foreign signs; 만 behind an ending (죄송합니다만)."""
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
    """The sentence without a call or what is said last (선배; 진짜로; 식기 전에), or without a
    noun right behind its ending; [] where there is none."""
    for k in range(len(end) - 1, 0, -1):
        if end[k].tag == "SP" or (end[k - 1].tag == "EF" and end[k].tag[0] == "N"):
            return _without_marks(end[:k])
    return []


def _words(sentence: Sequence[Morpheme]) -> bool:
    return any(
        one.tag[0] not in "SZW" or one.tag in ("SL", "SH", "SN") or one.form in _PLAIN_WORDS
        for one in sentence
    )


@dataclass(frozen=True, slots=True)
class SpeechCount:
    """How many sentences of a quote are at the level that is asked for, at the other, at none."""

    right: int
    wrong: int
    undecided: int

    @property
    def share(self) -> float:
        """Of the sentences that can be decided; 0 where there is none."""
        return self.right / (self.right + self.wrong) if self.right else 0.0


def count(found: Sequence[Level], wanted: Literal["polite", "plain"]) -> SpeechCount:
    """Hold the sentences of a quote against the level that the row tells."""
    right = sum(one == wanted for one in found)
    undecided = sum(one in ("ambiguous", "fragment") for one in found)
    return SpeechCount(right, len(found) - right - undecided, undecided)
