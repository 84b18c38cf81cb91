"""Measure how many good translations the rules reject, and how many bad ones they catch.

The good ones are true pairs of prose in six directions: Korean and English of six registers
(tests/data/prose), and talks in German and Chinese; then user-interface texts and software
documentation (demo/data). There is one rate for each rule of synthesis and direction, with its
interval (Wilson, 95 %), and one for all rules of the judge.
The bad ones: in pairs with a number in digits, one number of the translation is changed or left
out; there are more kinds of wrong numbers (bench/synth/numbers.py), with the share that only a
judge, if there is one, can find. True pairs have few units, times and bounds, so pairs of these are
made, right and wrong ones (bench/synth/quantities.py).
For texts that chat models add (tests/data/chatter), the share that is caught is given by kind, for
the half that the rules were written with and for the half that was read only afterwards.
Words of other scripts, and what broken programs leave, are planted into true pairs
(bench/synth/planted.py). Short everyday English is measured with its own two halves
(tests/data/everyday).
Then the share of texts in other languages that passes, by length and direction: the source itself
as its translation, and texts of a third language (tests/data/ui_seven.jsonl).

    python -m bench.filters [--quick]
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple

from bench.common import ROOT, Measurement, quiet_logs, run
from bench.synth import quantities
from bench.synth.chatter import HALVES, chatter
from bench.synth.numbers import KINDS, OUTCOMES, outcomes, spoil
from bench.synth.planted import (
    DEBRIS,
    everyday,
    everyday_others,
    with_debris,
    with_source_script,
    with_third_script,
)
from scorekit.text.numbers import expected_numbers
from scorekit.text.rules import Pair
from services.judge.rules import judge_translation
from synth.filters import RULES, RuleConfig, check_rules
from synth.reasons import RuleCode

MIN_SOURCE_CHARS = 20  # shorter sources are seldom taken by the pipeline
MOST = 1.0  # per cent of a set that a rule may reject


class Texts(NamedTuple):
    """Pairs of texts with a name, the languages, the files, and the names of their fields."""

    name: str
    languages: tuple[str, str]
    files: tuple[str, ...]
    fields: tuple[str, str]

    def pairs(self, turned: bool) -> list[tuple[str, str]]:
        rows = (
            json.loads(line)
            for file in self.files
            for line in (ROOT / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
        )
        first, second = reversed(self.fields) if turned else self.fields
        return [(row[first], row[second]) for row in rows if row.get(first) and row.get(second)]


_UI = ("sft", "rl_prompts", "heldout", "dev", "final_test")
PROSE = (
    Texts("prose", ("ko", "en"), ("tests/data/prose/ko_en",), ("ko", "en")),
    Texts("talks", ("en", "de"), ("tests/data/prose/ted_en_de",), ("en", "de")),
    Texts("talks", ("zh", "en"), ("tests/data/prose/ted_zh_en",), ("zh", "en")),
)
SOFTWARE = (
    Texts(
        "texts of a user interface",
        ("en", "ko"),
        tuple(f"demo/data/{file}" for file in _UI),
        ("src_text", "ref_text"),
    ),
    Texts("software documentation", ("en", "ko"), ("demo/data/pydocs",), ("src_text", "ref_text")),
    Texts(
        "texts of a user interface", ("en", "de"), ("demo/data/foreign_de",), ("src_text", "text")
    ),
)


#: Seven languages a row, none of which the tables were made of.
SEVEN = ROOT / "tests/data/ui_seven.jsonl"
DIRECTIONS = [(a, b) for pair in ("ko en", "en de", "zh en") for a, b in permutations(pair.split())]
LANGUAGE_RULES = (RuleCode.COPIED_SOURCE, RuleCode.WRONG_SCRIPT, RuleCode.WRONG_LANGUAGE)
#: From how many characters on, to under how many.
LENGTHS = ((10, 20), (20, 30), (30, 60), (60, 10_000))
MOST_COPIES = 1.0  # per cent that may pass
MOST_THIRDS = 2.0
MOST_OF_A_SET = 2_000
MOST_PLANTED = 500


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield shares in percent."""
    yield from _rejected(quick)
    for source, target in DIRECTIONS:
        yield from _untranslated(source, target, 100 if quick else MOST_OF_A_SET)


