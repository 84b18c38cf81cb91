"""Split text into sentences by simple rules of punctuation, and cut it where it hurts least.

They cover Latin, Chinese, Japanese, Korean, Arabic and Devanagari. A full stop after an
abbreviation, an initial, a number or an ordinal does not end a sentence, and neither does one in a
quotation if "he said" follows. Thai has no sentence ends.

`python -m bench.sentences` measures the quality.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Marks that end a sentence if white space follows, and marks that need none. A match starts only
#: at the first mark of a run: starting within the run finds nothing new and costs time.
_SENTENCE_END = re.compile(
    r"(?<![.!?…‥।॥؟۔])[.!?…‥।॥؟۔]++[\"'”’“»«)\]]*+(?=\s)|[。！？｡]+[\"'”’»）」』】》〉)\]]*|．(?![0-9０-９])"
)
_ABBREVIATIONS = _words(
    "mr mrs ms dr prof st sr jr vs cf ca approx dept est inc ltd co corp gen col lt sgt rep "
    "sen gov rev hon eds etc bzw usw vgl bspw ggf evtl inkl exkl zzgl sog hrsg insb bzgl"
)
#: German abbreviations that can end a sentence, too: "8 Mio. Euro", but "8 Mio. Das". German writes
#: its nouns with capitals; so such a sentence ends only before a word that often begins one.
_MAYBE_LAST = _words("mio mrd tsd")
_STREET = re.compile(r"(?:str|[a-zäöüß]{2,}str)\Z", re.IGNORECASE)
_GERMAN_STARTS = _words(
    "Aber Alle Als Am Auch Auf Bei Da Dabei Dadurch Dafür Daher Damit Danach Dann Darin Das "
    "Davon Dazu Dem Den Denn Der Des Deshalb Die Dies Diese Dieser Dieses Doch Dort Ein Eine "
    "Einer Er Es Für Gegen Heute Hier Ich Ihr Ihre Im In Jede Jeder Jetzt Kein Keine Man Mit "
    "Nach Nun Ob Obwohl Sein Seine Seit Sie Sind So Später Trotz Trotzdem Um Und Unter Viele "
    "Vom Von Vor Was Weil Wenn Wer Wie Wir Wo Zu Zudem Zum Zur Zuvor Zwar"
)
#: The word before a mark is searched in so many characters.
_LONGEST_WORD = 100
#: Characters above this one (Han, kana, Hangul) have no abbreviations with a full stop.
_LAST_ABBREVIATED = "\u2e80"
#: Abbreviations if a number follows: "No. 5", but "He said no. They left."
_BEFORE_FIGURES = _words(
    "no nos nr fig figs eq sec ch vol p pp jan feb mar apr jun jul aug sep sept oct nov dec "
    "okt dez abb abs art bd kap"
)
#: German writes its ordinals with a full stop: "der 2. Weltkrieg", "am 3. Oktober".
_BEFORE_ORDINALS = frozenset(
    {"der", "die", "das", "dem", "den", "des", "vom", "zum", "zur", "beim", "im", "jeder", "jede"}
)
#: Its possessives and articles, before an ordinal unless the next word often begins a sentence.
_DETERMINER = re.compile(
    r"(?:(?:mein|dein|sein|ihr|unser|eur|euer|kein|ein)(?:e|em|en|er|es)?"
    r"|(?:dies|jen|welch)(?:e|em|en|er|es)|jede[mnrs]|am|ab|bis)\Z",
    re.IGNORECASE,
)
_AFTER_ORDINALS = re.compile(
    r"(?:Januar|Jänner|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
    r"|Jan|Feb|Apr|Aug|Sept?|Okt|Nov|Dez|Jahrhundert|Jh)\b"
)
_INITIALS = re.compile(r"(?:[A-Za-zÀ-ɏΑ-я]\.)*[A-Za-zÀ-ɏΑ-я]")
_LATIN_END = re.compile(r"(?<=[\u3040-\u9fff\uac00-\ud7af])[A-Za-z.]+\Z")
#: Sentence ends before the number of a list item: "...the rice. 2. Then".
_ENDS = (".", "!", "?", "…")
#: A closing quotation mark at the end of a match.
_CLOSED = re.compile(r"[\"'”’“»«」』]\Z")
_ENGLISH_FRAME = re.compile(
    r"(?:[A-Z][\w.’'-]*\s(?:[A-Z][\w.’'-]*\s){0,2}|The\s(?:\w+\s){1,3})"
    r"(?:said|asked|replied|answered|shouted|cried|whispered|began|added|called|exclaimed)\b"
)
#: What follows a quotation within its sentence, such as "he said", in Korean, Japanese and Chinese.
#: Lower-case letters continue a sentence anyway.
_FRAME = re.compile(
    # Korean: a particle or a verb of quotation, or a subject of a few words and a verb of speech.
    r"(?:이?라[고는며던]|이?라면서|하[고며는던여]|하셨|했|며|면서|고|는|란|이란)(?=[\s가-힣.,])"
    r"|(?:[가-힣]+\s){0,4}(?:말하|말했|말씀하|묻|물었|물으|대답하|대답했|답하|답했|외치|외쳤|소리치|소리쳤"
    r"|덧붙이|덧붙였|강조하|강조했|속삭이|속삭였|중얼거리|중얼거렸|설명하|설명했|되묻|되물|반문하|반문했)"
    r"[가-힣]{0,2}(?:다|며|고|면서)(?=[.,\s])"
    # Japanese: a particle of quotation, or of the noun that it is; or a subject and a verb.
    r"|と(?!ころ|ても|きどき|もだち|なり|うとう|けい|にかく)|って|という|とか|など|なんて"
    r"|[のをがはに](?=[一-鿿々ァ-ヶ、])"
    r"|[一-鿿]{1,4}[がは](?![^。！？]{0,8}な(?:い|かった))(?:叫|言|答|聞|尋|呼|つぶや|ささや)[^。！？「」]{0,8}[。、]"
    # Chinese: a subject of a few characters and a verb of speech, which is not denied; or 的.
    r"|(?![一-鿿]{0,10}[没沒不])[一-鿿]{1,10}?"
    r"(?:[说說](?![法明服])|[问問](?![题題])|(?<![知味报報难難])道(?![路理])|喊|答(?![案应應])|叫(?!做)|[叹嘆])"
    r"[一-鿿]{0,3}[。，！？]"
    r"|的(?=[一-鿿])|[说說]完"
    # A mark within a sentence.
    r"|[，、,;；]"
)
_THAI = re.compile(r"[\u0e00-\u0e7f]")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"\w*")
_LINE = re.compile(r"[^\n\r\u2028\u2029]+")
#: Places to cut, after a clause and after white space.
_CLAUSE = re.compile(r"[,;:，、；：،؛—–][\"'”’»）」』)\]]{0,4}\s?")
_WHITE_SPACE = re.compile(r"\s")
#: How far from the target a better position is searched by default, as a share of the part.
_NEAR = 1 / 8
_JOINER = "\u200d"


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Return the spans of the sentences of a line."""
    spans = []
    start, stop = after_space(text, 0), len(text.rstrip())
    for match in _SENTENCE_END.finditer(text, start, stop):
        if match.end() == stop:
            break
        following = after_space(text, match.end())
        if _ends_sentence(text, match, following):
            spans.append((start, match.end()))
            start = following
    return [*spans, (start, stop)] if start < stop else spans


