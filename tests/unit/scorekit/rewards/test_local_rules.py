"""Each local rule as a component, and what becomes of a rule that fails."""

from __future__ import annotations

import itertools
import math
import sys

import pytest

from scorekit.errors import UserError
from scorekit.rewards import load_definition
from scorekit.rewards.rules import LocalRule
from scorekit.rewards.violations import VIOLATIONS

SRC = "Please save all of your changes before you close the window, or they will be lost."
MT = "창을 닫기 전에 변경한 내용을 모두 저장하세요. 그렇지 않으면 변경 내용이 사라집니다."
GOOD = {"src": SRC, "mt": MT, "src_lang": "en", "tgt_lang": "ko"}


def evaluate(samples, groups=(), **config):
    checked = load_definition({"components": {"a": config}}).components["a"]
    return LocalRule("components.a", checked).evaluate(samples, groups)


def raws(samples, groups=(), **config):
    return [component.raw for component in evaluate(samples, groups, **config)]


BAD = {
    "language": GOOD | {"mt": SRC},
    "script": GOOD | {"mt": SRC.lower(), "src": MT},
    "copy": GOOD | {"mt": SRC},
    "length": GOOD | {"mt": MT * 9},
    "repetition": GOOD | {"mt": "저장하세요. " * 20},
}


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_violations_are_the_guards_values(rule):
    bad = BAD[rule]
    texts = [(s["src"], s["mt"], s["src_lang"], s["tgt_lang"]) for s in (GOOD, bad)]
    values = raws([GOOD, bad], rule=rule)
    assert values == [VIOLATIONS[rule](*text) for text in texts]
    assert values[0] < 0.1 and values[1] > 0.5


@pytest.mark.parametrize("rule", ["language", "script"])
def test_a_rule_that_needs_the_language_has_no_value_without(rule):
    (component,) = evaluate([{"src": SRC, "mt": MT}], rule=rule)
    assert (component.status, component.raw) == ("no_value", None)
    assert raws([{"src": SRC, "mt": SRC}], rule="copy") == [1.0]


def test_truncated_reads_the_finish_reason():
    reasons = [{"finish_reason": "length"}, {"finish_reason": "stop"}, {}, {"finish_reason": None}]
    components = evaluate([GOOD | reason for reason in reasons], rule="truncated", scale=-3.0)
    assert [component.raw for component in components] == [1.0, 0.0, None, None]
    assert [component.scaled for component in components] == [-3.0, 0.0, None, None]
    assert components[2].status == "no_value"


def test_chrf_needs_a_reference():
    import sacrebleu

    samples = [GOOD | {"ref": MT}, GOOD | {"ref": "창을 닫으세요."}, GOOD, GOOD | {"ref": ""}]
    expected = sacrebleu.sentence_chrf(MT, ["창을 닫으세요."]).score
    assert raws(samples, rule="chrf") == [pytest.approx(100.0), expected, None, None]


def test_duplicates_are_counted_within_their_group():
    samples = [GOOD | {"mt": mt} for mt in ("a", "a ", "b", "a", "a")]
    assert raws(samples, [[0, 1, 2], [4, 3]], rule="duplicates") == [0.5, 0.5, 0.0, 1.0, 1.0]
    assert raws(samples[:1], [[0]], rule="duplicates") == [0.0]


def length_or_nothing(sample):
    """Return a value, none, no number, or an error, as the translation says."""
    special = {"none": None, "nan": math.nan, "inf": math.inf, "text": "x", "true": True}
    if sample["mt"] == "raise":
        raise KeyError("no such column")
    return special.get(sample["mt"], len(sample["mt"]))


def test_a_function_of_the_user_that_fails_concerns_its_own_sample():
    words = ("four", "none", "nan", "inf", "text", "raise", "true")
    components = evaluate([GOOD | {"mt": mt} for mt in words], rule=f"{__name__}:length_or_nothing")
    statuses = ["ok", "no_value", *["non_finite"] * 2, *["rule_error"] * 2, "ok"]
    assert [component.status for component in components] == statuses
    assert [component.raw for component in components] == [4.0, *[None] * 5, 1.0]
    assert components[5].message == "KeyError: 'no such column'"


def rank_by_length(samples):
    """Return the rank of each translation by its length, 0 to 1."""
    if any(sample["mt"] == "raise" for sample in samples):
        raise ValueError("no ranks")
    order = sorted(range(len(samples)), key=lambda index: len(samples[index]["mt"]))
    ranks = [order.index(index) / max(1, len(samples) - 1) for index in range(len(samples))]
    return ranks[:-1] if any(sample["mt"] == "short" for sample in samples) else ranks