def _rejected(quick: bool) -> Iterator[Measurement]:
    for texts in (*PROSE, *SOFTWARE):
        for turned in (False, True):
            source, target = reversed(texts.languages) if turned else texts.languages
            tested_pairs = texts.pairs(turned)[: 200 if quick else None]
            name = f"{source}-{target}, {texts.name}"
            yield _judge(name, tested_pairs, source, target)
            long = [
                pair for pair in tested_pairs if texts in PROSE or len(pair[0]) >= MIN_SOURCE_CHARS
            ]
            pairs = [Pair(*pair, source, target) for pair in long]
            yield from _synthesis(name, pairs)
            yield from _plant(name, pairs)
    yield from _made_numbers(20 if quick else 200)
    for half in HALVES:
        yield from _chatter(half)
    yield from _everyday()


def _plant(name: str, pairs: list[Pair]) -> Iterator[Measurement]:
    """Yield the share of pairs that are rejected, and doubted, with a word of another script or
    with debris."""
    pairs = pairs[:MOST_PLANTED]
    kinds = {
        "a word of a third script": with_third_script(pairs),
        "a word of the source": with_source_script(pairs),
    } | {kind: with_debris(pairs, kind) for kind in DEBRIS}
    for kind, planted in kinds.items():
        if not planted:  # the kind does not fit this language, or a quick run has few pairs
            continue
        verdicts = [check_rules(pair, RuleConfig(), has_judge=True) for pair in planted]
        codes = {RuleCode.THIRD_SCRIPT, RuleCode.DEBRIS}
        rejected = sum(bool(codes & {*verdict.failed}) for verdict in verdicts)
        doubted = sum(bool(codes & {*verdict.doubtful}) for verdict in verdicts)
        is_certain = kind == "a word of a third script"
        min_percent = 95.0 if is_certain else None
        yield _share(f"{kind}, rejected: {name}", rejected, len(planted), at_least=min_percent)
        yield _share(f"{kind}, doubted: {name}", doubted, len(planted))


def _everyday() -> Iterator[Measurement]:
    """Yield the share of short everyday texts that `wrong_language` rejects without a judge."""
    rule = RULES[RuleCode.WRONG_LANGUAGE]
    for half in HALVES:
        pairs = list(everyday(half))
        count = sum(rule(pair, RuleConfig()) is not None for pair in pairs)
        yield _share(f"wrong_language: everyday English, {half}", count, len(pairs))
    other_pairs = list(everyday_others())
    count = sum(bool(check_rules(pair, RuleConfig()).failed) for pair in other_pairs)
    question = "everyday texts of other languages as English, caught"
    yield _share(question, count, len(other_pairs), at_least=90.0)


def _chatter(half: str) -> Iterator[Measurement]:
    """Yield the share caught by any rule of synthesis, by kind, and by the judge's rules."""
    total_by_kind, caught, judged = Counter[str](), Counter[str](), 0
    for kind, pair in chatter(half, prose()):
        total_by_kind[kind] += 1
        caught[kind] += bool(check_rules(pair, RuleConfig()).failed)
        judged += _judge_code(pair.src, pair.mt, pair.source_lang, pair.target_lang) != "ok"
    for kind in total_by_kind:
        yield _share(f"chatter, {kind}, {half}, caught", caught[kind], total_by_kind[kind])
    yield _share(
        f"chatter, every kind, {half}, caught", caught.total(), total_by_kind.total(), at_least=95.0
    )
    yield _share(
        f"judge's rules: chatter, every kind, {half}, caught", judged, total_by_kind.total()
    )


def prose() -> dict[str, list[tuple[str, str]]]:
    """Return target language -> true pairs of prose, which the chatter is added to."""
    korean, german, chinese = PROSE
    return {
        "ko": korean.pairs(turned=True),
        "en": korean.pairs(turned=False),
        "de": german.pairs(turned=False),
        "zh": chinese.pairs(turned=True),
    }


