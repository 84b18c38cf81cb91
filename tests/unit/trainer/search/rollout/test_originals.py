"""Check the originals of an episode's images, which are for the generator."""

from __future__ import annotations

import pytest

from tests.kits.trainer.searching.episodes import ask, by_question, crop, played, scripted, search
from trainer.search.images.image_data import read_image


@pytest.mark.parametrize("observation", ["image", "text"])
def test_originals_are_stored_for_the_generator_whatever_the_policy_reads(observation: str) -> None:
    turns = [search("births 1990"), crop(0, 0, 840, 400)]
    questions, images = [ask("q1"), ask("q2")], {}
    done = played(
        by_question({question.id: turns for question in questions}),
        questions,
        pictures=images,
        observation=observation,
        original_pixels=600_000,
    )
    for trajectory in done:
        views = [view for turn in trajectory.turns for view in turn.views]
        assert [view.kind for view in views] == ["page", "crop"]
        for view in views:
            width, height = read_image(images[view.original]).size
            assert view.width * view.height < width * height <= 600_000
    assert set(images) == {image for trajectory in done for image in trajectory.images}
    assert len(images) == 4  # both episodes were shown the same


def test_without_a_generator_no_original_is_stored() -> None:
    images: dict[str, bytes] = {}
    (done,) = played(scripted(search("births 1990")), pictures=images)
    assert done.turns[0].views[0].original is None and len(images) == 1
