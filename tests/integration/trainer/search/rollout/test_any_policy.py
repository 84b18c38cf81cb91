"""Check that an episode ends with consistent records, whatever a policy writes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.examples import examples
from tests.kits.trainer.searching.episodes import COMPLETE, ask, played, search
from tests.kits.trainer.searching.pages import DECK
from trainer.search.rollout.policies import ScriptPolicy

_NUMBERS = st.one_of(
    st.integers(-50, 1100), st.floats(0, 1), st.sampled_from([1e308, -1e308, 0, 840, 448])
)
_BOXES = st.lists(_NUMBERS, min_size=4, max_size=4).map(
    lambda sides: f"<think>a</think><bbox>{sides}</bbox>"
)
_SIDES = st.tuples(st.integers(0, 700), st.integers(0, 300), st.integers(1, 300))
_GOOD_BOXES = _SIDES.map(
    lambda s: f"<think>a</think><bbox>[{s[0]}, {s[1]}, {s[0] + s[2]}, {s[1] + s[2]}]</bbox>"
)
_SEARCHES = st.sampled_from(["births", "rainfall", "zebra", "month korea", "<|im_end|>"])
_TURNS = st.one_of(
    _SEARCHES.map(search), _GOOD_BOXES, _BOXES, st.text(max_size=30), st.just(COMPLETE)
)


@settings(max_examples=examples(25))
@given(
    st.lists(_TURNS, min_size=1, max_size=6),
    st.sampled_from(["image", "text"]),
    st.sampled_from(["pixel", "thousand", "unit"]),
    st.integers(1, 3),
)
def test_an_episode_ends_within_its_turns_and_all_it_shows_is_of_a_page(
    turns: list[str], observation: Any, convention: Any, several: int
) -> None:
    policy = ScriptPolicy(lambda request: turns[(request.turn - 1) % len(turns)])
    images: dict[str, bytes] = {}
    (done,) = played(
        policy,
        [ask(max_turns=5)],
        pictures=images,
        observation=observation,
        pages_per_search=several,
        sight={"box_convention": convention},
    )
    policy_turns = [turn for turn in done.turns if not turn.forced]
    assert done.end in ("complete", "declined", "forced") and len(policy_turns) <= 5
    assert [turn.number for turn in done.turns] == list(range(1, len(done.turns) + 1))
    assert (len(policy_turns) == 5 and done.turns[-1].forced) == (done.end == "forced")
    pages = [view.page_id for turn in policy_turns for view in turn.views if view.kind == "page"]
    assert len(pages) == len(set(pages)) and set(pages) <= set(DECK)
    for turn in policy_turns:
        assert (turn.reason is not None) == (turn.action == "invalid") == bool(turn.detail)
        assert bool(turn.views) <= (turn.action in ("search", "crop"))
        for view in turn.views:
            left, top, right, bottom = view.region
            assert 0 <= left < right <= view.page_width and 0 <= top < bottom <= view.page_height
            assert view.image in images and view.width * view.height <= 401_408
    assert done == type(done).model_validate_json(done.model_dump_json())
