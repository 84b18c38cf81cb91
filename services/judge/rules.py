"""The verdict of rules alone: what is so wrong with a translation that no model need be asked.

The thresholds reject few good translations: README.md has the measured rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scorekit.errors import SampleError
from scorekit.languages import Language, find_language, language_name
from scorekit.text import chatmarks, chatter, checks
from scorekit.text.markup import mask
from scorekit.text.variants import other_variant

#: Least share of letters in the target's script, asked from so many letters on; from few letters
#: on at least one.
MIN_SCRIPT_SHARE, SCRIPT_LETTERS, FEW_LETTERS = 0.3, 20, 4
#: Share of the other variant's among the characters that only one variant of Chinese has.
MAX_OTHER_VARIANT = 0.2
#: Letters from which on the language is identified, and the least probability to believe it.
LANGUAGE_LETTERS, LANGUAGE_PROBABILITY = 40, 0.9
#: A translation of at least so many letters may share this much with its source.
COPY_LETTERS, MAX_COPIED = 20, 0.9
#: How much more of the translation than of the source may stand in loops.
MAX_REPETITION = 0.3


def judge_translation(texts: Mapping[str, str]) -> dict[str, Any] | SampleError:
    """Score 1 or 0 and the verdict: the first rule that a candidate breaks, else `ok`."""
    languages = {}
    for variable in ("source_lang", "target_lang"):
        found = find_language(texts[variable])
        if found is None:
            return SampleError("invalid_input", f"{variable}: rules know no such language")
        # The tag as it was sent: a bare "zh" is both variants, "sr" both scripts.
        languages[variable] = found._replace(tag=texts[variable])
    src, mt = texts["source_text"], texts["candidate"]
    for code, rule in _RULES.items():
        if (notes := rule(src, mt, languages["source_lang"], languages["target_lang"])) is not None:
            verdict = {"pass": False, "reason_code": code, "notes": notes[:300]}
            return {"score": 0.0, "verdict": verdict}
    return {"score": 1.0, "verdict": {"pass": True, "reason_code": "ok", "notes": ""}}


def _empty(src: str, mt: str, source: Language, target: Language) -> str | None:
    return "no text" if src.strip() and not mt.strip() else None


def _found(check: Callable[[str, str], str | None]) -> Callable[..., str | None]:
    return lambda src, mt, source, target: check(src, mt)


def _wrong_script(src: str, mt: str, source: Language, target: Language) -> str | None:
    share = checks.script_share(mt, target.tag, src)
    letters = _letters(mt)
    if share is None or share >= MIN_SCRIPT_SHARE or letters < FEW_LETTERS:
        return None
    if share > 0.0 and letters < SCRIPT_LETTERS:
        return None
    return f"{share:.0%} of the letters are {target.name}"


def _wrong_variant(src: str, mt: str, source: Language, target: Language) -> str | None:
    found = other_variant(mt, target.tag)
    if found is None or found[0] <= MAX_OTHER_VARIANT:
        return None
    return f"not {language_name(target.tag)}: {found[1]}"


def _wrong_language(src: str, mt: str, source: Language, target: Language) -> str | None:
    if source.iso639_3 == target.iso639_3 or _letters(mt) < LANGUAGE_LETTERS:
        return None
    found = checks.language_id(mt, [source.tag, target.tag])
    if found is None or found[0] == target.tag or found[1] < LANGUAGE_PROBABILITY:
        return None
    return f"it reads as {source.name}"


def _copied(src: str, mt: str, source: Language, target: Language) -> str | None:
    if source.iso639_3 == target.iso639_3 or _letters(mt) < COPY_LETTERS:
        return None
    share = checks.copied_share(src, mt)
    return f"{share:.0%} stands in the source" if share >= MAX_COPIED else None


def _repetition(src: str, mt: str, source: Language, target: Language) -> str | None:
    more = checks.repetition(src, mt)
    return f"{more:.0%} more in loops than the source" if more > MAX_REPETITION else None


def _length(src: str, mt: str, source: Language, target: Language) -> str | None:
    ratio = checks.length_ratio(src, mt)
    least, most = checks.length_band(src, source.tag, target.tag)
    if not src.strip() or least <= ratio <= most:
        return None
    return f"{ratio:.2f} bytes for each of the source, usual are {least:.2f} to {most:.2f}"


def _letters(text: str) -> int:
    return sum(char.isalpha() for char in mask(text))


#: Reason code -> rule, which gives the notes of a failed translation. The first one counts.
_RULES: dict[str, Callable[[str, str, Language, Language], str | None]] = {
    "empty": _empty,
    "meta_phrase": _found(chatter.meta_phrase),
    "refusal": _found(chatter.refusal),
    "added_note": _found(chatter.added_note),
    "added_quotes": _found(checks.added_quotes),
    "role_token": _found(chatmarks.role_token),
    "marker": _found(checks.marker),
    "copied": _copied,
    "wrong_script": _wrong_script,
    "wrong_variant": _wrong_variant,
    "wrong_language": _wrong_language,
    "repetition": _repetition,
    "length": _length,
}
