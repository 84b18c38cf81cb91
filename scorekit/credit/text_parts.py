"""Find where the characters of a scored text stand in the completion that it is a part of.

A text that is cut out in one piece stands in one place, or in several. A text of which characters
were removed is a subsequence: there may be several ways to find it, too.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left, bisect_right
from collections.abc import Callable

#: A character of Unicode's private use area: no text of a model has a run of it.
_MARK = "\ue000"
#: Costs of two neighbors of the text that are none in the completion: characters between them were
#: removed, or white space only.
_REMOVED, _SPACE = 2, 1


def positions_of(text: str, raw: str) -> list[int]:
    """Return each index at which `text` stands in `raw`; of an empty text none."""
    positions: list[int] = []
    start = raw.find(text) if text else -1
    while start >= 0:
        positions.append(start)
        start = raw.find(text, start + 1)
    return positions


def position_by_marking(
    postprocess: Callable[[str], str], text: str, raw: str, positions: list[int]
) -> int | None:
    """Return the place that a function takes the text from, or None if it cannot be told.

    The function is called with one place after another filled with marks: the one whose marks it
    returns is its own.
    """
    marks = _MARK * len(text)
    own_starts = []
    for start in positions:
        marked = raw[:start] + marks + raw[start + len(text) :]
        try:
            is_taken = postprocess(marked) == marks
        except Exception:  # the user's function, on a text that no model wrote: it tells nothing
            return None
        if is_taken:
            own_starts.append(start)
    return own_starts[0] if len(own_starts) == 1 else None


def is_subsequence(text: str, raw: str) -> bool:
    """Return whether removing characters from `raw` gives `text`, white space aside."""
    remaining = iter(raw)
    return all(character in remaining for character in text if not character.isspace())


def character_map(text: str, raw: str) -> tuple[list[int], bool]:
    """Return for each character of `raw` its index in `text`, or -1; and whether no other map
    covers all of the text's characters (white space aside) in order.

    A subsequence is mapped completely, in as few runs as possible. Of any other text the longest
    common blocks are mapped, and nothing is certain.
    """
    new_index = [-1] * len(raw)
    if not is_subsequence(text, raw):
        matcher = difflib.SequenceMatcher(None, raw, text, autojunk=False)
        for start, target, size in matcher.get_matching_blocks():
            new_index[start : start + size] = range(target, target + size)
        return new_index, False
    in_text = [index for index, character in enumerate(text) if not character.isspace()]
    in_raw = [index for index, character in enumerate(raw) if not character.isspace()]
    first = _leftmost([text[i] for i in in_text], [raw[j] for j in in_raw])
    last = _rightmost([text[i] for i in in_text], [raw[j] for j in in_raw])
    positions = first if first == last else _fewest_runs(text, raw, in_text, in_raw, first, last)
    for target, position in zip(in_text, positions, strict=True):
        new_index[in_raw[position]] = target
    _add_white_space(new_index, text, raw)
    return new_index, first == last


def _leftmost(text: list[str], raw: list[str]) -> list[int]:
    positions: list[int] = []
    for character in text:
        positions.append(raw.index(character, positions[-1] + 1 if positions else 0))
    return positions


def _rightmost(text: list[str], raw: list[str]) -> list[int]:
    last = len(raw) - 1
    return [last - position for position in reversed(_leftmost(text[::-1], raw[::-1]))]


def _fewest_runs(
    text: str, raw: str, in_text: list[int], in_raw: list[int], first: list[int], last: list[int]
) -> list[int]:
    """Return the place in `in_raw` of each character of `in_text`, with the fewest breaks between
    neighbors; of equal ways the first.

    first, last: the lowest and the highest place of each character.
    """
    by_character: dict[str, list[int]] = {}
    for position, index in enumerate(in_raw):
        by_character.setdefault(raw[index], []).append(position)
    candidates: list[list[int]] = []
    before: list[list[int]] = []  # of each candidate the index of the one before it
    costs: list[int] = []
    for rank, index in enumerate(in_text):
        all_positions = by_character[text[index]]
        bounds = slice(
            bisect_left(all_positions, first[rank]), bisect_right(all_positions, last[rank])
        )
        positions = all_positions[bounds]
        if rank == 0:
            costs, links = [0] * len(positions), [-1] * len(positions)
        else:
            previous = candidates[-1]
            has_space = index - in_text[rank - 1] > 1
            costs, links = _step(positions, previous, costs, in_raw, has_space)
        candidates.append(positions)
        before.append(links)
    chosen = costs.index(min(costs)) if costs else -1
    result: list[int] = []
    for positions, links in zip(reversed(candidates), reversed(before), strict=True):
        result.append(positions[chosen])
        chosen = links[chosen]
    return result[::-1]


def _step(
    positions: list[int], previous: list[int], costs: list[int], in_raw: list[int], has_space: bool
) -> tuple[list[int], list[int]]:
    """Return the cost of each place of a character, and the index of the best one before it.

    previous, costs: places of the character before, and their costs.
    has_space: white space stands between the two in the text.
    """
    new_costs, links = [], []
    best = read = 0  # index of the cheapest place among the first `read` ones
    for position in positions:
        while read < len(previous) and previous[read] < position:
            best = read if costs[read] < costs[best] else best
            read += 1
        cost, link = costs[best] + _REMOVED, best
        if previous[read - 1] == position - 1:
            had_space = in_raw[position] - in_raw[position - 1] > 1
            near = costs[read - 1] + (0 if had_space == has_space else _SPACE)
            if near <= cost:
                cost, link = near, read - 1
        new_costs.append(cost)
        links.append(link)
    return new_costs, links


def _add_white_space(new_index: list[int], text: str, raw: str) -> None:
    """Map white space of the text between the neighbors that it has in the completion: beside the
    one before it, else beside the one after it, else anywhere between them."""
    position_of = {target: position for position, target in enumerate(new_index) if target >= 0}
    after, next_mapped = [len(raw)] * len(text), len(raw)
    for target in range(len(text) - 1, -1, -1):
        after[target] = next_mapped
        next_mapped = position_of.get(target, next_mapped)
    before = -1
    for target, character in enumerate(text):
        if target not in position_of:
            between = raw[before + 1 : after[target]]
            if between.startswith(character):
                position = before + 1
            elif between.endswith(character):
                position = after[target] - 1
            elif character in between:
                position = before + 1 + between.index(character)
            else:
                continue
            new_index[position] = target
            position_of[target] = position
        before = position_of[target]