def _untranslated(source: str, target: str, max_pairs: int) -> Iterator[Measurement]:
    """Yield by length of the candidate: rejected true pairs, and copies and third languages that
    pass.

    For the rules on languages, and for the judge's rules.
    """
    true = true_pairs(source, target, max_pairs)
    copies = [Pair(pair.src, pair.src, source, target) for pair in true]
    thirds = third_languages(source, target, max_pairs)
    for label, pairs, passes, aim in (
        ("true pairs rejected", true, False, MOST),
        ("copies accepted", copies, True, MOST_COPIES),
        ("third languages accepted", thirds, True, MOST_THIRDS),
    ):
        for name, min_length, under in (*_named_lengths(), ("10 characters or more", 10, 10_000)):
            tested_pairs = [pair for pair in pairs if min_length <= len(pair.mt) < under]
            if tested_pairs:
                count = sum(is_rejected(pair) != passes for pair in tested_pairs)
                is_last_range = name.endswith("more") and min_length == 10
                question = f"{label}: {source}-{target}, {name}"
                yield _share(
                    question, count, len(tested_pairs), at_most=aim if is_last_range else None
                )
        tested_pairs = [pair for pair in pairs if len(pair.mt) >= 10]
        count = sum((_judge_code(*pair_texts(pair)) == "ok") == passes for pair in tested_pairs)
        yield _share(f"{label} by the judge's rules: {source}-{target}", count, len(tested_pairs))


def _named_lengths() -> Iterator[tuple[str, int, int]]:
    for min_length, under in LENGTHS:
        name = (
            f"{min_length} to {under - 1} characters" if under < 10_000 else f"{min_length} or more"
        )
        yield name, min_length, under


def pair_texts(pair: Pair) -> tuple[str, str, str, str]:
    """Return source, translation, and their languages."""
    return pair.src, pair.mt, pair.source_lang, pair.target_lang


def is_rejected(pair: Pair) -> bool:
    """Return whether one of the rules on copies, scripts and languages rejects the pair."""
    return any(RULES[code](pair, RuleConfig()) is not None for code in LANGUAGE_RULES)


def true_pairs(source: str, target: str, max_pairs: int) -> list[Pair]:
    """Sample at most `max_pairs` of each set of this direction."""
    sets = [[(row[source], row[target]) for row in seven()]]
    for texts in (*PROSE, *SOFTWARE):
        if {source, target} == set(texts.languages):
            sets.append(texts.pairs(turned=source != texts.languages[0]))
    rng = random.Random(0)
    sampled_pairs = [
        pair for pairs in sets for pair in rng.sample(pairs, min(max_pairs, len(pairs)))
    ]
    return [Pair(src.strip(), mt.strip(), source, target) for src, mt in sampled_pairs]


def third_languages(source: str, target: str, max_pairs: int) -> list[Pair]:
    """Return pairs with translations into each language that is neither of the two."""
    return [
        Pair(row[source], text, source, target)
        for row in seven()[:max_pairs]
        for language, text in row.items()
        if language not in (source, target)
    ]


def seven() -> list[dict[str, str]]:
    """Return the rows of `SEVEN`: language -> text."""
    return [json.loads(line) for line in SEVEN.read_text(encoding="utf-8").splitlines()]


def _synthesis(name: str, pairs: list[Pair]) -> Iterator[Measurement]:
    failed = rejections(pairs)
    for code in RULES:
        yield _share(f"{code}: {name}", failed[code], len(pairs), at_most=MOST)
    for alteration in ("altered", "left out"):
        caught, total = caught_numbers(pairs, alteration)
        yield _share(f"numbers_missing, a number {alteration}, caught: {name}", caught, total)

    yield from _numbers(name, pairs)


def _numbers(name: str, pairs: list[Pair]) -> Iterator[Measurement]:
    """Yield how a judge treats true pairs and pairs with one wrong number: certain rejections,
    and undecided pairs.
    """
    sets = {"true pairs": pairs} | {kind: spoil(pairs, kind) for kind in KINDS}
    for kind, kind_pairs in sets.items():
        if not kind_pairs:  # of the few pairs of a quick run
            continue
        counts = outcomes(kind_pairs)
        for outcome in OUTCOMES[:2]:
            question = f"numbers with a judge, {kind}, {outcome}: {name}"
            max_percent = MOST if (kind, outcome) == ("true pairs", "certain") else None
            yield _share(question, counts[outcome], len(kind_pairs), at_most=max_percent)


