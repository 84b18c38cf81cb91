"""Check the regular expressions and text loops that test_linear_time.py times.

Run as a module it times them, with `patterns` or `functions` after its name:
`python -m tests.integration.scorekit.text.test_linear patterns`.
"""

from __future__ import annotations

import ast
import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.adapters.shared import template_pattern
from scorekit.prompts import TEMPLATES
from scorekit.text import checks, findings, markup, meta_text, numbers
from scorekit.text.chat_marks import neutral, restore_marks
from scorekit.text.numbers.conflicts import bound_words
from scorekit.text.numbers.moments import moments_of
from scorekit.text.numbers.table import FILES, read_table
from scorekit.text.numbers.units import units_of
from scorekit.text.rules import Pair
from tests.kits import hostile_texts
from tests.kits.hostile_texts import (
    LONG,
    calls_of_re,
    patterns,
    pumps,
    run,
    searching,
    sources,
)
from trainer.rl import control_tokens
from trainer.roleplay import formulas
from trainer.roleplay.korean import names
from trainer.roleplay.reply import ParsedReply

#: Functions that create patterns, with examples. `_compiled`: the operator's, from a setting.
PATTERN_EXAMPLES = {
    ("scorekit.text.pattern_rows", "compile_patterns"): lambda: [
        *meta_text.PATTERNS.values(),
        *(pattern for name in FILES.values() for pattern in read_table(name).patterns.values()),
        *(pattern for code in FILES for pattern in bound_words(code)),
        *(
            moment
            for code in FILES
            for moment in moments_of(code)
            if isinstance(moment, re.Pattern)
        ),
    ],
    ("scorekit.text.numbers.units", "units_of"): lambda: [
        pattern for code in FILES for pattern in (units_of(code).after, units_of(code).before)
    ],
    ("scorekit.text.markup", "_many_marks"): lambda: [markup._many_marks()],
    ("scorekit.text.findings", "_pattern"): lambda: [findings._pattern(("Hangul",))],
    ("scorekit.adapters.shared", "template_pattern"): lambda: [
        template_pattern(text) for text in TEMPLATES.values()
    ],
    ("scorekit.adapters.shared", "_compiled"): lambda: [],
    ("trainer.rl.control_tokens", "_mark_pattern"): lambda: [
        control_tokens._mark_pattern(["[INST]", "[/INST]", "<<SYS>>"])
    ],
    ("trainer.rl.control_tokens", "_reading_pattern"): lambda: [
        control_tokens._reading_pattern("</think>")
    ],
    ("trainer.roleplay.reply", "_speech"): lambda: [
        ParsedReply("")._speech,
        ParsedReply("", True)._speech,
    ],
    ("trainer.roleplay.korean.names", "_pattern"): lambda: [
        names._pattern(name) for name in ("유나", "서유나", "Alex B")
    ],
    ("trainer.roleplay.formulas", "_speaker"): lambda: [],  # those of its module
    ("trainer.roleplay.formulas", "_label"): lambda: [formulas._label("유나")],
}
#: Patterns of a table that the code only matches at the start of a text, and never searches for.
ONLY_MATCHED = [
    meta_text.PATTERNS[name]
    for name in ("label", "aside", "clause", "assent", "regret", "decline", "request")
]
#: Other texts that took a reader long.
PUMPS = [
    ("", "a-"),
    ("", ":a"),
    ("{", " "),
    ("sure! ", " "),
    ("번역", " "),
    ("", "\u0301\u0316"),
    ("", "\u0f73"),
    ("", "."),
    ("", ".\t"),
    ("", "a.\t"),
    ("", "1.\u3000"),
    ("", "ก ก"),
    ("", "가나 "),
    ("abcabcabc", "abcdefghij" * 9 + "x"),
    ("", "ab" * 9 + "c"),
    ("", "<|a"),
    ("", "[/INST"),
    ("<think>", "<think>"),
    ("", "```"),
    ("", '{"'),
    ("", "[" * 9),
    ("", "<b"),
    ("", "word "),
    ("a\n", "Note "),
    ("죄송합니다만", " 이"),
    ("a. ", "(("),
    ("", "##"),
    ("", "1,"),
    ("", "1.000"),
    ("1", " 000"),
    ("", "1 "),
    ("", "1/"),
    ("", "hundred "),
    ("", "two and a "),
    ("", "hundert"),
    ("", "einund"),
    ("", "ein"),
    ("", "천"),
    ("", "일"),
    ("", "3분의 "),
    ("", "1만 "),
    ("", "一"),
    ("", "三万"),
    ("", "三分之"),
    ("", "零"),
    ("", "1-"),
    ("", "3:"),
    ("", "IV"),
    ("", "5 km "),
    ("", "5°F "),
    ("", "at 5 p.m. "),
    ("", "noon "),
    ("", "on Monday "),
    ("", "twice a day "),
    ("", "at least 5 "),
    ("", "1 in 5 "),
    ("", "오후 3시 "),
    ("", "3월 3일 "),
    ("", "5명 이상 "),
]


