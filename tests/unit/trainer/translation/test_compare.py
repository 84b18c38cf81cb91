"""Check how two translation policies are compared, by stat and by language pair."""

from __future__ import annotations

import pytest
import sacrebleu

from scorekit.paired import FEWEST, as_row
from trainer.translation.evaluation.compare import changed_most, compare_policies, reference_stats

KO, DE = "en-US>ko-KR", "en-US>de-DE"


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scorekit.paired.RESAMPLES", 500)


def line(number, metricx=5.0, mt="열기", **changes):
    """Return one row of an evaluation dump."""
    return {
        "id": str(number),
        "pair": KO,
        "src": f"source {number}",
        "mt": mt,
        "ref": "파일을 열기",
        "tokens": 4,
        "finish_reason": "eos",
        "metricx_score": metricx,
        "xcomet_score": 0.5,
        "chrf": 20.0,
        "error_spans": [],
        "error": None,
        **changes,
    }


def find_comparison(groups, key, group="all"):
    (comparison,) = [comparison for comparison in groups[group] if comparison.key == key]
    return comparison


def test_a_policy_against_itself_is_no_difference() -> None:
    lines = [line(n, metricx=n / 3, mt="열기" * (n % 3)) for n in range(20)]
    for comparison in compare_policies(lines, lines)["all"]:
        assert comparison.difference == comparison.low == comparison.high == 0, comparison.key
        assert comparison.worse in (0.5, None) and comparison.verdict == ""


def test_a_clear_difference_is_called_by_its_direction() -> None:
    """Check MetricX (lower is better), chrF (higher is better) and a length (neither)."""
    before = [line(n, 8 + n % 5, mt="ab", tokens=9) for n in range(30)]
    after = [line(n, 6 + n % 4, mt="파일을 열기") for n in range(30)]
    groups = compare_policies(before, after)
    verdicts = {comparison.key: comparison.verdict for comparison in groups["all"]}
    assert verdicts["metricx_score_mean"] == verdicts["chrf"] == verdicts["bleu"] == "better"
    assert (
        verdicts["completion_length_mean"] == ""
        and find_comparison(groups, "completion_length_mean").high < 0
    )
    assert find_comparison(groups, "metricx_score_mean").worse == 0
    back = compare_policies(after, before)
    assert (
        find_comparison(back, "metricx_score_mean").verdict
        == find_comparison(back, "chrf").verdict
        == "worse"
    )
    assert find_comparison(back, "metricx_score_mean").worse == 1


def test_a_source_whose_service_failed_is_left_out_and_counted() -> None:
    before, after = [line(n, 6.0) for n in range(12)], [line(n, 4.0) for n in range(12)]
    before[3] |= {"metricx_score": None, "error": "metricx: timeout"}
    after[7] |= {"metricx_score": None, "error_spans": None}
    groups = compare_policies(before, after)
    comparison = find_comparison(groups, "metricx_score_mean")
    assert (comparison.sources, comparison.left_out) == (10, 2)
    assert (comparison.first, comparison.second, comparison.difference) == (6.0, 4.0, -2.0)
    assert find_comparison(groups, "spans_mean").left_out == 1
    assert find_comparison(groups, "xcomet_score_mean").left_out == 0
    assert as_row(comparison).sources == "10 (-2)"


def test_few_sources_get_no_interval_and_none_no_figure() -> None:
    lines = [line(n, 6.0, ref=None, xcomet_score=None) for n in range(FEWEST - 1)]
    groups = compare_policies(lines, [{**row, "metricx_score": 1.0} for row in lines])
    comparison = find_comparison(groups, "metricx_score_mean")
    assert comparison.difference == -5.0 and comparison.low is None and comparison.verdict == ""
    assert find_comparison(groups, "xcomet_score_mean").difference is None
    assert "chrf" not in {comparison.key for comparison in groups["all"]}


def test_chrf_and_bleu_are_those_of_the_corpus() -> None:
    before = [line(n, mt=f"파일 {n}") for n in range(12)]
    after = [line(n, mt=f"파일을 열 {n}") for n in range(12)]
    groups = compare_policies(before, after)
    references = [[row["ref"] for row in after]]
    texts = [row["mt"] for row in after]
    expected = sacrebleu.corpus_chrf(texts, references).score
    assert find_comparison(groups, "chrf").second == pytest.approx(expected, abs=1e-9)
    expected = sacrebleu.corpus_bleu(texts, references, tokenize="char").score
    assert find_comparison(groups, "bleu").second == pytest.approx(expected, abs=1e-9)


def test_bleu_counts_as_the_target_language_needs_and_never_over_two() -> None:
    texts, references = ["파일을 여는 집", "the red house is big"], ["파일을 열기", "the red house"]
    both = reference_stats([KO, DE], texts, references)
    assert both["bleu"] is None and both["bleu_tokenize"] is None and both["chrf"] > 0
    for index, (pair, tokenize) in enumerate([(KO, "char"), (DE, "13a")]):
        alone = reference_stats([pair], texts[index:][:1], references[index:][:1])
        assert alone["bleu_tokenize"] == tokenize
        expected = sacrebleu.corpus_bleu([texts[index]], [[references[index]]], tokenize=tokenize)
        assert alone["bleu"] == pytest.approx(expected.score)
    mixed = [line(n, pair=KO if n % 2 else DE) for n in range(4)]
    groups = compare_policies(mixed, mixed)
    assert set(groups) == {"all", KO, DE}
    assert "bleu" not in {comparison.key for comparison in groups["all"]}
    assert find_comparison(groups, "bleu", DE).sources == 2


def test_other_sources_are_not_compared() -> None:
    with pytest.raises(ValueError, match="same sources"):
        compare_policies([line(1)], [line(2)])


def test_what_changed_most_stands_first() -> None:
    before = [line(n, 10.0) for n in range(4)]
    after = [line(0, 9.0), line(1, 2.0), line(2, 14.0), line(3, None)]
    improved, worsened = changed_most(before, after, 5)
    assert [b["id"] for _, b in improved[1]] == ["1", "0"]
    assert [b["id"] for _, b in worsened[1]] == ["2"]
    unscored = [{**row, "metricx_score": None, "xcomet_score": None} for row in before]
    (better,) = changed_most(unscored, [{**unscored[0], "chrf": 90.0}, *unscored[1:]], 5)
    assert better[0] == "Improved most by chrF"
