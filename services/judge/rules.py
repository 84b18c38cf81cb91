"""Judge translations and answers by rules alone, which need no model.

The rules always give the same verdict. Of a translation they find errors. Rules shared with
synthesis and guards are in scorekit/text/rules.py, with thresholds that reject few good
translations: README.md has the measured rates.

An answer is compared with a reference, by an exact or a numeric match. The rules do not understand
meaning: a correct answer in other words, or within a full sentence, counts as wrong.

Two texts match exactly if they are equal without case, width, punctuation, quotation marks, white
space (all of it in Korean; its amount elsewhere), thousands separators, English articles, and the
Korean copula at the end (입니다, 이에요, 이다, ...). They match numerically if each is exactly one
quantity, `[currency] number [unit]`, with the same value, and with the same unit if both name one:
1,200,000, 1.2 million and 120만 are one value; %, percent and 퍼센트 one unit. A percentage does
not equal its fraction.

An answer of several parts is right if its parts, between commas, semicolons, line ends or "and",
match those of the reference one by one, in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from scorekit.errors import SampleError
from scorekit.languages import find_language, language_name
from scorekit.text import chat_marks, checks, markup, meta_text, rules
from scorekit.text.findings import Certainty, TextFinding, debris, third_script
from scorekit.text.rules import JUDGE, Pair


def judge_translation(texts: Mapping[str, str]) -> dict[str, Any] | SampleError:
    """Return score 1 or 0 and the verdict: the first rule that the candidate breaks, else `ok`."""
    for variable in ("source_lang", "target_lang"):
        if find_language(texts[variable]) is None:
            return SampleError("invalid_input", f"{variable}: unknown language")
    # Tags as they were sent: a bare "zh" is both variants, "sr" both scripts.
    pair = Pair(
        texts["source_text"], texts["candidate"], texts["source_lang"], texts["target_lang"]
    )
    for code, rule in _RULES.items():
        if (notes := rule(pair)) is not None:
            verdict = {"pass": False, "reason_code": code, "notes": notes[:300]}
            return {"score": 0.0, "verdict": verdict}
    return {"score": 1.0, "verdict": {"pass": True, "reason_code": "ok", "notes": ""}}


def _empty(pair: Pair) -> str | None:
    return "no text" if pair.src.strip() and not pair.mt.strip() else None


def _on_texts(check: Callable[[str, str], str | None]) -> Callable[[Pair], str | None]:
    return lambda pair: check(pair.src, pair.mt)


def _copied(pair: Pair) -> str | None:
    share = rules.copied(pair, JUDGE)
    return None if share is None else f"{share:.0%} stands in the source"


def _wrong_script(pair: Pair) -> str | None:
    share = rules.wrong_script(pair, JUDGE)
    return None if share is None else f"{share:.0%} of the letters are {_name(pair.target_lang)}"


def _third_script(pair: Pair) -> str | None:
    return _certain(third_script(pair.src, pair.mt, pair.source_lang, pair.target_lang))


def _debris(pair: Pair) -> str | None:
    return _certain(debris(pair.src, pair.mt, pair.target_lang))


def _certain(finding: TextFinding | None) -> str | None:
    """Return what was seen if it is certain: these rules decide alone."""
    return finding.seen if finding and finding.certainty is Certainty.CERTAIN else None


def _wrong_variant(pair: Pair) -> str | None:
    match = rules.wrong_variant(pair, JUDGE)
    return None if match is None else f"not {language_name(pair.target_lang)}: {match[1]}"


def _wrong_language(pair: Pair) -> str | None:
    match = rules.source_language(pair, JUDGE)
    return None if match is None else f"it reads as {_name(pair.source_lang)}"


def _repetition(pair: Pair) -> str | None:
    more = rules.repetition(pair, JUDGE)
    return None if more is None else f"{more:.0%} more in loops than the source"


def _length(pair: Pair) -> str | None:
    match = rules.length_ratio(pair, JUDGE)
    if match is None or not pair.src.strip():
        return None
    ratio, min_ratio, max_ratio = match
    return f"{ratio:.2f} bytes for each of the source, usual are {min_ratio:.2f} to {max_ratio:.2f}"


def _name(key: str) -> str:
    """Return the name of the language, without script or region."""
    language = find_language(key)
    return language.name if language else key


#: Reason code -> rule, which returns notes for a failed translation. The first failure counts.
_RULES: dict[str, Callable[[Pair], str | None]] = {
    "empty": _empty,
    "meta_phrase": _on_texts(meta_text.meta_phrase),
    "refusal": _on_texts(meta_text.refusal),
    "added_note": _on_texts(meta_text.added_note),
    "added_quotes": _on_texts(checks.added_quotes),
    "role_token": _on_texts(chat_marks.role_token),
    "marker": _on_texts(checks.marker),
    "debris": _debris,
    "copied": _copied,
    "wrong_script": _wrong_script,
    "third_script": _third_script,
    "wrong_variant": _wrong_variant,
    "wrong_language": _wrong_language,
    "repetition": _repetition,
    "length": _length,
}


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_COPULA = re.compile(r"(?:입니다|이었습니다|였습니다|이에요|예요|이다|(?<=\d)다)$")
_DASHES = str.maketrans(dict.fromkeys("‐‑‒–—−", "-"))
_NOT_WORDS = re.compile(r"[^\w%$€£¥₩°+\-.,]|_")
_WORD_AFTER, _KOREAN_SCALE = re.compile(r"\s*([a-z]+)\b"), re.compile(r"\s*([십백천만억조])")
_MORE_DIGITS = re.compile(r"\s*(\d[\d,]*(?:\.\d+)?)")
#: Points, commas and hyphens that do not belong to a number.
_LOOSE_MARKS = re.compile(
    r"(?<!\d)[.,]|[.,](?!\d)|(?<=\d),(?=\d{3}\b)|(?<=\w)-(?=[^\W\d])|(?<=[^\W\d])-(?=\w)"
)
#: Spaces next to non-ASCII characters: Korean writers place them differently.
_SPACES = re.compile(r" (?=[^\x00-\x7f])|(?<=[^\x00-\x7f]) ")
_CURRENCY = {"$": "$", "€": "€", "£": "£", "¥": "¥", "₩": "원"}
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[+-]?\.\d+")
#: Words after a number that multiply it. Korean ones can be chained: 3조 5천억.
_SCALES = {
    "thousand": 10**3,
    "k": 10**3,
    "million": 10**6,
    "mn": 10**6,
    "billion": 10**9,
    "bn": 10**9,
    "trillion": 10**12,
}
_KOREAN = {"십": 10, "백": 100, "천": 1000}
_KOREAN_LARGE = {"만": 10**4, "억": 10**8, "조": 10**12}
#: Spellings of one unit.
_UNITS = {
    "percent": "%",
    "per cent": "%",
    "pct": "%",
    "퍼센트": "%",
    "프로": "%",
    "percentage points": "%p",
    "percentage point": "%p",
    "pp": "%p",
    "퍼센트포인트": "%p",
    "dollars": "$",
    "dollar": "$",
    "usd": "$",
    "us$": "$",
    "달러": "$",
    "euros": "€",
    "euro": "€",
    "eur": "€",
    "유로": "€",
    "won": "원",
    "krw": "원",
    "yen": "¥",
    "엔": "¥",
    "year": "년",
    "years": "년",
    "yr": "년",
    "yrs": "년",
    "people": "명",
    "persons": "명",
    "person": "명",
    "kilometres": "km",
    "kilometers": "km",
    "킬로미터": "km",
    "metres": "m",
    "meters": "m",
    "미터": "m",
    "kilograms": "kg",
    "킬로그램": "kg",
    "degrees celsius": "°c",
    "celsius": "°c",
    "degrees": "°",
}
#: Between the parts of an answer; the second form also splits at words.
_BETWEEN_PARTS = (
    re.compile(r"[;\n]|,(?!\d{3}(?!\d))"),
    re.compile(r"[;\n&]|,(?!\d{3}(?!\d))|\band\b|(?<!\S)(?:및|그리고)(?!\S)", re.IGNORECASE),
)
#: Longest answer, in characters, that is parsed as a quantity.
_MAX_QUANTITY_CHARS = 80


class Quantity(NamedTuple):
    """A number with its unit; the unit is empty if the text names none."""

    value: Decimal
    unit: str


def judge_answer(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return score 1 or 0, and the verdict on `answer` against `reference`."""
    return _outcome(_match(texts["answer"], texts["reference"]))