def test_a_function_of_groups_gets_each_group():
    samples = [GOOD | {"mt": mt} for mt in ("aaa", "raise", "a", "aa", "b", "short")]
    config = {"rule": f"{__name__}:rank_by_length", "group": True}
    components = evaluate(samples, [[0, 2, 3], [1, 4], [5]], **config)
    assert [component.raw for component in components] == [1.0, None, 0.0, 0.5, None, None]
    assert components[4].message == "ValueError: no ranks"
    assert components[5].message == "ValueError: 0 values for 1 samples"


def refuse(sample):
    """Raise the user's mistake."""
    raise UserError("column: required")


def leave(sample):
    """End the process, as a script's helper may."""
    raise SystemExit(3)


def test_a_function_that_exits_is_a_failed_sample():
    (component,) = evaluate([GOOD], rule=f"{__name__}:leave")
    assert (component.status, component.message) == ("rule_error", "SystemExit: 3")


def spoil(sample):
    """Change the sample, which other components read."""
    sample["mt"] = SRC
    return 0.0


def test_a_function_gets_a_copy_of_the_sample():
    sample = dict(GOOD)
    assert raws([sample], rule=f"{__name__}:spoil") == [0.0] and sample == GOOD


def ranks_by_text(samples):
    """Return a mapping, whose keys are no values."""
    return {sample["mt"]: 1.0 for sample in samples}


def test_a_mapping_or_a_text_is_no_list_of_values():
    samples = [GOOD | {"mt": "1"}, GOOD | {"mt": "2"}]
    components = evaluate(samples, [[0, 1]], rule=f"{__name__}:ranks_by_text", group=True)
    assert [component.raw for component in components] == [None, None]
    assert components[0].message == "TypeError: it returned a dict, not a list of values"


def answer_as_text(sample):
    """Return a number as a text, or as bytes."""
    return sample["mt"] if sample["mt"] == "1.5" else b"1.5"


def test_a_text_is_no_number():
    components = evaluate(
        [GOOD | {"mt": mt} for mt in ("1.5", "b")], rule=f"{__name__}:answer_as_text"
    )
    assert [component.status for component in components] == ["rule_error"] * 2
    assert components[0].message == "TypeError: it returned the text '1.5', not a number"


def count_forever(samples):
    """Return an iterator without an end."""
    return itertools.count()


def test_an_endless_iterator_is_the_wrong_number_of_values():
    (component,) = evaluate([GOOD], [[0]], rule=f"{__name__}:count_forever", group=True)
    assert component.message == "ValueError: more than 1 values for 1 samples"


def spoil_inside(sample):
    """Change what the sample holds."""
    sample["meta"]["level"].append(sample["meta"].pop("name"))
    return 0.0


def test_a_function_cannot_change_what_the_sample_holds():
    sample = GOOD | {"meta": {"level": [1], "name": "a"}}
    assert raws([sample, sample], rule=f"{__name__}:spoil_inside") == [0.0, 0.0]
    assert sample["meta"] == {"level": [1], "name": "a"}


class Unprintable(Exception):
    """Has no text."""

    def __str__(self):
        raise RuntimeError("no text")


def raise_as_named(sample):
    """Raise an error whose text cannot be read, or has lines, or has no end."""
    errors = {"none": Unprintable(), "lines": ValueError("a\nb"), "long": ValueError("x" * 10_000)}
    raise errors[sample["mt"]]


def test_an_error_of_a_function_is_one_short_line():
    samples = [GOOD | {"mt": mt} for mt in ("none", "lines", "long")]
    messages = [c.message for c in evaluate(samples, rule=f"{__name__}:raise_as_named")]
    assert messages[:2] == ["Unprintable: (its text cannot be read)", "ValueError: a b"]
    assert len(messages[2]) < 400


async def late(sample):
    """Return a value later."""
    return 1.0


def test_an_async_function_is_refused():
    with pytest.raises(UserError, match=r"^components.a.rule: .*:late' is async"):
        evaluate([GOOD], rule=f"{__name__}:late")


@pytest.mark.parametrize("body", ["1 / 0", "def", "import sys; sys.exit(2)", "import not_there"])
def test_a_module_that_fails_at_import_is_one_line(tmp_path, monkeypatch, body):
    (tmp_path / "failing_rules.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("failing_rules", None)
    with pytest.raises(UserError, match=r"^components.a.rule: .* cannot be loaded: ") as caught:
        evaluate([GOOD], rule="failing_rules:f")
    assert "\n" not in str(caught.value)


def test_a_mistake_of_the_user_ends_the_call():
    with pytest.raises(UserError, match="column: required"):
        evaluate([GOOD], rule=f"{__name__}:refuse")


def test_a_mistake_in_a_rule_that_is_only_reported_ends_nothing():
    reported = {"rule": f"{__name__}:refuse", "weight": 0}
    checked = load_definition({"components": {"a": reported, "b": {"rule": "copy"}}})
    (component,) = LocalRule("components.a", checked.components["a"]).evaluate([GOOD], ())
    assert (component.status, component.message) == ("rule_error", "column: required")
