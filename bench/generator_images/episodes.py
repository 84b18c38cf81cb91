"""The episodes whose evidence the generator is shown: gold pages, and those of a searcher."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial

from demo.search.policy import NAME as SEARCHER
from scorekit.llm import LLMClient, Sampling
from trainer.search.images.views import ShownImage, page_view
from trainer.search.records import Question, Trajectory, Turn
from trainer.search.rollout.config import EpisodeConfig
from trainer.search.rollout.episode import run_episodes
from trainer.search.rollout.policies import ChatPolicy
from trainer.search.rollout.tools import PageSource

#: SHA-256 -> PNG.
Images = dict[str, bytes]


def gold_episodes(
    questions: Iterable[Question], pages: PageSource, max_pixels: int, images: Images
) -> list[Trajectory]:
    """Return an episode of each question that was shown its gold pages.

    max_pixels: of the originals. images: gets all images.
    """
    sight = EpisodeConfig().sight
    image_by_page: dict[str, ShownImage] = {}
    episodes = []
    for question in questions:
        for page in question.gold:
            if page not in image_by_page:
                image = page_view(page, pages.image(page), sight, max_pixels)
                images[image.view.image] = image.png
                if image.original is not None and image.view.original is not None:
                    images[image.view.original] = image.original
                image_by_page[page] = image
        views = [image_by_page[page].view for page in question.gold]
        turn = Turn(number=1, text="", action="search", views=views)
        episodes.append(_episode(question, [turn]))
    return episodes


def _episode(question: Question, turns: Sequence[Turn]) -> Trajectory:
    return Trajectory(
        trajectory_id=question.id,
        run="bench",
        step=1,
        group=question.id,
        question=question,
        turns=list(turns),
        end="complete",
    )


def searched_episodes(
    questions: Sequence[Question],
    pages: PageSource,
    policy_url: str,
    max_pixels: int,
    images: Images,
    seed: int,
) -> list[Trajectory]:
    """Return an episode of each question by the demo's searcher, which crops small print."""
    client = partial(LLMClient, f"{policy_url}/v1", SEARCHER, max_concurrency=32)
    sampling = Sampling(max_tokens=1024, temperature=1.0, seed=seed)
    with closing(ChatPolicy(client, sampling)) as policy:
        policy.check()
        return run_episodes(
            questions,
            policy,
            pages,
            EpisodeConfig(),
            new_id=lambda question, sample: f"{seed}-{question.id}",
            on_done=lambda trajectory: None,
            save_image=images.__setitem__,
            original_pixels=max_pixels,
        )