def judge_any_of(texts: Mapping[str, str]) -> dict[str, Any] | SampleError:
    """Return the outcome of `answer` against the best of `references`.

    references: a JSON array of texts and of arrays of texts (an answer of several parts). Anything
    else is a SampleError.
    """
    try:
        references = json.loads(texts["references"])
    except (ValueError, RecursionError):
        references = None
    entries = references if isinstance(references, list) else []
    if not entries or not all(map(_is_reference, entries)):
        return SampleError(
            "invalid_input", "references: expected a JSON array of texts and of arrays of texts"
        )
    notes = (
        _match(texts["answer"], entry)
        if isinstance(entry, str)
        else _match_parts(texts["answer"], entry)
        for entry in entries
    )
    return _outcome(next(filter(None, notes), None))


def _is_reference(entry: Any) -> bool:
    parts = [entry] if isinstance(entry, str) else entry
    return isinstance(parts, list) and bool(parts) and all(isinstance(part, str) for part in parts)


def _outcome(notes: str | None) -> dict[str, Any]:
    verdict = {
        "pass": notes is not None,
        "reason_code": "wrong" if notes is None else "correct",
        "notes": notes or "no exact or numeric match; rules read no meaning",
    }
    return {"score": float(notes is not None), "verdict": verdict}


def _match(answer: str, reference: str) -> str | None:
    answer_text, reference_text = normalized(answer), normalized(reference)
    if reference_text and answer_text == reference_text:
        return "exact match"
    answer_quantity, reference_quantity = quantity(answer), quantity(reference)
    if (
        answer_quantity is None
        or reference_quantity is None
        or answer_quantity.value != reference_quantity.value
    ):
        return None
    units = {answer_quantity.unit, reference_quantity.unit} - {""}
    return "numeric match" if len(units) <= 1 else None


