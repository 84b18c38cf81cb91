"""Check whether an episode may be a training example.

The policy's turns must be a valid search and must not imitate text of the environment. Texts are
normalized first, so that odd spellings cannot hide a word from a pattern.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator
from typing import Final, Literal
from urllib.parse import unquote

from scorekit.text.chat_marks import role_token
from scorekit.text.markup import normalized
from trainer.search.records import Trajectory
from trainer.search.rollout.actions import ANSWER, SPELLING, THINK

#: The reasons why an episode is not an example.
RejectionReason = Literal[
    "no valid turn", "an invented observation", "text behind an action", "a tag in a thought"
]

_ROUNDS = 4  # &amp;lt;


_ESCAPE = re.compile(
    r"(?<!\\)\\++(?:u([0-9a-f]{4})|u\{([0-9a-f]{1,6})\}|x([0-9a-f]{2}))", re.IGNORECASE
)


#: Letters of other scripts that look like Latin ones, and what looks like `<`, `>`, `/` and `_`;
#: full-width and mathematical forms are NFKC's.
_LOOKALIKES: Final = {
    "a": "аɑαᴀ",
    "b": "ьƅвʙ",
    "c": "сϲᴄ",
    "e": "еҽεᴇ",
    "h": "һнʜ",
    "i": "іıιɪ",
    "k": "кκᴋ",
    "l": "ӏʟǀ",
    "m": "мᴍ",
    "n": "пηոɴ",
    "o": "оοօσᴏ",
    "p": "рρᴘ",
    "r": "гᴦʀ",
    "s": "ѕꜱ",
    "t": "тτᴛ",
    "w": "ԝωᴡ",
    "x": "хχ×",
    "<": "‹〈⟨❮❰˂ᐸ≺⧼⟪《«",
    ">": "›〉⟩❯❱˃ᐳ≻⧽⟫》»",
    "/": "⁄∕⧸╱",
    "_": "ˍ⎯",
}


_LATIN: Final = str.maketrans({odd: plain for plain, odds in _LOOKALIKES.items() for odd in odds})


#: Written as nothing: format characters, variation selectors, fillers, marks over a letter.
_UNSEEN: Final = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\ufe00-\ufe0f]")


def plain(text: str) -> str:
    """Return a text for pattern matching.

    It is casefolded, with lookalike letters as Latin ones and entities and escapes decoded, and
    without marks over letters and invisible characters.
    """
    for _ in range(_ROUNDS):
        decoded = unquote(_ESCAPE.sub(_character, html.unescape(text)))
        if decoded == text:
            break
        text = decoded
    letters = normalized("NFKD", text).casefold().translate(_LATIN)
    visible = (
        c for c in letters if unicodedata.category(c) not in ("Cf", "Mn", "Cc") or c in "\n\t\r"
    )
    return normalized("NFC", _UNSEEN.sub("", "".join(visible)))


def _character(escape: re.Match[str]) -> str:
    code = int(escape[1] or escape[2] or escape[3], 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else escape[0]


_OPEN, _CLOSE = f"<{THINK}>", f"</{THINK}>"


def _pattern_of_name(name: str) -> str:
    return r"[\s_.\-]*+".join(map(re.escape, name.replace("_", "")))


_NAMES = "|".join(_pattern_of_name(name) for name in sorted((*SPELLING, ANSWER, THINK), key=len))


#: A tag of an action, or its beginning, in a text from `plain`.
_TAG = re.compile(rf"<[\s/\\]*+(?:{_NAMES})|[\[{{][\s/\\]*+(?:{_NAMES})\s*+[\]}}]")


_TAGS = re.compile(rf"</?(?:{'|'.join((THINK, *SPELLING))})>")


_BEHIND = re.compile(rf"</(?:{'|'.join(SPELLING)})>\s*+(?=\S)")


#: Text that only the environment writes, in the form of `plain`: marks of messages, tools and
#: images, and its sentences, each on a line (`rollout/prompt.py`, `images/views.py`).
_MARKS: Final = (
    r"<[|｜]|[|｜]>",
    r"<\s*+(?:/\s*+)?(?:image|img|picture|photo|video|page|crop|observation|obs|tool|result|information"
    r"|document|output|response|context|system|user|assistant|human|vision)s?(?:[\s_:-][^<>]{0,80})?"
    r"/?\s*+>",
    r"\[\s*+(?:/\s*+)?(?:image|img|picture|photo|screenshot|page|crop|observation)s?\s*+[\d#:]*+\s*+\]",
    r"\[\s*+system\s*+error",
    r"!\[[^\]\n]{0,200}\]\(|data:image/",
    r"^[^\w\n]*+(?:observations?|tool(?: (?:results?|outputs?|responses?))?|search results?"
    r"|retrieved(?: pages?)?|environment|system(?: error| message)?|user|assistant|관찰|관측"
    r"|검색\s?결과|도구(?:\s?(?:결과|응답))?|환경|시스템(?:\s?오류)?|사용자)\W{0,3}:",
)


_SENTENCES: Final = (
    r"^[^\S\n]*+no action was taken:",
    r"^[^\S\n]*+nothing was shown yet: search",
    r"^[^\S\n]*+boxes are in (?:pixels|thousandths|shares)\b",
    r"^[^\S\n]*+no page was found for this query",
    r"^[^\S\n]*+the (?:\d+ pages|one page) found for this query w",
    r"^[^\S\n]*+\d+ turns? left\.[^\S\n]*+$",
    r"^[^\S\n]*+(?:a part of )?page \S+"
    r"(?:\.|, (?:rank \d+ of \d+|\d+ wide and \d+ high)\b.*\.)[^\S\n]*+$",
    r"^[^\S\n]*+rank \d+ of \d+(?:, \d+ wide and \d+ high)?\.[^\S\n]*+$",
    r"^[^\S\n]*+\d+ wide and \d+ high\.[^\S\n]*+$",
    r"^[^\S\n]*+\[[\d.]+(?:\s*,\s*[\d.]+){3}\][ \t]+\S",
    r"^[^\S\n]*+\(\d+ more lines?\)[^\S\n]*+$",
)


_ENVIRONMENT = re.compile("|".join((*_MARKS, *_SENTENCES)), re.MULTILINE)


def target_error(trajectory: Trajectory) -> RejectionReason | None:
    """Return why an episode is not an example, or None.

    Invalid and forced turns are not checked, because they get no loss. A tag in a thought counts in
    any turn of the policy, because it is in the context.
    """
    turns = [turn for turn in trajectory.turns if not turn.forced and turn.action != "invalid"]
    if not turns:
        return "no valid turn"
    texts = (turn.text for turn in trajectory.turns if not turn.forced)
    if any(has_tag(thought) for text in texts for thought in thoughts(text, unclosed=True)):
        return "a tag in a thought"
    if any(invented(turn.text) is not None for turn in turns):
        return "an invented observation"
    return "text behind an action" if any(_BEHIND.search(turn.text) for turn in turns) else None


def repeated(trajectory: Trajectory) -> list[int]:
    """Return the policy's turns, from 0, whose query equals that of the search before."""
    turn_numbers, last = [], None
    for number, turn in enumerate(turn for turn in trajectory.turns if not turn.forced):
        if turn.query is None or turn.action != "search":
            continue
        query = " ".join(plain(turn.query).split())
        if query == last:
            turn_numbers.append(number)
        last = query
    return turn_numbers


def invented(text: str) -> str | None:
    """Return the first part of a turn that imitates the environment, or None.

    For example a message, a tool's answer, or an image mark.
    """
    text_only = _TAGS.sub("\n", text)
    if match := _ENVIRONMENT.search(plain(text_only)):
        return match.group().strip()
    return role_token("", text_only)


def thoughts(text: str, *, unclosed: bool = False) -> list[str]:
    """Return the texts in the think blocks of a turn.

    unclosed: also of an unclosed block.
    """
    texts = [text[start:end] for start, end in thought_spans(text)]
    unclosed_text = text[text.rfind(_CLOSE) + 1 :].partition(_OPEN)[2] if unclosed else ""
    return [*texts, unclosed_text] if unclosed_text else texts


def thought_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each thought in a turn."""
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            return
        yield start, end
        position = end + len(_CLOSE)


def has_tag(thought: str) -> bool:
    """Return whether a thought has a tag of an action, an answer or a think block.

    Odd spellings count: other case or blanks, entities, escapes, and lookalike characters.
    """
    return _TAG.search(plain(thought)) is not None
