"""Check the demo's comparison of stages: what is not judged, and what each phase changed."""

from __future__ import annotations

from rich.console import Console

from demo.search.compare import Stage, show_stats, show_types, verdict
from tests.kits.trainer.searching.curated import make_question, searched
from tests.kits.trainer.searching.finished import search_turn


def stage(title, scores, ndcg=0.5, end="complete", crops=0, **stats):
    """Return a stage.

    scores: by question type; None is an answer that was not judged.

    end, crops: of every episode.
    """
    cropped = search_turn(1, "deck_1").model_copy(update={"action": "crop"})
    episodes = [
        searched(
            make_question(f"{type}{n}", 1, question_type=type),
            judge=score,
            ndcg=ndcg,
            end=end,
            turns=[search_turn(1, "deck_1"), *[cropped] * crops],
        )
        for type, type_scores in scores.items()
        for n, score in enumerate(type_scores)
    ]
    return Stage(title, stats, episodes)


def printed_text(show, *stages):
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as printed:
        show(console, stages)
    return printed.get()


BEFORE = {"sum": [0.0, 0.0, 0.0, 0.0], "chart": [0.0, 0.0]}


def test_an_answer_that_nobody_judged_is_no_wrong_one():
    after = stage("after", {"sum": [1.0, None, 0.0, None], "chart": [1.0, 1.0]})
    ndcg, judge, *_, left, _ = verdict([stage("before", BEFORE), after])
    assert ndcg.startswith("Phase 1: NDCG +0.000 a question (95 %")
    assert judge.startswith("Phase 1: judge's score +0.750 a question (95 %")
    assert "; 2 of 6 questions have none)." in judge and "have none" not in ndcg
    assert left == ("Not learned: of 4 questions of type 'sum' 1 go wrong still. 2 are not judged.")
    # The means are over the two judged questions of type sum.
    assert "0.50 / 0.50" in printed_text(show_types, after)


def test_where_all_are_judged_it_says_what_it_said():
    after = stage("after", {"sum": [1.0, 0.0, 0.0, 1.0], "chart": [1.0, 1.0]})
    _, judge, *_, left, _ = verdict([stage("before", BEFORE), after])
    assert judge.startswith("Phase 1: judge's score +0.667 a question (95 %")
    assert "have none" not in judge
    assert left == "Not learned: of 4 questions of type 'sum' 2 go wrong still."


ELSEWHERE = "Another seed can differ: docs/explanation/evidence/phases.md has several."


def test_the_last_sentence_names_the_phase_that_changed_nothing():
    first = stage("before", BEFORE, ndcg=0.2)
    second = stage("after phase 1", {"sum": [1.0] * 4, "chart": [1.0] * 2}, ndcg=0.8)
    third = stage("after phase 2", {"sum": [1.0, 1.0, 1.0, 0.0], "chart": [1.0] * 2}, ndcg=0.8)
    *_, last = verdict([first, second, third])
    assert last == (
        "In this run, one seed: Phase 1 raised NDCG and judge's score; Phase 2 raised nothing that "
        f"is shown. {ELSEWHERE}"
    )


def test_crops_and_ends_are_compared_as_scores_are():
    first = stage("before", BEFORE, end="forced", crops=1)
    second = stage("after phase 1", BEFORE, crops=0)
    third = stage("after phase 2", BEFORE, end="forced", crops=2)
    *_, ends, _, last = verdict([first, second, third])
    assert ends == "At the end the policy ends 0 of 6 episodes itself, and crops in 6."
    assert last == (
        "In this run, one seed: Phase 1 raised own ends, and lowered crops; Phase 2 raised crops, "
        f"and lowered own ends. {ELSEWHERE}"
    )


def test_a_mean_of_nothing_is_a_dash():
    nothing = stage("after", {"sum": [None] * 4, "chart": [None] * 2}, ndcg=None)
    ndcg, judge, *_, left, last = verdict([stage("before", BEFORE), nothing])
    assert ndcg == "Phase 1: NDCG – a question; 6 of 6 questions have none."
    assert judge == "Phase 1: judge's score – a question; 6 of 6 questions have none."
    assert left == "Not learned: not known, for no answer is judged."
    assert last == f"In this run, one seed: Phase 1 raised nothing that is shown. {ELSEWHERE}"
    printed = printed_text(show_types, nothing)
    assert printed.count("– / –") == 2 and "0.00" not in printed


def test_a_figure_that_one_stage_lacks_is_a_dash_and_the_others_stay():
    first = stage("first", BEFORE, ndcg_mean=0.25, judge_mean=None, money=None)
    last = stage("last", BEFORE, ndcg_mean=0.5, judge_mean=0.75, money=None)
    printed = printed_text(show_stats, first, last)
    (line,) = [line for line in printed.splitlines() if "0.75" in line]
    assert "–" in line and "0.25" in printed
    assert "money" not in printed  # no stage has it
