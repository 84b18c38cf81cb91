"""How many good translations do the rules keep out? Human translations of demo/data, both ways.

Each row: the judge's `rules` back end, and the synthesis filter's rules (sources of 20 characters
or more, as the pipeline takes them), with the codes that reject the most.

    python -m bench.filters [--quick]
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from bench.common import ROOT, Figure, quiet_logs, run
from services.judge.rules import judge_translation
from synth.filters import Pair, RuleConfig, check_rules

MIN_SOURCE_CHARS = 20
#: (what, files, field of the translation, language of the translation)
SETS = (
    ("texts of a user interface", ("sft", "rl_prompts", "heldout", "dev", "final_test"),
     "ref_text", "ko"),
    ("software documentation", ("pydocs",), "ref_text", "ko"),
    ("texts of a user interface", ("foreign_de",), "text", "de"),
)  # fmt: skip


def questions(quick: bool) -> Iterator[Figure]:
    """Shares of rejected pairs, in per cent."""
    for what, files, field, language in SETS:
        pairs = list(_pairs(files, field))[: 200 if quick else None]
        for source, target, turned in (("en", language, False), (language, "en", True)):
            asked = [(mt, src) if turned else (src, mt) for src, mt in pairs]
            name = f"{source}-{target}, {what}"
            yield _figure(f"judge's rules: {name}", asked, lambda src, mt, s=source, t=target: (
                _judge_codes(src, mt, s, t)))  # fmt: skip
            long = [pair for pair in asked if len(pair[0]) >= MIN_SOURCE_CHARS]
            yield _figure(f"synthesis rules: {name}", long, lambda src, mt, s=source, t=target: (
                list(check_rules(Pair(src, mt, s, t), RuleConfig()).failed)))  # fmt: skip


def _figure(question: str, pairs: list[tuple[str, str]], codes_of) -> Figure:  # type: ignore[no-untyped-def]
    codes: Counter[str] = Counter()
    rejected = 0
    for src, mt in pairs:
        found = codes_of(src, mt)
        codes.update(found)
        rejected += bool(found)
    shares = {code: round(100 * count / len(pairs), 2) for code, count in codes.most_common()}
    told = ", ".join(f"{code} {share}" for code, share in list(shares.items())[:3])
    return Figure(f"{question} ({len(pairs):,} pairs)", round(100 * rejected / len(pairs), 2),
                  f"% rejected: {told}", details={"by_code": shares})  # fmt: skip


def _judge_codes(src: str, mt: str, source: str, target: str) -> list[str]:
    told = judge_translation(
        {"source_lang": source, "target_lang": target, "source_text": src, "candidate": mt}
    )
    assert isinstance(told, dict), told
    return [] if told["verdict"]["pass"] else [told["verdict"]["reason_code"]]


def _pairs(files: tuple[str, ...], field: str) -> Iterator[tuple[str, str]]:
    for name in files:
        for line in (ROOT / f"demo/data/{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get(field):
                yield row["src_text"], row[field]


if __name__ == "__main__":
    quiet_logs()
    run("filters", __doc__, questions)
