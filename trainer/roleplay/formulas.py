"""The formulas of the five rewards: from one reply, with the fields of its row, to a score with
reasons.

`rewards.py` has the functions that a trainer calls, with their definitions in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from scorekit.numeric import above, below
from scorekit.text.markup import normalized
from trainer.roleplay.korean.acting import acts, has_particle
from trainer.roleplay.korean.names import aliases, find_name
from trainer.roleplay.korean.questions import asks
from trainer.roleplay.korean.speech import count, levels
from trainer.roleplay.reply import ParsedReply, has_letter, readable
from trainer.roleplay.turn import SpeechLevel
from trainer.runs.stats import StatSpec


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """One reply with the fields of its row; None if the row has no value."""

    reply: ParsedReply
    user_turn: str
    reference: str | None = None
    player_name: str | None = None
    character_name: str | None = None
    speech_level: SpeechLevel | None = None


@dataclass(frozen=True, slots=True)
class ReplyScore:
    """A value in [0, 1] before its weight.

    components: by the keys of the reward's stats, those that are defined for this reply.
    reasons: why the value is not 1, in words.
    """

    value: float
    components: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


#: The score without the field of the row that it needs.
_NEUTRAL = 0.5


# -- format: a line of narration, then a line of speech --------------------------------------------


FORMAT_STATS = (
    StatSpec(key="format/two_lines", title="two lines", better="higher"),
    StatSpec(key="format/narration", title="a line of narration", better="higher"),
    StatSpec(key="format/quote", title="a line that is a quotation", better="higher"),
    StatSpec(key="format/in_order", title="narration first", better="higher"),
    StatSpec(key="format/text_beside_quote", title="text beside a quotation", better="lower"),
    StatSpec(key="format/role_marker", title="a role marker", better="lower"),
)
_SWAPPED, _ONE_PART = 0.6, 0.3


def score_form(context: ReplyContext, special: frozenset[str]) -> ReplyScore:
    """Return the score of `reward_format`."""
    reply = context.reply
    has_two_lines = len(reply.lines) == 2 and not reply.too_long
    has_narration, has_quote = "narration" in reply.kinds, "quote" in reply.kinds
    is_ordered = (
        has_narration and has_quote and reply.kinds.index("narration") < reply.kinds.index("quote")
    )
    has_marker = bool(marker_kinds(context, special))
    if has_two_lines and has_narration and has_quote and not has_marker:
        value = 1.0 if is_ordered else _SWAPPED
    else:
        value = _ONE_PART if has_narration or reply.spoken else 0.0
    components = {
        "format/two_lines": float(has_two_lines),
        "format/narration": float(has_narration),
        "format/quote": float(has_quote),
        "format/in_order": float(is_ordered),
        # a line with speech has other text, too
        "format/text_beside_quote": float(len(reply.spoken) > reply.kinds.count("quote")),
        "format/role_marker": float(has_marker),
    }
    return ReplyScore(value, components, () if value == 1.0 else _reasons(reply, components))


def _reasons(reply: ParsedReply, components: dict[str, float]) -> tuple[str, ...]:
    if not reply.lines:
        return ("it is empty",)
    reasons = []
    if not components["format/two_lines"]:
        lines = len(reply.lines)
        reasons.append("it is very long" if reply.too_long else f"lines: {lines}, not 2")
    if not components["format/narration"]:
        reasons.append("no line of narration without quotation marks")
    if not components["format/quote"]:
        reasons.append("no line that is one closed pair of double quotation marks")
    if components["format/text_beside_quote"]:
        reasons.append("text beside the quotation in its line")
    if components["format/role_marker"]:
        reasons.append("a role marker")
    if not reasons:
        reasons.append("the quotation stands before the narration")
    return tuple(reasons)


# -- role split: no chat markers in the reply, and no actions of the player ------------------------


ROLE_STATS = (
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


def _pattern_of_words(words: str) -> str:
    return "|".join(r"\s?".join(word) for word in words.split())


def _speaker(anywhere: str, at_start: str) -> re.Pattern[str]:
    free = rf"(?<![a-z0-9_@#/])(?:{_pattern_of_words(anywhere)}){_COLON}(?!//)"
    lead = rf"|{_LEAD}(?:{_pattern_of_words(at_start)}){_COLON}" if at_start else ""
    return re.compile(free + lead, re.MULTILINE)


_MARKERS = {kind: _speaker(*words) for kind, words in _SPEAKERS.items()} | {"token": _TOKENS}


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


def special_texts(tokens: Iterable[str]) -> frozenset[str]:
    """Return the special tokens that no reply may have as text; those that are words are left out.

    tokens: a tokenizer's `all_special_tokens` or `added_tokens_decoder`.
    """
    folded = (_fold(token).strip() for token in tokens)
    return frozenset(text for text in folded if len(text) > 2 and not text.isalnum())


def marker_kinds(context: ReplyContext, special: frozenset[str]) -> tuple[str, ...]:
    """Return the kinds of role markers in a reply: system, user, assistant, role, token.

    special: `special_texts`.
    """
    return _kinds(_fold(context.reply.text), special)


@lru_cache(maxsize=1024)
def _kinds(text: str, special: frozenset[str]) -> tuple[str, ...]:
    kinds = [kind for kind, pattern in _MARKERS.items() if pattern.search(text)]
    if "token" not in kinds and any(token in text for token in special):
        kinds.append("token")
    return tuple(kinds)


def _fold(text: str) -> str:
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


# -- grounded to the user: a cosine, minus penalties for missed questions and copying --------------


GROUNDED_STATS = (
    StatSpec(key="grounded/cosine", title="cosine to the user turn"),
    StatSpec(key="grounded/similarity", title="similarity to the user turn", better="higher"),
    StatSpec(key="grounded/question_missed", title="questions missed", better="lower"),
    StatSpec(key="grounded/repeats_user", title="user's words repeated", better="lower"),
    StatSpec(
        key="grounded/echo",
        title="replies that echo the user",
        better="lower",
        column="echo",
        form="5.2f",
        in_console=True,
    ),
    StatSpec(key="grounded/not_embedded", title="replies not embedded", better="lower"),
)
#: With a lower similarity, a reply does not answer a question.
_FAR_FROM_QUESTION = 0.2
#: Share of the user turn that is repeated -> penalty; the first exceeded one counts.
_REPEATED = ((0.70, 0.10), (0.55, 0.05))
#: A reply is an echo if its spoken text and the user turn share more than this part of both their
#: letter trigrams.
_ECHOED = 0.55
_SHORT = 10  # letters of a user turn
_WORD = re.compile(r"[^\W_]+")


def score_grounding(
    context: ReplyContext, cosine: float | None, similarity: float | None, echo_guard: bool = False
) -> ReplyScore:
    """Return the score of `reward_grounded_to_user`.

    cosine, similarity: of user turn and completion, raw and between the anchors; None if the
    completion cannot be embedded.
    echo_guard: an echo of the user turn scores 0.
    """
    question = asks(readable(context.user_turn))
    repeated = _ngram_overlap_ratio(context.user_turn, context.reply.raw_text)
    is_repetition = is_echo(context)
    components = {
        "grounded/repeats_user": repeated,
        "grounded/echo": float(is_repetition),
        "grounded/not_embedded": float(cosine is None),
    }
    reasons = [] if cosine is not None else ["it cannot be embedded"]
    score = similarity or 0.0
    if question:
        components["grounded/question_missed"] = float(below(score, _FAR_FROM_QUESTION))
    if cosine is not None:
        components["grounded/cosine"] = cosine
    components["grounded/similarity"] = score
    if cosine is not None and score < 1.0:
        reasons.append(f"similarity to the user turn {score:.2f} (cosine {cosine:.2f})")
    if question and below(score, _FAR_FROM_QUESTION):
        reasons.append("the user turn asks, and this is far from it")
        return ReplyScore(0.0, components, tuple(reasons))
    if is_repetition and echo_guard:
        reasons.append("it echoes the user turn")
        return ReplyScore(0.0, components, tuple(reasons))
    penalty = next((penalty for share, penalty in _REPEATED if above(repeated, share)), 0.0)
    if penalty:
        reasons.append(f"{repeated:.0%} of the user turn is said after")
    return ReplyScore(max(0.0, score - penalty), components, tuple(reasons))


def _ngram_overlap_ratio(user_turn: str, completion: str) -> float:
    """Return the share of the user turn's word trigrams that the completion has.

    With fewer than three words, trigrams of letters without spaces are used; with fewer than three
    letters the share is 0. Letters of any case are equal. Particles stay: 민수가 and 민수는 are two
    words.
    """
    user_words, reply_words = _words(user_turn), _words(completion)
    if len(user_words) < 3:
        user_words, reply_words = list("".join(user_words)), list("".join(reply_words))
    grams = _trigrams(user_words)
    return len(grams & _trigrams(reply_words)) / len(grams) if grams else 0.0


def is_echo(context: ReplyContext) -> bool:
    """Return whether a reply repeats the user turn, and adds little.

    More than `_ECHOED` of the letter trigrams of both are shared. Without a quotation the full
    reply is used.

    Two repetitions are no echo, because they are normal in a dialogue: a turn of fewer than
    `_SHORT` letters (a greeting), and a question that is answered in its own words ("네, 오늘 학교
    갔어요.").
    """
    reply = context.reply.quote or context.reply.text
    user, spoken = _words(context.user_turn), _words(reply)
    if len("".join(user)) < _SHORT or (set(spoken) - set(user) and _answers(context, reply)):
        return False
    user_trigrams, reply_trigrams = _trigrams(list("".join(user))), _trigrams(list("".join(spoken)))
    shared = len(user_trigrams & reply_trigrams)
    return bool(shared) and above(shared / max(len(user_trigrams), len(reply_trigrams)), _ECHOED)


def _answers(context: ReplyContext, reply: str) -> bool:
    return asks(readable(context.user_turn)) and not asks(readable(reply))


def _words(text: str) -> list[str]:
    return _WORD.findall(normalized("NFC", readable(text)).casefold())


def _trigrams(parts: list[str]) -> set[tuple[str, ...]]:
    return set(zip(parts, parts[1:], parts[2:], strict=False))


# -- character: the name in the narration, and the speech level ------------------------------------


CHARACTER_STATS = (
    StatSpec(key="character/name", title="character named", better="higher"),
    StatSpec(key="character/speech", title="sentences at the level", better="higher"),
    StatSpec(key="character/no_quote", title="nothing said aloud", better="lower"),
    StatSpec(key="character/undecided_sentences", title="sentences of no level", better="lower"),
)


def score_character(context: ReplyContext) -> ReplyScore:
    """Return the score of `reward_character_consistency`."""
    name, name_reason = _name(context)
    speech, components, speech_reason = _speech(context)
    if context.character_name:
        components["character/name"] = name
    reasons = tuple(reason for reason in (name_reason, speech_reason) if reason)
    return ReplyScore((name + speech) / 2, components, reasons)


def _name(context: ReplyContext) -> tuple[float, str]:
    if not context.character_name:
        return _NEUTRAL, "the row has no name of the character"
    if find_name(context.reply.narration, context.character_name, context.player_name):
        return 1.0, ""
    return 0.0, "the narration does not name the character"


def _speech(context: ReplyContext) -> tuple[float, dict[str, float], str]:
    if not context.speech_level:
        return _NEUTRAL, {}, "the row has no speech level"
    quote = context.reply.quote
    if not quote:
        return 0.0, {"character/speech": 0.0, "character/no_quote": 1.0}, "nothing is said aloud"
    if not has_letter(quote):
        return (
            0.0,
            {"character/speech": 0.0, "character/no_quote": 0.0},
            "the quotation is only marks",
        )
    names = (context.character_name, context.player_name)
    spans = sorted({span for name in names for span in find_name(quote, name)})
    disjoint_spans = [span for k, span in enumerate(spans) if k == 0 or span[0] >= spans[k - 1][1]]
    speech_count = count(levels(quote, disjoint_spans), context.speech_level)
    components = {
        "character/speech": speech_count.share,
        "character/no_quote": 0.0,
        "character/undecided_sentences": float(speech_count.undecided),
    }
    reason = ""
    if not speech_count.right + speech_count.wrong:
        reason = "no sentence of the quotation shows a speech level"
    elif speech_count.wrong:
        num_with_level = speech_count.right + speech_count.wrong
        reason = (
            f"{speech_count.wrong} of {num_with_level} sentences are not {context.speech_level}"
        )
    return speech_count.share, components, reason


# -- reference: a cosine ---------------------------------------------------------------------------


REFERENCE_STATS = (
    StatSpec(key="reference/cosine", title="cosine to the reference"),
    StatSpec(key="reference/similarity", title="similarity to the reference", better="higher"),
    StatSpec(key="reference/missing", title="rows without reference", better="lower"),
    StatSpec(key="reference/not_embedded", title="replies not embedded", better="lower"),
)


def score_reference(
    context: ReplyContext, cosine: float | None, similarity: float | None
) -> ReplyScore:
    """Return the score of `reward_reference_alignment`; the arguments are those of
    `score_grounding`."""
    if not context.reference or not context.reference.strip():
        return ReplyScore(_NEUTRAL, {"reference/missing": 1.0}, ("the row has no reference",))
    score = similarity or 0.0
    components = {
        "reference/missing": 0.0,
        "reference/not_embedded": float(cosine is None),
        "reference/similarity": score,
    }
    if cosine is None:
        return ReplyScore(0.0, components, ("it cannot be embedded",))
    components["reference/cosine"] = cosine
    reasons = (f"similarity to the reference {score:.2f} (cosine {cosine:.2f})",)
    return ReplyScore(score, components, () if score >= 1.0 else reasons)
