"""Build the rows, classes and page of `search verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.search.curation.config_sections import CLASSES, TruthClass, VerifyConfig
from trainer.search.curation.dataset import CurationResult, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.prior_decisions import PriorDecisions
from trainer.search.curation.samples import CuratedPrompt, CuratedRun
from trainer.search.verification.classes import class_of
from trainer.search.verification.compare import Verified
from trainer.search.verification.human_labels import HumanLabel, agreement_lines, kappa


def make_verified(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: VerifyConfig,
    results: Mapping[str, Verified | str],
    people: Mapping[str, HumanLabel],
    decided: PriorDecisions,
) -> CurationResult:
    """Return all rows of the data, without those of a class in `drop`.

    results: row id -> its result, or the reason why it was skipped. people: overrule the verifier.
    A row without a verdict is kept.
    """
    curated = CurationResult("verify", cfg, read, decided.inputs, record=decided.record)
    pairs: list[tuple[TruthClass, TruthClass]] = []
    for prompt in prompts:
        row_id = prompt.question.id
        result, person = results[row_id], people.get(row_id)
        verified = None if isinstance(result, str) else result
        compared = verified.compared if verified else None
        verifier_class = class_of(compared, cfg.outvoted) if compared else None
        truth = person.truth if person else verifier_class
        if verifier_class and person:
            pairs.append((verifier_class, person.truth))
        is_kept = truth is None or truth not in cfg.drop
        reason = truth or _no_class(result)
        stats = {
            "class": truth,
            "by": None if truth is None else "person" if person else "verifier",
            **_stats(prompt, verified, verifier_class),
            "note": person.note if person else "",
        }
        curated.decisions.append(Decision(row_id, is_kept, reason, stats, refs(prompt)))
        if is_kept:
            curated.rows.append(question_row(prompt.question))
    quotes = Counter(check for decision in curated.decisions for check in decision.stats["quotes"])
    curated.manifest_extra = {
        "verifier": cfg.verifier.model,
        "quotes": dict(sorted(quotes.items())),
        "people": _people(pairs, cfg),
    }
    return curated


def _no_class(result: Verified | str) -> str:
    return f"not verified: {result}" if isinstance(result, str) else f"no verdict: {result.reason}"


def _stats(
    prompt: CuratedPrompt, verified: Verified | None, verifier_class: TruthClass | None
) -> dict[str, Any]:
    """Return the values behind a class: all answers and their agreements."""
    gold = prompt.question.gold
    compared = verified.compared if verified else None
    chosen = verified.opinion if verified else None
    evidence = chosen.evidence if chosen else ()
    opinions = verified.opinions if verified else ()
    return {
        "verifier_class": verifier_class,
        **{name: getattr(compared, name, None) for name in _NAMES},  # None without a verdict
        "reference": prompt.question.reference_text,
        "verifier": chosen.answer if chosen else None,
        "evidence": [f"{gold[number - 1]}: {quote}" for number, quote in evidence],
        "quotes": [
            check for opinion in opinions if opinion and opinion.sure for check in opinion.quotes
        ],
        "verifier_answers": [_opinion_text(opinion) for opinion in opinions],
        "generator_answers": [opinion or "(none)" for opinion in verified.answers]
        if verified
        else [],
    }


def _opinion_text(opinion: Any) -> str:
    if opinion is None:
        return "(none)"
    if opinion.unfounded:
        return f"(quotes what is not on the page) {opinion.answer}"
    return opinion.answer if opinion.sure else f"(unsure) {opinion.answer}".strip()


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


def verified_page(curated: CurationResult, prompts: Mapping[str, CuratedPrompt]) -> str:
    """Return report.html: classes, agreements, documents, and decisions of people."""
    cfg = curated.settings
    assert isinstance(cfg, VerifyConfig)
    classed = [decision for decision in curated.decisions if decision.stats["class"]]
    counts_by_class = Counter(str(decision.stats["class"]) for decision in classed)
    counts = [
        [name, counts_by_class[name], "dropped" if name in cfg.drop else "kept"] for name in CLASSES
    ]
    words = (
        f"{len(classed)} of {len(curated.decisions)} rows have a class: the answers of "
        f"{cfg.verifier.model or 'people alone'} and of the generator, from the gold pages, "
        f"compared by the judge; {cfg.k} answers each. The others were not asked about, or gave no "
        "verdict, and stay; their reasons stand below."
    )
    note = "What the verifier quoted, looked for in the text layers of the pages."
    quotes = list(curated.manifest_extra["quotes"].items())
    sections = [
        Section("Classes", [words], ["class", "rows", "are"], counts),
        Section("Who agrees with whom", [], _HEAD, _agreements(curated.decisions)),
        Section("Quotes", [note], ["what is quoted is", "quotes"], quotes),
        Section("By document", [], ["document", "rows", "dropped"], _documents(curated, prompts)),
    ]
    if people := curated.manifest_extra["people"]:
        rows = list(people["table"].items())
        sections.append(Section("People and verifier", people["lines"], ["classes", "rows"], rows))
    return curation_page(curated, "References verified", sections, prompts)


_NAMES = ("stance", "verifier_reference", "generator_reference", "generator_verifier")
_HEAD = ("verifier", "with reference", "generator with reference", "with verifier", "class", "rows")


def _agreements(decisions: Iterable[Decision]) -> list[list[Any]]:
    counts_by_key = Counter(
        (*(decision.stats[name] or "–" for name in _NAMES), str(decision.stats["verifier_class"]))
        for decision in decisions
        if decision.stats["verifier_class"]
    )
    most_first = sorted(counts_by_key.items(), key=lambda item: (-item[1], item[0]))
    return [[*key, count] for key, count in most_first]


def _documents(curated: CurationResult, prompts: Mapping[str, CuratedPrompt]) -> list[list[Any]]:
    rows: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for decision in curated.decisions:
        if decision.stats["class"]:
            name = prompts[decision.row_id].question.file_name or "–"
            rows[name] += 1
            dropped[name] += not decision.is_kept
    return [[name, count, dropped[name]] for name, count in rows.most_common(60)]