def run_patterns() -> None:
    """Run each pattern on its own hostile texts, in a separate process."""
    for pattern in patterns(PATTERN_EXAMPLES):
        if pattern.pattern in ONLY_MATCHED:
            pattern = pattern._replace(searched=False)
        run(pattern.name, searching(pattern), pumps(pattern.pattern), LONG)


def run_functions() -> None:
    """Run the functions that read a full text, in a separate process."""
    from scorekit.rewards.violations import VIOLATIONS
    from scorekit.text.sentences import split_sentences
    from services.judge.fence import defuse
    from services.judge.rules import judge_translation
    from synth.config import SegmentationConfig
    from synth.filters import RuleConfig, check_rules
    from synth.sources.segment import find_blobs, find_segments

    def judged(src: str, mt: str) -> None:
        texts = {"source_text": src, "candidate": mt}
        judge_translation({"source_lang": "en", "target_lang": "ko"} | texts)
        check_rules(Pair(src, mt, "en", "ko"), RuleConfig())
        for guard in VIOLATIONS.values():
            guard(src, mt, "en", "ko")

    def blobs(text: str) -> None:
        (segments,) = find_segments([text], SegmentationConfig(merge_short=True), "real")
        lengths = [float(len(segment.text)) for segment in segments]
        for _ in find_blobs(text, segments, lengths, max_tokens=512, max_chars=5000):
            pass

    works = {
        "candidate": lambda text: judged("The house is red.", text),
        "source": lambda text: judged(text, "집은 빨간색이다. 그리고 아주 크고 오래된 집이다."),
        "loops": lambda text: checks.looped_share("abcabcabc" + text),
        **{
            f"numbers, {language}": lambda text, lang=language: (
                numbers.compare_numbers(text, text, lang, lang),
                numbers.compare_numbers("12 34,5 3:30", text, "en", lang),
            )
            for language in ("de", "en", "ko", "zh")
        },
        "segments": lambda text: find_segments([text], SegmentationConfig(), "escaped"),
        "sentences": split_sentences,
        "blobs": blobs,
        "fence": defuse,
        "restored": lambda text: restore_marks(text, neutral(text)),
    }
    hostile_texts.LIMIT_S //= 2  # for half of the usual length
    for name, work in works.items():
        run(name, work, PUMPS, LONG // 8)


@pytest.fixture(scope="module")
def modules():
    """Return every module of the project, parsed once."""
    return list(sources())


def test_no_pattern_is_made_where_the_test_does_not_find_it(modules):
    for module, tree in modules:
        for call in calls_of_re(module, tree):
            is_known = call.pattern is not None or (module, call.function) in PATTERN_EXAMPLES
            assert call.function is None or is_known, f"{module}:{call.line}: add it to MADE"
        imported = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        for node in imported:
            names = (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else [
                    alias.asname or alias.name
                    for alias in node.names
                    if alias.name in ("re", "regex")
                ]
            )
            assert not {"regex"} & set(names), f"{module}: `re`, please"
            if isinstance(node, ast.ImportFrom):
                assert node.module != "re", f"{module}: write `import re`"
            else:
                assert set(names) <= {"re"}, f"{module}: write `import re`"


def test_every_pattern_of_a_module_is_found(modules):
    names = {pattern.name for pattern in patterns({})}
    for module, tree in modules:
        if any(call.function is None for call in calls_of_re(module, tree)):
            assert any(name.startswith(f"{module}.") for name in names), (
                f"{module}: patterns that stand in no variable of the module"
            )


def test_texts_are_normalised_in_one_place_alone(modules):
    users = {
        module
        for module, tree in modules
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "normalize"
        if ast.unparse(node) == "unicodedata.normalize"
    }
    assert users == {"scorekit.text.markup"}


# -- functions made linear give the same results ---------------------------------------------------

_OLD = re.compile(
    "|".join(
        (
            r"```.*?(?:```|\Z)|``[^`]+``|`[^`\n]+`",
            r"\b(?:https?|ftp)://[^\s<>\"'）」]+|\bwww\.[^\s<>\"']+|\b[\w.+-]+@[\w-]+\.[\w.-]+",
            r"</?[A-Za-z][A-Za-z0-9:_-]*(?:\s[^<>=]*=[^<>]*)?\s?/?>",
            r"\{\{\s*[\w.:@!\[\]-]+\s*\}\}|\$?\{\s*[\w.:@!\[\]-]*\s*\}|"
            r"%(?:\([\w.-]+\))?(?:\d+\$)?[#+-]?\d*(?:\.\d+)?[sdifgxXrc@]"
            r"(?![A-Za-z])|%[A-Za-z_]\w*%|\$t?\([\w.:]+\)",
            r":[a-z][\w+.:-]*:(?=`)",
            r"\d+(?:[.,:]\d+)*",
        )
    ),
    re.S,
)


@given(st.text("a1가-+.:@`<>/={}[]%$()!_s \n", max_size=60))
def test_masking_is_as_it_was_with_unbounded_patterns(text):
    assert markup.mask(text) == _OLD.sub(" ", text)


@given(st.lists(st.sampled_from(["abc", "abd", "ab", "x", " ", "가나다"]), max_size=2000))
def test_loops_are_found_in_pieces_as_in_one(parts):
    text = "".join(parts)
    spans = [match.span() for match in checks._loops(text)]
    assert spans == [match.span() for match in checks._LOOP.finditer(text)]


def test_loops_are_found_across_the_border_of_pieces():
    border = checks._LOOP_CHUNK
    for lead in (*range(border - 320, border + 20, 17), border - 1, border, border + 1):
        unit = "".join(map(chr, range(0xAC00, 0xAC00 + 100)))
        text = "".join(map(chr, range(0x4E00, 0x4E00 + lead))) + unit * 4 + "z"
        assert [match.span() for match in checks._loops(text)] == [(lead, lead + 400)]


@given(st.text(), st.sampled_from(["NFC", "NFKC"]))
def test_texts_are_normalised_as_ever(text, form):
    assert markup.normalized(form, text) == unicodedata.normalize(form, text)


def test_a_hundred_marks_on_a_letter_are_kept():
    text = "a" + "\u0301\u0316" * 100
    normalized = markup.normalized("NFC", text).replace("\u034f", "")
    assert unicodedata.normalize("NFC", normalized) == unicodedata.normalize("NFC", text)


def test_every_mark_that_is_sorted_is_known():
    marks_pattern = markup._many_marks()
    for code in range(sys.maxunicode + 1):
        if markup.is_sorted_mark(chr(code)):
            assert marks_pattern.fullmatch(chr(code) * 30), hex(code)


if __name__ == "__main__":
    globals()[f"run_{sys.argv[1]}"]()