def after_space(text: str, position: int) -> int:
    """Return the position of the next character that is not white space."""
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]


def _ends_sentence(text: str, match: re.Match[str], after: int) -> bool:
    """Return True if the match ends a sentence.

    after: position of the text after the match.
    """
    mark, following = match.group(), text[after]
    if _is_in_frame(text, mark, after):
        return False
    if mark[0] in "。！？｡．":
        return True
    if following.islower():
        return False
    if mark[0] != "." or mark.startswith(".."):
        return True
    if match.start() and text[match.start() - 1] > _LAST_ABBREVIATED:
        return True
    before = text[max(0, match.start() - _LONGEST_WORD) : match.start()]
    lead, _, word = before.rpartition(" ")
    if _THAI.match(word[-1:]):  # a full stop does not end a Thai sentence: "9.30 น.", "พ.ศ."
        return False
    begins = len(word) == match.start() or lead.endswith(_ENDS)
    word = word[word.rfind("(") + 1 :].lstrip("\"'“‘[")
    if not word.isascii() and (latin := _LATIN_END.search(word)):  # "据Dr."
        word = latin.group()
    lower = word.lower()
    if lower in _ABBREVIATIONS or _INITIALS.fullmatch(word):  # "e.g.", "J.", "U.S."
        return False
    if lower in _BEFORE_FIGURES and following.isdigit():
        return False
    if lower in _MAYBE_LAST or _STREET.match(word):
        return following.isupper() and _WORD.match(text, after).group() in _GERMAN_STARTS  # type: ignore[union-attr]
    if word.replace(".", "").isdigit():  # "2023. 5. 1.", "1. First"; but "in 2023. The"
        ordinal = len(word) < 3 and (
            lead.rpartition(" ")[2].lower() in _BEFORE_ORDINALS
            or (
                _DETERMINER.match(lead.rpartition(" ")[2])
                and _WORD.match(text, after).group() not in _GERMAN_STARTS  # type: ignore[union-attr]
            )
            or _AFTER_ORDINALS.match(text, after)
        )
        return not begins and following.isupper() and not ordinal
    return True


