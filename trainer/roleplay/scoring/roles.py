"""The role-split reward: no chat markers in the reply, and no actions of the player."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from scorekit.text.markup import normalized
from trainer.roleplay.korean.acting import acts, has_particle
from trainer.roleplay.korean.names import aliases
from trainer.roleplay.reply import has_letter
from trainer.roleplay.scoring.types import ReplyContext, ReplyScore
from trainer.runs.stats import StatSpec

#: The components of this reward.
STATS = (
    StatSpec(key="role_split/markers", title="kinds of role markers", better="lower"),
    StatSpec(key="role_split/acts_for_player", title="acts for the player", better="lower"),
)
NameRule = Literal["subject", "literal"]
#: Penalty for each kind of marker, and for actions of the player.
_PENALTY = 0.45
#: Speakers of a chat. Words in Latin letters count anywhere, with or without spaces between letters
#: (U S E R :); those in Hangul, and short ones, only at the start of a line.
_SPEAKERS = {
    "system": ("system", "시스템"),
    "user": ("user human", "사용자 유저 플레이어"),
    "assistant": ("assistant", "어시스턴트 ai bot model 챗봇"),
    "role": ("role", ""),
}
_TOKENS = re.compile(
    r"<\s{0,3}[|｜][^<>\n]{0,60}|[|｜]\s{0,3}>"  # <|im_start|, <|eot_id|>, < | user | >
    r"|<\s{0,3}/?\s{0,3}(?:s|bos|eos|pad|unk|think|tool_call|tool_response|start_of_turn|end_of_turn|"
    r"start_of_image|unused\d+|seed:\w+|im_start|im_end|sys|inst)\s{0,3}>"
    r"|<<\s{0,3}/?\s{0,3}sys\s{0,3}>>|\[\s{0,3}/?\s{0,3}(?:inst|gmask|system|user|assistant|"
    r"시스템|사용자)\s{0,3}\]"
    r"|\[[|｜][^\[\]\n]{1,40}[|｜]\]"
    r"|^[ \t]{0,3}#{2,4}[ \t]{0,3}(?:response|instruction|input|system|user|human|assistant|"
    r"응답|지시|사용자)\b",
    re.MULTILINE,
)
#: Characters that may come before a speaker at the start of a line.
_LEAD = r"^[\s\"'“‘*#>\-\[({<]{0,8}"
_COLON = r"[\s\"'”’*\])}>]{0,4}[:：]"


def _spaced(words: str) -> str:
    return "|".join(r"\s?".join(word) for word in words.split())


def _speaker(anywhere: str, at_start: str) -> re.Pattern[str]:
    free = rf"(?<![a-z0-9_@#/])(?:{_spaced(anywhere)}){_COLON}(?!//)"
    lead = rf"|{_LEAD}(?:{_spaced(at_start)}){_COLON}" if at_start else ""
    return re.compile(free + lead, re.MULTILINE)


_MARKERS = {kind: _speaker(*words) for kind, words in _SPEAKERS.items()} | {"token": _TOKENS}


def special_texts(tokens: Iterable[str]) -> frozenset[str]:
    """Return the special tokens that no reply may have as text; those that are words are left out.

    tokens: a tokenizer's `all_special_tokens` or `added_tokens_decoder`.
    """
    folded = (_folded(token).strip() for token in tokens)
    return frozenset(text for text in folded if len(text) > 2 and not text.isalnum())


def marker_kinds(context: ReplyContext, special: frozenset[str]) -> tuple[str, ...]:
    """Return the kinds of role markers in a reply: system, user, assistant, role, token.

    special: `special_texts`.
    """
    return _kinds(_folded(context.reply.text), special)


@lru_cache(maxsize=1024)
def _kinds(text: str, special: frozenset[str]) -> tuple[str, ...]:
    kinds = [kind for kind, pattern in _MARKERS.items() if pattern.search(text)]
    if "token" not in kinds and any(token in text for token in special):
        kinds.append("token")
    return tuple(kinds)


def _folded(text: str) -> str:
    """Return the text without case, and with ordinary letters for wide ones (ＵＳＥＲ：)."""
    return normalized("NFKC", text).casefold()


def speaks_for(context: ReplyContext) -> bool:
    """Return whether a line begins with the player's name and a colon."""
    if not aliases(context.player_name or "") or context.player_name == context.character_name:
        return False
    return _label(context.player_name or "").search(context.reply.text) is not None


@lru_cache(maxsize=1024)
def _label(name: str) -> re.Pattern[str]:
    names = "|".join(map(re.escape, aliases(name)))
    return re.compile(rf"{_LEAD}(?:{names}){_COLON}", re.MULTILINE | re.IGNORECASE)


def score_roles(context: ReplyContext, rule: NameRule, special: frozenset[str]) -> ReplyScore:
    """Return the score of `reward_role_split`."""
    if not has_letter(context.reply.text):
        return ReplyScore(0.0, {}, ("it says nothing",))
    kinds = marker_kinds(context, special)
    player, character = context.player_name, context.character_name
    acts_for_player = speaks_for(context) or (
        acts(context.reply.narration, player, character)
        if rule == "subject"
        else has_particle(context.reply.text, player, character)
    )
    reasons = [f"a role marker: {kind}" for kind in kinds]
    if acts_for_player:
        reasons.append("it acts or speaks for the player")
    components = {"role_split/markers": float(len(kinds))}
    if player and player != character:
        components["role_split/acts_for_player"] = float(acts_for_player)
    value = max(0.0, 1.0 - _PENALTY * (len(kinds) + acts_for_player))
    return ReplyScore(value, components, tuple(reasons))
