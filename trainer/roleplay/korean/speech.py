"""The speech level of spoken text: polite (해요체, 합쇼체) or plain (해체, 해라체).

The ending of a sentence decides, not the words in it: 께서 and -시- honor the person spoken of. The
ending is the sentence's last EF of Kiwi; the EC that an EF becomes before "…" and commas; or 요
after a word that is no verb (저도요). Codas (가요ㅋ, 좋아용), stage directions (가요. (웃음)) and
words after the ending (가요, 선배.) are ignored. Only what is certain gets a level.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.roleplay.korean.kiwi import Morpheme, forms, sentences

# -- endings, in the forms of Kiwi -----------------------------------------------------------------
#
# Plain and polite are closed lists: an ending in neither of them has no level. Kiwi's forms begin
# with a combining jamo if they join a syllable (ᆯ게), and 아, 여 and 어 are one form: 어.

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


# -- sentences -------------------------------------------------------------------------------------

#: Words that are a full answer.
_POLITE_WORDS = re.compile(r"[네예]+에*|넵|넹|넴|옙|네엡|아뇨|아니요|아니오|글쎄요|천만에요")
_PLAIN_WORDS = forms(
    "응 웅 엉 응응 그래 아냐 아니야 안녕 미안 그렇지 야 오냐 가 봐 해 글쎄 그러게 ㅇㅇ ㄴㄴ ㅇㅋ"
)
#: Answers that are also cries or fillers: plain with these marks only.
_DOUBTFUL_WORDS = {
    "어": re.compile(r"[.~]?"),
    "아니": re.compile(r"[^…]*"),
    "자": re.compile(r"\?*"),
    "와": re.compile(r"\?*"),
    "그럼": re.compile(r"!+"),
}
#: Stage directions: (웃음), [작게], *미소*.
_DIRECTION = re.compile(
    r"\([^()\n]{1,60}\)|（[^（）\n]{1,60}）|\[[^\[\]\n]{1,60}\]|\*[^*\n]{1,60}\*"
)
#: Words of others, and what introduces them as such: '다녀올게.' 하고 말했어요.
_INNER_QUOTE = re.compile(
    r"(?<!\S)(?:'[^'\n]*[.!?…]'|‘[^‘’\n]*[.!?…]’)(?=\s*(?:이?라[고는며]|이?란|하[고며는]|그|고|는))"
)
#: 요 that Kiwi separates from its ending: 맞아예, 그랬어유.
_POLITE_TAIL = forms("요 여 유 예 염 뇨")
#: Persons whose household is written like a predicate: 친구네 is 친구의 집, or 친구이네.
_PERSONS = forms(
    "친구 누구 언니 누나 오빠 동무 엄마 아빠 할머니 할아버지 외할머니 이모 고모 숙모 아저씨 "
    "아주머니 아줌마 선배 후배 너희 저희 우리 걔 얘 쟤 아가씨 형수 사모 제수"
)
#: Connective endings begin like plain ones: 간다며 비웃었다.
_OPEN_ENDS = ("자니", "며", "면서")
#: They are one word with a contracted 이 and ᆫ가: 누군가, 뭔가, 어딘가.
_INDEFINITE = forms("누구 뭐 무엇 어디 언제 왜")


def levels(text: str, names: Sequence[tuple[int, int]] = ()) -> list[Level]:
    """Return the level of each sentence that has a letter.

    Stage directions are left out unless there is nothing else, and so are words of others that are
    quoted.
    names: see `sentences`.
    """
    spoken = _DIRECTION.sub(_blank, text)
    text = _INNER_QUOTE.sub(_blank, spoken if spoken.strip() else text)
    spans = [(start, end) for start, end in names if text[start:end].strip()]
    unsplit: list[list[Morpheme]] = []
    for sentence in sentences(text, spans):
        if unsplit and _begins_inside_a_word(text, sentence[0]):
            open_end = [m._replace(tag="EC") if m.tag == "EF" else m for m in unsplit[-1]]
            unsplit[-1] = open_end + sentence
        else:
            unsplit.append(sentence)
    return [level(sentence) for sentence in unsplit if _has_words(sentence)]


def _blank(match: re.Match[str]) -> str:
    """Return as many spaces: the positions of the other words stay."""
    return " " * len(match[0])


def _begins_inside_a_word(text: str, first: Morpheme) -> bool:
    """Return whether Kiwi begins a sentence after a letter: 가십니꺼 is read as 가, 십니꺼."""
    return first.start > 0 and text[first.start - 1].isalpha() and text[first.start].isalpha()


def level(sentence: Sequence[Morpheme]) -> Level:
    """Return the level of one sentence."""
    end = _without_marks(sentence)
    result: Level = "fragment"
    behind: Sequence[Morpheme] = ()
    while end:
        result = _level_of_end(end, _marks(sentence[len(end) :]), behind)
        if result != "fragment":
            break
        shorter = _before_last_comma(end)
        behind, end = end[len(shorter) :], shorter
    is_hage = result == "plain" and may_be_hage(end[-1].form)
    return "ambiguous" if is_hage and _calls_in_hage(sentence) else result


def _calls_in_hage(sentence: Sequence[Morpheme]) -> bool:
    """Return whether a sentence has 자네 or 여보게; Kiwi reads 이보게 as 이, 보, 게."""
    if any(morpheme.form in HAGE_WORDS for morpheme in sentence):
        return True
    return "".join(m.form for m in sentence[:3]) in HAGE_WORDS


def _without_marks(sentence: Sequence[Morpheme]) -> list[Morpheme]:
    end = list(sentence)
    while end and _is_ignored(end[-1], end):
        end.pop()
    return end


def _marks(morphemes: Sequence[Morpheme]) -> str:
    """Return the marks that follow an ending, up to the next word."""
    marks = ""
    for morpheme in morphemes:
        if morpheme.tag[0] != "S":
            break
        marks += morpheme.form
    return marks


def _level_of_end(end: Sequence[Morpheme], marks: str, behind: Sequence[Morpheme]) -> Level:
    """Return the level of the last morpheme.

    marks: those after it.
    behind: the words after its comma, if it is not the sentence's end.
    """
    last, before = end[-1], end[-2] if len(end) > 1 else None
    if before and last.form in _POLITE_TAIL and before.tag in ("EF", "EC", "JX"):
        return "polite"
    if last.tag in ("EF", "EC") or (last.form == "요" and last.tag in ("JX", "MM", "IC")):
        return _level_of_final_ending(end, marks, behind)
    if last.tag == "ETN":
        return level_of_ending(last.form)
    if _ends_in_neunde(end):
        return "fragment" if behind else "plain"
    if last.tag == "JKV" and any(morpheme.tag in ("JX", "JKS") for morpheme in end):
        return "plain"  # 내 이름은 유나야: Kiwi takes the verb for a call
    if (last.form, last.tag) == ("되", "VV") or _denies(end, marks):
        return "plain"  # 안 되 is written for 안 돼
    is_single_word = before is None or before.tag in ("SP", "SF", "SE")
    if last.tag == "IC" or is_single_word:
        if before and before.start + len(before.form) == last.start and not is_single_word:
            return "fragment"  # 그네, which Kiwi reads as 그 and 네
        return _level_of_word(last.form, last.tag, marks if is_single_word else "")
    return "fragment"


def _ends_in_neunde(end: Sequence[Morpheme]) -> bool:
    """Return whether 없는데 ends the sentence, which Kiwi may read as a place: 없는 데."""
    if len(end) < 3 or (end[-1].form, end[-1].tag) != ("데", "NNB"):
        return False
    stem, modifier, noun = end[-3:]
    return (
        stem.tag == "VA"
        and (modifier.form, modifier.tag) == ("는", "ETM")
        and modifier.start + len(modifier.form) == noun.start
    )


def _level_of_final_ending(
    end: Sequence[Morpheme], marks: str, behind: Sequence[Morpheme]
) -> Level:
    """Return the level of the ending that is the last morpheme of `end`.

    Arguments as of `_level_of_end`. A question or a sentence that breaks off can decide it.
    """
    form, tag = end[-1].form, end[-1].tag
    if behind and tag == "EC" and form in OPEN_INSIDE:
        # 없나, 얘들아 asks; 하나, 늦겠지 goes on.
        return "fragment" if form != "나" or any(m.tag[0] in "VE" for m in behind) else "plain"
    asks = not behind and ("?" in marks or "？" in marks)
    is_cut = "…" in marks or ".." in marks
    if asks and form in OPEN_ASKING:
        return "plain"
    if form in OPEN_CARELESS:
        return "fragment" if behind or is_cut else "plain"
    if form in CLOSED_UNLESS_CUT:
        return "fragment" if is_cut else "plain"
    return "fragment" if _is_doubtful(end, asks, is_cut) else level_of_ending(form)


def _is_doubtful(end: Sequence[Morpheme], asks: bool, is_cut: bool) -> bool:
    """Return whether the last morpheme is perhaps not the ending that Kiwi takes it for."""
    last = end[-1]
    before = end[-2] if len(end) > 1 else last
    is_copula = before.tag in ("VCP", "VCN")
    if before.tag == "MM" or [morpheme.tag for morpheme in end[-3:-1]] == ["ETM", "VV"]:
        return True  # 높은 이자, 예쁜 가지: what describes a noun stands before no verb
    if last.form in ("여", "이여"):
        return is_copula  # 아니여 is 아니야 in some dialects, and 아니에요 in chats
    if last.tag == "EC" and last.form == "라":
        return is_copula  # 그런 게 아니라…
    if last.tag == "EC" and last.form == "다":
        return before.tag == "VV" and before.form not in ("있", "없")  # 집에 오다…
    if last.tag == "EC" and (last.form in ("니", "으니") or last.form.endswith(_OPEN_ENDS)):
        return not asks
    if last.tag == "EC" and last.form == "나" and is_cut:
        return before.tag != "EP"  # 비가 오나…: it asks, or it means but
    if last.form == "어" and "".join(morpheme.form for morpheme in end) == "하지말어":
        return end[0].start == end[1].start  # 치마
    if len(end) < 3 or before.tag != "VCP":
        return False
    noun = end[-3]
    if noun.start + len(noun.form) > before.start and last.form == "ᆫ가":
        return noun.form in _INDEFINITE
    return (
        last.form == "네"
        and (noun.tag == "NNP" or noun.form in _PERSONS)
        and (before.start == last.start)
    )


def _denies(end: Sequence[Morpheme], marks: str) -> bool:
    """Return whether the sentence is a reply such as 고맙긴, 예쁘기는."""
    if len(end) < 3 or "…" in marks or ".." in marks:
        return False
    stem, nominal, particle = end[-3:]
    return (
        (nominal.form, nominal.tag) == ("기", "ETN")
        and (particle.form, particle.tag) in (("ᆫ", "JX"), ("는", "JX"))
        and (stem.tag == "VA" or (stem.tag == "VV" and stem.form not in ("하", "보")))
    )


def _level_of_word(form: str, tag: str, marks: str) -> Level:
    """Return the level of a word that is an answer by itself, such as 네, 그럼요, 응."""
    if _POLITE_WORDS.fullmatch(form) or (tag == "IC" and form.endswith("요")):
        return "polite"
    if form.endswith(("세요", "세용", "네요", "니다")):
        return "polite"
    if form in _DOUBTFUL_WORDS:
        return "plain" if _DOUBTFUL_WORDS[form].fullmatch(marks) else "fragment"
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


def _has_words(sentence: Sequence[Morpheme]) -> bool:
    """Return whether a sentence has more than marks."""
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
