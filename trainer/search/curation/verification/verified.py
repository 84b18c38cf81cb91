"""What `search verify` makes of the answers: the rows with their classes, and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.search.curation.dataset import Curated, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import CuratedPrompt, CuratedRun
from trainer.search.curation.verification.classes import CLASSES, TruthClass, class_of
from trainer.search.curation.verification.compare import Verified
from trainer.search.curation.verification.config import VerifyConfig
from trainer.search.curation.verification.people import Judgement, agreement_lines, kappa
from trainer.sft.curation_record import CurationRecord


def verifiers_class(found: Verified | None, cfg: VerifyConfig) -> TruthClass | None:
    """The class by the answers; None where there is no verdict."""
    if found is None or found.compared is None:
        return None
    return class_of(found.compared, cfg.outvoted)


def make_verified(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: VerifyConfig,
    asked: Mapping[str, Verified | str],
    people: Mapping[str, Judgement],
    record: CurationRecord | None = None,
) -> Curated:
    """All rows of the data; those of a class in `drop` are dropped.

    asked: row id -> what became of it, or why it was not asked about. people: who overrule. A row
    without a verdict stays: nothing speaks against it. record: what was decided before.
    """
    made = Curated("verify", cfg, read, record=record or CurationRecord())
    pairs: list[tuple[TruthClass, TruthClass]] = []
    for prompt in prompts:
        row_id = prompt.question.id
        found, person = asked[row_id], people.get(row_id)
        verified = None if isinstance(found, str) else found
        own = verifiers_class(verified, cfg)
        truth = person.truth if person else own
        if own and person:
            pairs.append((own, person.truth))
        kept = truth is None or truth not in cfg.drop
        reason = truth or _no_class(found)
        figures = {
            "class": truth,
            "by": None if truth is None else "person" if person else "verifier",
            **_figures(prompt, verified, own),
            "note": person.note if person else "",
        }
        made.decisions.append(Decision(row_id, kept, reason, figures, refs(prompt)))
        if kept:
            made.rows.append(question_row(prompt.question))
    quotes = Counter(check for one in made.decisions for check in one.figures["quotes"])
    made.told = {
        "verifier": cfg.verifier.model,
        "quotes": dict(sorted(quotes.items())),
        "people": _people(pairs, cfg),
    }
    return made


def _no_class(found: Verified | str) -> str:
    return f"not verified: {found}" if isinstance(found, str) else f"no verdict: {found.why}"


def _figures(
    prompt: CuratedPrompt, found: Verified | None, own: TruthClass | None
) -> dict[str, Any]:
    """What the class rests on: all answers, and who agreed with whom."""
    gold = prompt.question.gold
    compared = found.compared if found else None
    chosen = found.opinion if found else None
    evidence = chosen.evidence if chosen else ()
    opinions = found.opinions if found else ()
    return {
        "verifier_class": own,
        "stance": compared.stance if compared else None,
        "verifier_reference": compared.verifier_reference if compared else None,
        "generator_reference": compared.generator_reference if compared else None,
        "generator_verifier": compared.generator_verifier if compared else None,
        "reference": prompt.question.reference_answer,
        "verifier": chosen.answer if chosen else None,
        "evidence": [f"{gold[number - 1]}: {quote}" for number, quote in evidence],
        "quotes": [check for one in opinions if one and one.sure for check in one.quotes],
        "verifier_answers": [_said(one) for one in opinions],
        "generator_answers": [one or "(none)" for one in found.answers] if found else [],
    }


def _said(one: Any) -> str:
    if one is None:
        return "(none)"
    if one.unfounded:
        return f"(quotes what is not on the page) {one.answer}"
    return one.answer if one.sure else f"(unsure) {one.answer}".strip()


def _people(
    pairs: Sequence[tuple[TruthClass, TruthClass]], cfg: VerifyConfig
) -> dict[str, Any] | None:
    if not pairs:
        return None
    drops = [(a in cfg.drop, b in cfg.drop) for a, b in pairs]
    return {
        "rows": len(pairs),
        "same_class": sum(a == b for a, b in pairs),
        "kappa": kappa(pairs),
        "same_fate": sum(a == b for a, b in drops),
        "kappa_fate": kappa(drops),
        "lines": [
            agreement_lines(pairs, "people and verifier give the same class"),
            agreement_lines(drops, "people and verifier keep and drop the same rows"),
        ],
        "table": {
            f"verifier {a}, people {b}": count for (a, b), count in sorted(Counter(pairs).items())
        },
    }


def verified_page(made: Curated, prompts: Mapping[str, CuratedPrompt]) -> str:
    """report.html: how many of each class, from which agreements, by document, and people's."""
    cfg = made.settings
    assert isinstance(cfg, VerifyConfig)
    classed = [one for one in made.decisions if one.figures["class"]]
    of = Counter(str(one.figures["class"]) for one in classed)
    counts = [[name, of[name], "dropped" if name in cfg.drop else "kept"] for name in CLASSES]
    words = (
        f"{len(classed)} of {len(made.decisions)} rows have a class: the answers of "
        f"{cfg.verifier.model or 'people alone'} and of the generator, from the gold pages, "
        f"compared by the judge; {cfg.k} answers each. The others were not asked about, or gave no "
        "verdict, and stay; their reasons stand below."
    )
    sections = [
        Section("Classes", [words], ["class", "rows", "are"], counts),
        Section("Who agrees with whom", [], _HEAD, _agreements(made.decisions)),
        Section("Quotes", [_QUOTES], ["what is quoted is", "quotes"], _quotes(made)),
        Section("By document", [], ["document", "rows", "dropped"], _documents(made, prompts)),
    ]
    if people := made.told["people"]:
        rows = [[what, count] for what, count in people["table"].items()]
        sections.append(Section("People and verifier", people["lines"], ["classes", "rows"], rows))
    return curation_page(made, "References verified", sections, prompts)


_NAMES = ("stance", "verifier_reference", "generator_reference", "generator_verifier")
_HEAD = ("verifier", "with reference", "generator with reference", "with verifier", "class", "rows")


def _agreements(decisions: Iterable[Decision]) -> list[list[Any]]:
    found = Counter(
        (*(one.figures[name] or "–" for name in _NAMES), str(one.figures["verifier_class"]))
        for one in decisions
        if one.figures["verifier_class"]
    )
    return [[*of, count] for of, count in sorted(found.items(), key=lambda one: (-one[1], one[0]))]


_QUOTES = "What the verifier quoted, looked for in the text layers of the pages."


def _quotes(made: Curated) -> list[list[Any]]:
    return [[check, count] for check, count in made.told["quotes"].items()]


def _documents(made: Curated, prompts: Mapping[str, CuratedPrompt]) -> list[list[Any]]:
    rows: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for one in made.decisions:
        if one.figures["class"]:
            name = prompts[one.row_id].question.file_name or "–"
            rows[name] += 1
            dropped[name] += not one.kept
    return [[name, count, dropped[name]] for name, count in rows.most_common(60)]
