"""Judge translations by rules alone: errors that need no model.

Rules shared with synthesis and guards are in scorekit/text/rules.py, with thresholds that reject
few good translations: README.md has the measured rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scorekit.errors import SampleError
from scorekit.languages import find_language, language_name
from scorekit.text import chat_marks, checks, meta_text, rules
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