def _match_parts(answer: str, reference: Sequence[str]) -> str | None:
    """Return "all parts match" if each part of one matches a part of the other of its own."""
    inner = answer.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    for pattern in _BETWEEN_PARTS:
        parts = [part for part in pattern.split(inner) if normalized(part)]
        missing = list(reference)
        for part in parts:
            match = next((other for other in missing if _match(part, other)), None)
            if match is None:
                break
            missing.remove(match)
        else:
            if parts and not missing:
                return "all parts match"
    return None


def normalized(text: str) -> str:
    """Return the form of a text that is compared for an exact match."""
    text = markup.normalized("NFKC", text).casefold().translate(_DASHES)
    text = _LOOSE_MARKS.sub(_mark_replacement, _NOT_WORDS.sub(" ", text))
    text = _COPULA.sub("", text.strip())
    return _SPACES.sub("", " ".join(_ARTICLES.sub(" ", text).split()))


def _mark_replacement(match: re.Match[str]) -> str:
    """Return "" for a thousands separator, and a space for other marks."""
    text, position = match.string, match.start()
    is_inner_comma = match[0] == "," and 0 < position < len(text) - 1
    return (
        ""
        if is_inner_comma and text[position - 1].isdigit() and text[position + 1].isdigit()
        else " "
    )


def quantity(text: str) -> Quantity | None:
    """Return the quantity that a text consists of; None if it is anything else."""
    if len(text) > _MAX_QUANTITY_CHARS:
        return None
    text = markup.normalized("NFKC", text).casefold().translate(_DASHES)
    text = text.strip().rstrip(".。!")
    text = _COPULA.sub("", text.strip()).strip("\"'` ")
    sign = "-" if text.startswith("-") else ""
    text = text.removeprefix("-").lstrip()
    currency = next((unit for mark, unit in _CURRENCY.items() if text.startswith(mark)), "")
    value, remainder = _value(sign + (text[1:].lstrip() if currency else text))
    if value is None:
        return None
    unit = " ".join(remainder.split())
    if any(char.isdigit() for char in unit) or len(unit.split()) > 3:
        return None
    unit = _UNITS.get(unit, unit)
    if currency and unit and unit != currency:
        return None
    return Quantity(value.normalize(), unit or currency)


def _value(text: str) -> tuple[Decimal | None, str]:
    """Return the number at the start of a text with its scale, and the text after it."""
    number_match = _NUMBER.match(text)
    if not number_match:
        return None, text
    number, remainder = Decimal(number_match[0].replace(",", "")), text[number_match.end() :]
    word = _WORD_AFTER.match(remainder)
    if word and word[1] in _SCALES:
        return number * _SCALES[word[1]], remainder[word.end() :]
    if not _KOREAN_SCALE.match(remainder):
        return number, remainder
    return _korean(number, remainder)


def _korean(number: Decimal, remainder: str) -> tuple[Decimal, str]:
    """Return a number with the Korean scales after it, and the remaining text.

    Examples: 120만, 3조 5천억, 1만 2,300."""
    total, below, current = Decimal(0), Decimal(0), number
    negative, current = current < 0, abs(current)
    has_number, position = True, 0
    while True:
        word = _KOREAN_SCALE.match(remainder, position)
        if word and word[1] in _KOREAN:
            below += (current if has_number else 1) * _KOREAN[word[1]]
            current, has_number = Decimal(0), False
        elif word:
            below += current if has_number else 0
            total += (below or 1) * _KOREAN_LARGE[word[1]]
            below, current, has_number = Decimal(0), Decimal(0), False
        else:
            digits = None if has_number else _MORE_DIGITS.match(remainder, position)
            if not digits:
                break
            current, has_number = Decimal(digits[1].replace(",", "")), True
            word = digits
        position = word.end()
    total += below + (current if has_number else 0)
    return -total if negative else total, remainder[position:]