def _is_in_frame(text: str, mark: str, after: int) -> bool:
    """Return True if a quotation ends with the mark, and its sentence goes on."""
    if text[after] in "，、；":
        return True
    if not _CLOSED.search(mark):
        return False
    # Before "he said" English has a comma in place of a full stop.
    is_full_stop = mark[0] == "." and not mark.startswith("..")
    return bool(_FRAME.match(text, after)) or (
        not is_full_stop and _ENGLISH_FRAME.match(text, after) is not None
    )


def sentence_starts(text: str) -> list[int]:
    """Return the start of each sentence of a text with any number of lines, and the text's length.

    A sentence reaches to the next start, including white space; the first starts at 0. A line end
    ends a sentence."""
    starts = [
        line.start() + start
        for line in _LINE.finditer(text)
        for start, _ in split_sentences(line.group())
    ]
    return [0, *starts[1:], len(text)] if text else [0]


def cut_near(text: str, start: int, end: int, target: int, near: float = _NEAR) -> int:
    """Return the best position near `target` to cut text[start:end]; not its ends, if there are
    others.

    near: the distance to search, as a share of the part."""
    if end - start < 2:
        return end if target > start else start
    target = min(max(target, start + 1), end - 1)
    reach = max(1, round((end - start) * near))
    low, high = max(start + 1, target - reach), min(end - 1, target + reach)
    for find_cuts in (_sentence_cuts, _clause_cuts, _space_cuts, _character_cuts):
        positions = [position for position in find_cuts(text, low, high) if low <= position <= high]
        if positions:
            return min(positions, key=lambda position: abs(position - target))
    return target


def _sentence_cuts(text: str, low: int, high: int) -> Iterator[int]:
    begin = max(0, low - 100)  # the text before a full stop decides whether it ends a sentence
    return (begin + position for position in sentence_starts(text[begin : high + 2])[1:-1])


def _clause_cuts(text: str, low: int, high: int) -> Iterator[int]:
    return (match.end() for match in _CLAUSE.finditer(text, max(0, low - 6), high + 2))


def _space_cuts(text: str, low: int, high: int) -> Iterator[int]:
    return (match.end() for match in _WHITE_SPACE.finditer(text, max(0, low - 1), high))


def _character_cuts(text: str, low: int, high: int) -> Iterator[int]:
    """Yield positions between characters, but not within one that is written as several."""
    return (
        position
        for position in range(low, high + 1)
        if _JOINER not in text[position - 1 : position + 1]
        and unicodedata.category(text[position])[0] != "M"
    )
