"""The speech levels of Korean endings, in the forms of Kiwi.

Plain and polite are closed lists: an ending in neither of them has no level. Kiwi's forms begin
with a combining jamo if they join a syllable (ᆯ게), and 아, 여 and 어 are one form: 어.
"""

from __future__ import annotations

import re
from typing import Literal

from trainer.roleplay.korean.kiwi import forms

#: ambiguous: 하게체, 하오체 and nominal endings, none of them polite or plain. fragment: no ending
#: with a level.
Level = Literal["polite", "plain", "ambiguous", "fragment"]

#: 해요체 and 합쇼체. 여, 유, 슈 and 쥬 are 요 and 죠 in chats and in the dialect of Chungcheong;
#: 예, 니더, 심더 and 니꺼 are polite in Gyeongsang. 다뇨 is 다니요. 소서 is 합쇼체, too.
_POLITE = re.compile(
    r"(?!잖여|으?리요).*[요여유예죠쥬슈]"
    r"|(?:.*[다라냐자])뇨"
    r"|.*니다(?:만|마는|만은)?"
    r"|.*[ᆸ습읍답랍럽잡렵옵]니까|.*나이[다까]|.*오니[다까]"
    r"|.*[ᆸ읍십]시오|[ᆸ읍]시다|.*[ᆸ읍십굽]쇼"
    r"|.*[슴ᆷ][다까]"
    r"|.*소서"
    r"|.*니[더꺼껴]|.*[심슴ᆷ]더|[ᆸ습]네다"
)
#: 하게체, then 하오체, then endings that make a noun.
_AMBIGUOUS = forms(
    "게 게나 는가 ᆯ런가 세 으세 세나 으세나 음세 ᆷ세 ᆯ세 "
    "오 으오 소 구려 는구려 리오 으리오 리요 으리요 우 수 ᆫ다오 는다오 다오 라오 ᆸ디다 습디다 "
    "ᆸ디까 습디까 "
    "음 ᆷ 기"
)
#: 하게체 too, and today 해체, unless the sentence says 자네 or 여보게.
_PLAIN_OR_HAGE = forms("네 나 ᆫ가 은가 던가 잖은가 구먼 는구먼 더구먼 로구먼")
HAGE_WORDS = forms("자네 여보게 이보게")
#: 해체 and 해라체, then those of dialects. `_QUOTED` are of reported speech: 간다고, 오라니까.
_PLAIN = forms(
    "어 야 애 지 어야지 야지 아야지 니 으니 냐 으냐 느냐 는데 ᆫ데 은데 던데 텐데 ᆯ텐데 을텐데 "
    "거든 거덩 거등 그든 거던 잖아 잖어 잖니 잖냐 ᆯ게 을게 ᆯ께 을께 ᆯ래 을래 ᆯ까 을까 ᆯ걸 을걸 "
    "ᆯ거야 ᆫ거야 는걸 ᆫ걸 은걸 던걸 구나 는구나 더구나 로구나 군 는군 더군 로군 구만 는구만 "
    "더구만 로구만 자 자꾸나 마 으마 렴 으렴 려무나 으려무나 려므나 어라 거라 너라 라 으라 더라 "
    "드라 더라고 더라구 드라고 드라구 더라니 더라니까 더래 더냐 드냐 다 ᆫ다 는다 도다 는도다 "
    "로다 노라 리라 으리라 니라 느니라 으니라 ᆯ라 을라 지어다 ᆯ지어다 을지어다 랴 으랴 다마다 "
    "고말고 구말구 려나 으려나 ᆯ려나 ᆯ라나 을라나 ᆯ까나 을까나 까나 ᆫ담 는담 담 람 "
    "노 제 꼬 ᆯ꼬 을꼬 당께 ᆫ당께 는당께 랑께 당가 ᆫ당가 는당가 ᆯ랑가 을랑가 는감 ᆫ감 은감 던감 "
    "는겨 ᆫ겨 ᆯ겨 ᆯ텨 을텨 래이 으래이 ᆫ다이 는다이 다이"
)
_QUOTED = re.compile(
    r"(?:ᆫ다|는다|다|으?라|자|느?냐)"
    r"(?:고|구|니|니까|니깐|냐|며|매|메|면서|네|지|더라|더군|더냐|던데|던가|나|는데|는군|는구나|잖아)"
    r"|(?:[ᆫ는]?대|으?래|재)(?:니까|더라|잖아|매|는데)?|[ᆫ는]?단다|으?란다|잔다"
)
#: Connective endings: a sentence that ends in one goes on in the mind. It has no level, unless it
#: asks: 밥은 먹었고?
OPEN_ASKING = forms(
    "고 구 며 으며 니 으니 려고 려구 으려고 으려구 ᆯ려고 ᆯ라고 을라고 면 으면 ᆫ다면 는다면 다면 "
    "라면 면서 으면서 게 길래 러 으러 다가"
)
#: Connective endings that say that the speaker does not care: 싫으면 말든가.
OPEN_CARELESS = forms("든가 든지")
#: Endings that connect clauses before a comma, and close a sentence at its end: 비가 오는데.
OPEN_INSIDE = forms(
    "는데 ᆫ데 은데 던데 니까 으니까 거든 다고 ᆫ다고 는다고 라고 으라고 냐고 느냐고 자고 다가 게 "
    "나 다니 ᆫ다니 는다니 라니 자니 다며 ᆫ다며 는다며 라며 자며 냐며"
)
#: They close a sentence, unless it breaks off: 추우니까…
CLOSED_UNLESS_CUT = forms("니까 으니까 니깐 으니깐")


def level_of_ending(form: str) -> Level:
    """Return the level of an ending."""
    if form in _AMBIGUOUS:
        return "ambiguous"
    if form in _PLAIN or form in _PLAIN_OR_HAGE or _QUOTED.fullmatch(form):
        return "plain"
    return "polite" if _POLITE.fullmatch(form) else "fragment"


def may_be_hage(form: str) -> bool:
    """Return whether a plain ending is also one of 하게체."""
    return form in _PLAIN_OR_HAGE