def _made_numbers(count: int) -> Iterator[Measurement]:
    """Yield how a judge's run treats made pairs of all directions, right and wrong, by kind."""
    for kind in quantities.KINDS:
        right, wrong = [], []
        for source, target in permutations(quantities.LANGUAGES, 2):
            right_pairs, wrong_pairs = quantities.quantity_pairs(kind, source, target, count)
            right += right_pairs
            wrong += wrong_pairs
        for name, pairs in (("right", right), ("wrong", wrong)):
            counts = outcomes(pairs)
            for outcome in OUTCOMES[:2]:
                question = f"made numbers, {kind}, {name}, {outcome}"
                max_percent = MOST if name == "right" else None
                yield _share(question, counts[outcome], len(pairs), at_most=max_percent)


def rejections(pairs: list[Pair]) -> Counter[str]:
    """Yield how many pairs each rule of synthesis rejects at its default threshold."""
    return Counter(code for pair in pairs for code in check_rules(pair, RuleConfig()).failed)


def _judge(name: str, pairs: list[tuple[str, str]], source: str, target: str) -> Measurement:
    codes = Counter(_judge_code(src, mt, source, target) for src, mt in pairs)
    rejected = len(pairs) - codes.pop("ok", 0)
    shares = {code: round(100 * count / len(pairs), 2) for code, count in codes.most_common()}
    return _share(f"judge's rules: {name}", rejected, len(pairs), by_code=shares)


def _judge_code(src: str, mt: str, source: str, target: str) -> str:
    outcome = judge_translation(
        {"source_lang": source, "target_lang": target, "source_text": src, "candidate": mt}
    )
    assert isinstance(outcome, dict), outcome
    return str(outcome["verdict"]["reason_code"])


def caught_numbers(pairs: list[Pair], alteration: str) -> tuple[int, int]:
    """Return (caught, total) over pairs that pass and have numbers.

    In each pair a random number of the translation, in digits, is "altered" or "left out".
    """
    rng = random.Random(0)
    spoilt = caught = 0
    for pair in pairs:
        if not expected_numbers(pair.src, pair.source_lang) or _is_missed(pair):
            continue
        numbers = [match for match in _DIGITS.finditer(pair.mt) if match.group() != "1"]
        if numbers:
            match = rng.choice(numbers)
            new = _other(match.group(), rng) if alteration == "altered" else ""
            worse = pair.mt[: match.start()] + new + pair.mt[match.end() :]
            spoilt += 1
            caught += _is_missed(Pair(pair.src, worse, pair.source_lang, pair.target_lang))
    return caught, spoilt


_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")


def _other(digits: str, rng: random.Random) -> str:
    """Return as many digits, each of them replaced by another one."""
    return "".join(
        str((int(char) + rng.randint(0, 7)) % 9 + 1) if char.isdecimal() else char
        for char in digits
    )


def _is_missed(pair: Pair) -> bool:
    return RULES[RuleCode.NUMBERS_MISSING](pair, RuleConfig()) is not None


def _share(
    question: str,
    count: int,
    total: int,
    at_most: float | None = None,
    at_least: float | None = None,
    **details: object,
) -> Measurement:
    if not total:
        return Measurement(question, None, "%", note="no such pair")
    low, high = wilson(count, total)
    unit = f"% ({100 * low:.2f} to {100 * high:.2f})"
    details |= {
        "count": count,
        "of": total,
        "interval": [round(100 * low, 2), round(100 * high, 2)],
    }
    value = round(100 * count / total, 2)
    return Measurement(
        f"{question} ({total:,} pairs)",
        value,
        unit,
        at_most=at_most,
        at_least=at_least,
        details=details,
    )


def wilson(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    share, spread = count / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


if __name__ == "__main__":
    quiet_logs()
    run("filters", __doc__, questions)
