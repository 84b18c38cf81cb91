"""The search episode for TRL's GRPOTrainer, as an environment whose tools its policy calls.

with open_trl_search(load_config(SearchConfig, "search.yaml")) as search:
    trainer = GRPOTrainer(
        environment_factory=search.environment,
        reward_funcs=search.rewards,
        train_dataset=Dataset.from_list(search.rows(questions)),
        ...
    )
    trainer.train()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from scorekit.errors import ScorekitError, UserError
from scorekit.net.loops import LoopThread
from trainer.search.config import SearchConfig
from trainer.search.environment.environment import SearchEnvironment
from trainer.search.environment.observation import EpisodeResult
from trainer.search.environment.services import EnvironmentServices, open_environment_services
from trainer.search.images.image_data import read_image
from trainer.search.records import Question
from trainer.search.reward.stats import PARTS
from trainer.search.rollout.prompt import Message, chat_messages, opening

#: The answer to a call after the end. It is the same for every end, also where a service failed.
ENDED = "The search has ended."
#: A turn is stored with tags, as our own trainer's are. TRL does not pass the text before a call.
_TURN = "<think>a call of a tool</think>\n{action}"
RewardFunction = Callable[..., list[float | None]]


@contextmanager
def open_trl_search(cfg: SearchConfig) -> Iterator[TrlSearch]:
    """Open the services of a config for a trainer of TRL. Raises UserError, ServiceUnreachable."""
    with open_environment_services(cfg, "tools") as services:
        thread = LoopThread("search episodes")
        try:
            yield TrlSearch(services, thread)
        finally:
            thread.stop()


class TrlSearch:
    """The environments, rewards and rows of one trainer."""

    def __init__(self, services: EnvironmentServices, thread: LoopThread) -> None:
        self._services, self._thread = services, thread

    def environment(self) -> SearchEpisode:
        """Return an environment; this is TRL's `environment_factory`."""
        return SearchEpisode(self._services, self._thread)

    def rows(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Return a row of a dataset for each question: its prompt, and what `reset` needs."""
        cfg = self._services.cfg.episode
        return [
            {
                "prompt": chat_messages(opening(question, cfg, "tools")),
                "question": question.model_dump_json(),
            }
            for question in questions
        ]

    def rewards(self, environments: Sequence[SearchEpisode], **columns: Any) -> list[float | None]:
        """Return the reward of each episode, or None; this is one of TRL's `reward_funcs`.

        An episode that TRL has ended (no call, or no tokens left) is scored with what was shown.
        TRL leaves an episode out whose functions all give None. So give no other function, or one
        from `only_scored`. The log gets the mean of each component and the share of episodes with a
        reward (`search/coverage`). Raises an error that concerns all episodes, and ScorekitError if
        no episode of the batch has a reward.
        """
        endings = [self._thread.submit(episode._finish()) for episode in environments]
        results = [ending.result() for ending in endings]
        _log_components(results, columns.get("log_metric"), columns.get("log_extra"))
        rewards = [result.reward for result in results]
        if results and all(reward is None for reward in rewards):
            raise ScorekitError(
                f"no episode of the batch has a reward; the first: {results[0].error}"
            )
        return rewards

    def only_scored(self, function: RewardFunction) -> RewardFunction:
        """Return a reward function that gives None where an episode has no reward.

        Otherwise TRL would count the missing reward as 0 beside the function's value.
        """

        def scored_only(
            environments: Sequence[SearchEpisode], **columns: Any
        ) -> list[float | None]:
            endings = [self._thread.submit(episode._finish()) for episode in environments]
            values = function(environments=environments, **columns)
            return [
                None if ending.result().reward is None else value
                for ending, value in zip(endings, values, strict=True)
            ]

        scored_only.__name__ = getattr(function, "__name__", "reward")
        return scored_only


class SearchEpisode:
    """One episode at a time; its public methods are the tools of the policy.

    A tool never raises: TRL would show the error to the policy. An error that concerns all episodes
    is raised by `TrlSearch.rewards`.
    """

    def __init__(self, services: EnvironmentServices, thread: LoopThread) -> None:
        self._environment = SearchEnvironment(services, policy="trl")
        self._thread = thread
        self._error: Exception | None = None
        self._result: Future[EpisodeResult] | None = None

    def reset(self, **row: Any) -> None:
        """Begin the episode of a row of `TrlSearch.rows`."""
        try:
            question = Question.model_validate_json(row["question"])
        except (KeyError, ValueError):
            raise UserError(
                "train_dataset: a row has no question of this environment. Make the rows by "
                "TrlSearch.rows"
            ) from None
        self._error, self._result = None, None
        self._environment.begin(question)

    def search(self, query: str = "") -> Any:
        """Find pages by what is on them. The first ones that were not shown yet are shown.

        Args:
            query: A few words that stand on the page.

        Returns:
            The pages.
        """
        return self._turn(f"<search>{query}</search>")

    def crop(self, x1: float = -1, y1: float = -1, x2: float = -1, y2: float = -1) -> Any:
        """Show a part of the picture last shown, enlarged.

        Args:
            x1: The left side of the part.
            y1: The upper side of the part.
            x2: The right side of the part.
            y2: The lower side of the part.

        Returns:
            The part.
        """
        return self._turn(f"<bbox>[{x1}, {y1}, {x2}, {y2}]</bbox>")

    def search_complete(self) -> str:
        """End the search: what was shown is enough to answer the question.

        Returns:
            A confirmation.
        """
        return str(self._turn("<search_complete>true</search_complete>"))

    def _turn(self, action: str) -> Any:
        """Return the content of TRL's tool message: a text, or a list with images."""
        if self._result is not None or self._error is not None:
            return ENDED
        try:
            turn = self._environment.advance(_TURN.format(action=action))
            observation = self._thread.run(turn)
        except Exception as error:
            self._error = error
            return ENDED
        if observation.done:
            # The answer and its verdict are computed while other episodes go on.
            self._result = self._thread.submit(self._environment.result())
            return ENDED
        (message,) = observation.messages
        if not message.images:
            return message.text
        return [*_image_parts(message), {"type": "text", "text": message.text}]

    async def _finish(self) -> EpisodeResult:
        """Return the result; an episode that still runs is stopped first."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            observation = await self._environment.stop("the trainer had no further turn")
            assert observation.result is not None
            self._result = Future()
            self._result.set_result(observation.result)
        return await asyncio.wrap_future(self._result)


def _image_parts(message: Message) -> list[dict[str, Any]]:
    return [{"type": "image", "image": read_image(image.png)} for image in message.images]


def _log_components(
    results: Sequence[EpisodeResult],
    log_metric: Callable[[str, float], None] | None,
    log_extra: Callable[[str, list[Any]], None] | None,
) -> None:
    """Log the mean of each component, and the share of episodes with a reward."""
    if log_metric is not None and results:
        scored = [result for result in results if result.reward is not None]
        log_metric("search/coverage", len(scored) / len(results))
        for name in PARTS:
            values = [r.components[name] for r in scored if name in r.components]
            if values:
                log_metric(f"search/{name}", sum(values) / len(values))
    if log_extra is not None:
        log_extra("search/status", [result.status for result in results])
        log_extra("search/error", [result.error or "" for result in results])
