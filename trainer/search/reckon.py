"""How much a run will take at most, before anything was sampled: ids of an episode, and money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.search.answer.estimate import most
from trainer.search.config import SearchConfig
from trainer.search.local import Reads
from trainer.search.records import Question, View
from trainer.search.sight.legible import legible_lines
from trainer.search.sight.pictures import shown_size
from trainer.search.sight.views import Shown
from trainer.search.turns.joined import TurnIds
from trainer.search.turns.prompt import Message, page_line, turns_left
from trainer.search.turns.tools import Pages

#: Gold pages that are read to know how long the text of one is.
_LOOKED_AT = 16


def episode_ids(
    cfg: SearchConfig,
    ids: TurnIds,
    reads: Reads,
    longest: int,
    questions: Sequence[Question],
    pages: Pages | None,
) -> tuple[int | None, str]:
    """The most ids of an episode: a prompt of `longest`, all that may be written, and what is shown
    behind each turn. That is the largest picture that may be shown; of text it is the longest of
    some gold pages, and without any it is None."""
    of = cfg.episode
    turns = most_turns(cfg, questions)
    if reads.reader is not None:
        shown, said = _picture(cfg), "the largest picture"
        observation = len(ids.observation(Message("user", _told(shown.view, cfg), (shown,))))
    elif pages is not None and (texts := _page_texts(cfg, questions, pages)):
        observation = max(len(ids.observation(Message("user", text))) for text in texts)
        said = f"the longest of {len(texts)} gold pages"
    else:
        return None, "how long a page is cannot be said without a gold page"
    each = observation * of.pages_per_search
    found = longest + of.max_response_length + turns * each
    told = (
        f"{found:,} ids at most, or so: {longest} of the prompt, {of.max_response_length:,} that "
        f"the policy writes, {turns} x {each:,} that it is shown ({said})"
    )
    if found > reads.context:
        told += f"; it reads {reads.context:,}: an episode that does not fit them ends as context"
    return min(found, reads.context), told


def _picture(cfg: SearchConfig) -> Shown:
    """Of the largest area, whatever its form: ids are counted by that alone."""
    sight = cfg.episode.sight
    squares = sight.max_pixels // sight.factor**2
    width, height = squares * sight.factor, sight.factor
    view = View(
        kind="page",
        page_id="a page with a long name_100",
        width=width,
        height=height,
        region=(0, 0, width, height),
        page_width=width,
        page_height=height,
        image="",
    )
    return Shown(view, b"")


def _page_texts(cfg: SearchConfig, questions: Sequence[Question], pages: Pages) -> list[str]:
    """Of gold pages, as they would be shown."""
    wanted = list(dict.fromkeys(page for question in questions for page in question.gold))
    step = max(1, len(wanted) // _LOOKED_AT)
    texts = []
    for page_id in wanted[::step][:_LOOKED_AT]:
        page = pages.page(page_id)
        width, height = shown_size(page.width, page.height, cfg.episode.sight)
        view = View(
            kind="page",
            page_id=page_id,
            width=width,
            height=height,
            region=(0, 0, page.width, page.height),
            page_width=page.width,
            page_height=page.height,
            image="",
        )
        lines = legible_lines(page, view, cfg.episode.sight)
        texts.append("\n".join([_told(view, cfg), *lines]))
    return texts


def _told(view: View, cfg: SearchConfig) -> str:
    """What is said beside a page."""
    lines = (
        page_line(view, cfg.episode.top_k, cfg.episode.top_k, cfg.episode),
        turns_left(cfg.episode.max_turns, cfg.episode),
    )
    return "\n".join(line for line in lines if line)


def most_turns(cfg: SearchConfig, questions: Sequence[Question]) -> int:
    """Of an episode of any of these questions."""
    return max((one.max_turns or cfg.episode.max_turns for one in questions), default=0)


def learned_episodes(cfg: SearchConfig, train: Sequence[Question]) -> int:
    """The most that all updates play: of whole passes over the questions all of them, of the last
    one those with the largest groups, and as often as dynamic sampling may, groups of that size."""
    rl = cfg.rl.over(len(train))
    sizes = sorted((one.samples(cfg.rollout.n_agent) for one in train), reverse=True)
    drawn = rl.num_updates * rl.batch_size * rl.grad_accum
    passes, rest = divmod(drawn, len(train))
    further = cfg.rollout.dynamic_sampling * drawn * sizes[0]
    return passes * sum(sizes) + sum(sizes[:rest]) + further


def money(cfg: SearchConfig, sets: Mapping[str, Sequence[Question]]) -> tuple[None, str]:
    """What generator and judge may be asked in the whole run. sets: questions by the key of the
    config that they come from, `data.train` among them."""
    train = sets["data.train"]
    rl = cfg.rl.over(len(train))
    learned = learned_episodes(cfg, train)
    every = cfg.eval.eval_every_n_updates
    between = (rl.num_updates - 1) // every if every else 0
    held_out = [
        question
        for key, questions in sets.items()
        if key != "data.train"
        for question in questions[: cfg.eval.eval_limit]
    ]
    looked = (2 + between) * len(held_out)
    episodes = f"{learned:,} episodes of training, {looked:,} of {2 + between} evaluations"
    if not cfg.reward.weights["judge"]:
        return None, f"nobody is paid: no weight needs an answer ({episodes})"
    asked = [*train, *held_out]
    pictures = most_turns(cfg, asked) * cfg.episode.pages_per_search
    found = most(asked, learned + looked, pictures, cfg.answering)
    told = "; ".join([episodes, *found.lines()[1:]])
    if cfg.answering.money.generator is None:
        told += "; answering.money has no price: what that costs is not known"
    return None, f"{told} (`search estimate` draws it from a run of a few episodes)"
