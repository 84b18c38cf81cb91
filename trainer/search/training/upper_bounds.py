"""Estimate upper bounds before a run: the ids of an episode, and the cost of paid calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.search.answer.estimate import worst_case
from trainer.search.config import SearchConfig
from trainer.search.images.image_data import displayed_size
from trainer.search.images.views import ShownImage, legible_lines
from trainer.search.records import ImageView, Question
from trainer.search.rollout.episode_tokens import TurnTokenizer
from trainer.search.rollout.prompt import Message, page_line, turns_left
from trainer.search.rollout.sampled import PolicyInputs
from trainer.search.rollout.tools import PageSource

#: Number of gold pages that are read to estimate how long the text of a page is.
_LOOKED_AT = 16


def max_episode_tokens(
    cfg: SearchConfig,
    ids: TurnTokenizer,
    policy_inputs: PolicyInputs,
    longest: int,
    questions: Sequence[Question],
    pages: PageSource | None,
) -> tuple[int | None, str]:
    """Return the max ids of an episode and a sentence about it.

    It is a prompt of `longest` ids, all that the policy may write, and an observation after each
    turn: the largest image, or for text the longest of some gold pages (without any: None).
    """
    episode_cfg = cfg.episode
    turns = most_turns(cfg, questions)
    if policy_inputs.reader is not None:
        image, basis = _image_size(cfg), "the largest picture"
        observation = len(ids.observation(Message("user", _page_header(image.view, cfg), (image,))))
    elif pages is not None and (texts := _page_texts(cfg, questions, pages)):
        observation = max(len(ids.observation(Message("user", text))) for text in texts)
        basis = f"the longest of {len(texts)} gold pages"
    else:
        return None, "the length of a page is unknown without a gold page"
    observation_tokens = observation * episode_cfg.pages_per_search
    total = longest + episode_cfg.max_response_length + turns * observation_tokens
    message = (
        f"about {total:,} ids at most: {longest} of the prompt, "
        f"{episode_cfg.max_response_length:,} that the policy writes, "
        f"{turns} x {observation_tokens:,} of observations ({basis})"
    )
    if total > policy_inputs.context:
        message += f"; its context is {policy_inputs.context:,}: a longer episode ends as context"
    return min(total, policy_inputs.context), message


def _image_size(cfg: SearchConfig) -> ShownImage:
    """Return an image of the max area. Its form does not matter for the count of ids."""
    sight = cfg.episode.sight
    squares = sight.max_pixels // sight.factor**2
    size = squares * sight.factor, sight.factor
    return ShownImage(ImageView.of_page("a page with a long name_100", size, size), b"")


def _page_texts(cfg: SearchConfig, questions: Sequence[Question], pages: PageSource) -> list[str]:
    """Return the texts of some gold pages as observations show them."""
    page_ids = list(dict.fromkeys(page for question in questions for page in question.gold))
    step = max(1, len(page_ids) // _LOOKED_AT)
    texts = []
    for page_id in page_ids[::step][:_LOOKED_AT]:
        page = pages.page(page_id)
        size = displayed_size(page.width, page.height, cfg.episode.sight)
        view = ImageView.of_page(page_id, size, (page.width, page.height))
        lines = legible_lines(page, view, cfg.episode.sight)
        texts.append("\n".join([_page_header(view, cfg), *lines]))
    return texts


def _page_header(view: ImageView, cfg: SearchConfig) -> str:
    """Return the lines above a page in an observation."""
    lines = (
        page_line(view, cfg.episode.top_k, cfg.episode.top_k, cfg.episode),
        turns_left(cfg.episode.max_turns, cfg.episode),
    )
    return "\n".join(line for line in lines if line)


def most_turns(cfg: SearchConfig, questions: Sequence[Question]) -> int:
    """Return the max turns of an episode of any of these questions."""
    return max((question.max_turns or cfg.episode.max_turns for question in questions), default=0)


def max_training_episodes(cfg: SearchConfig, train: Sequence[Question]) -> int:
    """Return the max episodes of all updates.

    A full pass has the groups of all questions. The last, partial pass counts the largest groups.
    Dynamic sampling adds groups of the largest size.
    """
    rl = cfg.rl.over(len(train))
    sizes = sorted((question.samples(cfg.rollout.n_agent) for question in train), reverse=True)
    num_questions = rl.num_updates * rl.batch_size * rl.grad_accum
    passes, remainder = divmod(num_questions, len(train))
    extra = cfg.rollout.dynamic_sampling * num_questions * sizes[0]
    return passes * sum(sizes) + sum(sizes[:remainder]) + extra


def max_cost(cfg: SearchConfig, sets: Mapping[str, Sequence[Question]]) -> tuple[None, str]:
    """Describe the max paid calls of generator and judge in a run.

    sets: questions by their config key; `data.train` is one of them.
    """
    train = sets["data.train"]
    rl = cfg.rl.over(len(train))
    train_episodes = max_training_episodes(cfg, train)
    every = cfg.eval.eval_every_n_updates
    between = (rl.num_updates - 1) // every if every else 0
    held_out = [
        question
        for key, questions in sets.items()
        if key != "data.train"
        for question in questions[: cfg.eval.eval_limit]
    ]
    eval_episodes = (2 + between) * len(held_out)
    episodes = (
        f"{train_episodes:,} episodes of training, {eval_episodes:,} of {2 + between} evaluations"
    )
    if not cfg.reward.weights["judge"]:
        return None, f"no paid calls: no reward component needs an answer ({episodes})"
    questions_asked = [*train, *held_out]
    max_images = most_turns(cfg, questions_asked) * cfg.episode.pages_per_search
    bound = worst_case(questions_asked, train_episodes + eval_episodes, max_images, cfg.answering)
    message = "; ".join([episodes, *bound.lines()[1:]])
    if cfg.answering.money.generator is None:
        message += "; answering.money has no price: the cost is unknown"
    return None, f"{message} (`search estimate` computes it from a run of a few episodes)"
