"""Scripted episodes of a searcher that knows the tags, but has no method of searching.

The scripts are noisy on purpose. Each picks its queries and its end by chance, and in one turn of
eight breaks the form; which of it pays is for reinforcement learning to find out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from demo.train.search.questions import bare
from trainer.search.rollout.episode import TurnRequest

#: Which words of the question make a query, and how often. The first ones say nothing.
STYLES: Final[dict[str, Callable[[Sequence[str], random.Random], Sequence[str]]]] = {
    "all": lambda words, rng: words,
    "some": lambda words, rng: _adjacent_words(words, rng),
    "first": lambda words, rng: words[:3],
    "last": lambda words, rng: words[-2:],
}
SHARES: Final = {"all": 0.25, "some": 0.2, "first": 0.35, "last": 0.2}
#: Of the turns behind the first: that end the episode, and of the last turn. A forced end can cost
#: something, so the policy must know that turns run out.
ENDS, LAST_ENDS = 0.12, 0.6
#: Of the turns behind small print, and behind any other picture: that look closer. The rest search.
LOOKS, OTHER_LOOKS = 0.45, 0.05
#: Of all turns: that are of wrong form.
BROKEN = 0.12
DONE: Final = "<think>done</think>\n<search_complete>true</search_complete>"
_SMALL_PRINT = re.compile(r"(\[[\d, ]+\]) \([^)]*too small to read\)")
_LAST_TURN: Final = "1 turn left."
_BOX = re.compile(r"\[\d+, \d+, \d+, \d+\]")


def search_turn(question: str, style: str, rng: random.Random) -> str:
    """Return a turn that searches. The blank before the query gives its first word the same
    token as in the question.
    """
    words = [word for word in map(bare, question.split()) if word]
    return f"<think>search</think>\n<search> {' '.join(STYLES[style](words, rng))}</search>"


def _adjacent_words(words: Sequence[str], rng: random.Random) -> Sequence[str]:
    """Return two to four adjacent words."""
    first = rng.randrange(max(1, len(words) - 1))
    return words[first : first + rng.randint(2, 4)]


def any_style(rng: random.Random) -> str:
    """Draw a style according to the shares."""
    return rng.choices(list(SHARES), list(SHARES.values()))[0]


class Scripts:
    """Provides the turns of many episodes as a script for `ScriptPolicy`.

    Each episode has its own random state.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._started = seed, count()
        self._running: dict[str, tuple[random.Random, list[str]]] = {}

    def __call__(self, request: TurnRequest) -> str:
        """Return the next turn."""
        if request.turn == 1:
            rng = random.Random(f"{self._seed}-{next(self._started)}")
            self._running[request.trajectory_id] = (rng, [any_style(rng)])
        rng, style = self._running[request.trajectory_id]
        if rng.random() < 0.4:
            style[0] = any_style(rng)
        question = request.messages[1].text.removeprefix("Question: ")
        turn = _action(request, rng) or search_turn(question, style[0], rng)
        return _broken(turn, rng) if rng.random() < BROKEN else turn


def _action(request: TurnRequest, rng: random.Random) -> str | None:
    """Return the end, or a crop; None means a search."""
    kind = rng.random()
    if request.turn == 1:
        return DONE if kind < 0.07 else None
    observation = request.messages[-1].text
    ends = LAST_ENDS if observation.endswith(_LAST_TURN) else ENDS
    if kind < ends:
        return DONE
    boxes, small = _BOX.findall(observation), _SMALL_PRINT.findall(observation)
    if boxes and kind < ends + (LOOKS if small else OTHER_LOOKS):
        box = small[-1] if small and rng.random() < 0.5 else rng.choice(small or boxes)
        return f"<think>look</think>\n<bbox>{box}</bbox>"
    return None


def _broken(turn: str, rng: random.Random) -> str:
    """Return an action with one error of form."""
    action = turn.partition("</think>\n")[2]
    broken_turns = (
        action,
        turn.rpartition("</")[0],
        turn.replace("</think>", "", 1),
        f"{turn}\n{action}",
        "<think>done</think>\nnothing",
    )
    return rng.choice(broken_turns)
