"""Read the requests of gemmax's client, and check the language of a translation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from scorekit.errors import SampleError
from scorekit.rewards.rules import GateRule, rule_result
from scorekit.schemas import ErrorSpan, JudgeScored, Scored

if TYPE_CHECKING:
    from scorekit.languages import LanguageMatch

#: Limits of a request. They are the defaults of our services.
MAX_ITEMS, MAX_FIELD_CHARS = 10_000, 100_000

Text = Annotated[str, Field(max_length=MAX_FIELD_CHARS)]


class Item(BaseModel):
    """A translation to score. Without `ref` it is scored by source alone."""

    src: Text
    mt: Text
    ref: Text | None = None


class LanguageItem(BaseModel):
    """A translation to score and to check for its language, which has an English name."""

    src: Text
    mt: Text
    tgt_lang: Text | None = None


class ScoreRequest(BaseModel):
    """The body of POST /score."""

    items: list[Item] = Field(max_length=MAX_ITEMS)


class LanguageRequest(BaseModel):
    """The body of POST /score_openlid."""

    items: list[LanguageItem] = Field(max_length=MAX_ITEMS)


def language_check(item: LanguageItem, rule: GateRule) -> dict[str, Any]:
    """Return the fields of a result about the language of a translation.

    `la_ok` is 1 in the target language, else 0. `la_skip` is 1 where it was not checked, which
    passes: an unknown language, or too few letters. A blank translation is in no language.
    `pred_iso` is the target's code, or empty: the rule names no other language. The word alignment
    (`wa`) is 0, as gemmax's own server has it.

    Raises SampleError if the rule fails.
    """
    target = target_language(item.tgt_lang)
    fields = {"la_ok": 1, "la_skip": 1, "pred_iso": "", "tgt_iso": ""}
    if target is not None:
        script = f"_{target.script}" if target.script else ""
        fields["tgt_iso"] = f"{target.language.iso639_3}{script}"
        sample = {"src": item.src, "mt": item.mt, "tgt_lang": target.language.tag}
        gate = rule_result(rule, sample)
        if gate.status == "unknown":
            raise SampleError("model_failure", f"the check of the language: {gate.message}")
        if gate.value is not None or not item.mt.strip():
            is_target = gate.status == "open" and bool(item.mt.strip())
            fields |= {"la_ok": int(is_target), "la_skip": 0}
            fields["pred_iso"] = fields["tgt_iso"] if is_target else ""
    return fields | {"wa": 0.0, "wa_precision": 0.0, "wa_recall": 0.0}


def target_language(name: str | None) -> LanguageMatch | None:
    """Return the language of a name ("Korean", "Chinese (Traditional)"), or None if unknown."""
    if not name:
        return None
    from scorekit.languages import look_up  # needs the extra `rewards`, as the check does

    base, _, variant = name.strip().removesuffix(")").partition("(")
    return look_up(name) or look_up(f"{variant} {base}") or look_up(base)


def error_spans(result: Scored | JudgeScored) -> list[dict[str, Any]]:
    """Return the error spans with severities in small letters, as unbabel-comet writes them."""
    spans: Sequence[ErrorSpan] = getattr(result, "error_spans", None) or ()
    return [
        {
            "text": span.text,
            "confidence": span.confidence,
            "severity": span.severity.lower(),
            "start": span.start,
            "end": span.end,
        }
        for span in spans
    ]
