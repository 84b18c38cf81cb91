"""Check the originals of an episode's images, which are for the generator."""

from __future__ import annotations

import pytest

from tests.kits.trainer.searching.episodes import ask, by_question, crop, played, scripted, search
from tests.kits.trainer.searching.pages import PagesHere
from trainer.search.config import EpisodeConfig
from trainer.search.images.image_data import read_image
from trainer.search.rollout.actions import Search
from trainer.search.rollout.tools import SearchTools, ToolCall


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


def test_an_original_that_could_not_be_saved_is_saved_the_next_time() -> None:
    saved: dict[str, bytes] = {}
    full = True

    def save(name: str, png: bytes) -> None:
        if full and saved:
            raise OSError("no space left")
        saved[name] = png

    tools = SearchTools(PagesHere(), EpisodeConfig(), save, original_pixels=600_000)
    call = ToolCall(Search("births 1990"), None, frozenset(), 3)
    with pytest.raises(OSError, match="no space"):
        tools.save_images(tools.execute(call))
    full = False
    result = tools.execute(call)
    tools.save_images(result)
    assert set(saved) == {
        name for image in result.images for name in (image.view.image, image.view.original)
    }
