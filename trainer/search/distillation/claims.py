"""Patterns of claims that something was seen, in English and Korean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from trainer.search.distillation.spelling import plain

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


def claims(thought: str) -> dict[str, int]:
    """Return the number of claims in a thought by the name of their pattern."""
    text = plain(thought)
    return {name: len(pattern.findall(text)) for name, pattern in CLAIMS.items()}
