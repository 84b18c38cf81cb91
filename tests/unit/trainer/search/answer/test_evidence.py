"""Check which images the generator receives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import UserError
from tests.kits.trainer.search_answers import episode, image_hash
from trainer.search.answer.config import GeneratorConfig
from trainer.search.answer.pipeline import evidence, evidence_images


def evidence_names(*names: str, max_images: int = 8, crop_slots: int = 3) -> list[str]:
    images = [view.image for view in evidence(episode(*names), max_images, crop_slots)]
    name_by_image = {image_hash(name): name for name in names}
    return [name_by_image[image] for image in images]


def test_pages_stand_in_the_order_in_which_they_were_shown_then_crops():
    assert evidence_names("b_2", "b_2/x", "a_1", "a_1/y", "c_3") == [
        "b_2",
        "a_1",
        "c_3",
        "b_2/x",
        "a_1/y",
    ]


def test_crops_keep_their_places_however_many_pages_there_are():
    pages = [f"d_{n}" for n in range(1, 15)]
    assert evidence_names(*pages, "d_1/x") == [*pages[:7], "d_1/x"]
    crops = [f"d_1/{n}" for n in range(5)]
    assert evidence_names(*pages, *crops) == [*pages[:5], *crops[-3:]]


def test_room_that_one_kind_leaves_is_the_others():
    pages, crops = [f"d_{n}" for n in range(1, 10)], [f"d_1/{n}" for n in range(9)]
    assert evidence_names(*pages) == pages[:8]
    assert evidence_names("d_1", *crops) == ["d_1", *crops[-7:]]
    assert evidence_names(*pages, *crops, crop_slots=0) == pages[:8]
    assert evidence_names("d_1", "d_1/a", max_images=1) == ["d_1/a"]
    assert evidence_names("d_1", "d_1/a", max_images=1, crop_slots=0) == ["d_1"]


def test_each_picture_and_each_page_comes_once():
    assert evidence_names("d_1", "d_1/a", "d_1", "d_1/a", "d_2") == ["d_1", "d_2", "d_1/a"]
    assert evidence_names("d_1", "d_1//smaller") == ["d_1"]  # displayed again in another size


def test_nothing_shown_is_no_evidence():
    assert evidence_names() == []


NAMES = st.lists(st.builds("d_{}{}".format, st.integers(1, 9), st.sampled_from(["", "/a", "/b"])))


@given(NAMES, st.integers(1, 10), st.integers(0, 12))
def test_it_is_never_too_much_nor_less_than_there_is(names, max_images, crop_slots):
    names_sent = evidence_names(*names, max_images=max_images, crop_slots=crop_slots)
    assert len(names_sent) == len(set(names_sent)) == min(max_images, len(set(names)))
    crops = {name for name in names if "/" in name}
    crops_sent = [name for name in names_sent if "/" in name]
    assert len(crops_sent) >= min(len(crops), crop_slots, max_images)
    assert names_sent == sorted(names_sent, key=lambda name: "/" in name)  # pages first


def test_the_generator_gets_originals_or_exactly_what_the_policy_was_shown():
    searched = episode("d_1", "d_1/a")
    for name, seen in zip(("page", "part"), searched.turns, strict=True):
        seen.views[0].original = image_hash(name)
    originals = evidence_images(searched, GeneratorConfig())
    assert originals == [image_hash("page"), image_hash("part")]
    as_shown = evidence_images(searched, GeneratorConfig(images="shown"))
    assert as_shown == [image_hash("d_1"), image_hash("d_1/a")]


def test_an_episode_without_originals_is_refused_and_never_answered_from_smaller_images():
    older = episode("d_1")
    older.turns[0].views[0].original = None
    with pytest.raises(UserError, match=r"images: original, but the episode t1 .* of page d_1"):
        evidence_images(older, GeneratorConfig())
    assert evidence_images(older, GeneratorConfig(images="shown")) == [image_hash("d_1")]
