"""The five rewards of role-play: plain functions with TRL's signature, and a table of them.

    trainer = GRPOTrainer(
        reward_funcs=[reward.function for reward in REWARDS],
        args=GRPOConfig(reward_weights=weights_of(cfg), ...), ...)

Each returns a number in [0, 1] for each completion, before its weight. Prompts and completions are
texts, or lists of messages; of a prompt the last user turn is used, of a text all of it. The rows'
columns are keyword arguments, each a list: `reference`, `player_name`, `character_name`,
`speech_level` (polite, plain, 존댓말, 반말, ...); None, or no such column: the row has no value. A
value that is no text or no known level, or a list of another length, is a UserError. `log_metric`
and `log_extra` are TRL's functions for a batch's stats and for columns of its table; without them
nothing is logged.

`configure` sets their configuration in this process. Without it they have defaults, and the two
that use embeddings take server and anchors from REWARD_EMBEDDING_URL and REWARD_CALIBRATION.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scorekit.config import nearest
from scorekit.errors import UserError
from trainer.roleplay import formulas
from trainer.roleplay.calibration import Use
from trainer.roleplay.formulas import ReplyContext, ReplyScore
from trainer.roleplay.reply import ParsedReply, message_text
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.similarity import Similarity, open_similarity
from trainer.roleplay.stated_facts import parse_level
from trainer.roleplay.turn import COLUMNS, RoleplayTurn, SpeechLevel
from trainer.runs.stats import StatSpec, mean_of

# -- the functions ---------------------------------------------------------------------------------


def reward_format(
    prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> list[float]:
    """Return the format reward: narration, then speech. Of the lines that are not blank:

    1.0   two lines: narration (a letter, no double quotation mark), then one closed pair of double
          quotation marks (straight or curly) that is the full line and is not empty
    0.6   the same two in the other order
    0.3   anything else with a line of narration, or with a closed pair: one part alone, text beside
          the pair in its line, other than two lines, a role marker anywhere (see reward_role_split)
    0     neither
    """
    return _reward("format", prompts, completions, columns)


def reward_role_split(
    prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> list[float]:
    """Return max(0, 1 - 0.45 * (kinds + acts)); 0 for a reply without a letter.

    kinds: number of kinds of role markers in the reply: system, user, assistant (`USER:`, in any
    case, with or without spaces between letters), role (`role:`), token (`<|im_start|`, `</s>`, the
    model's own special tokens as text).
    acts: 1 if the player's name is subject or topic of a finite clause of the narration, or begins
    a line with a colon; with `player_name_rule: literal`, if it comes before such a particle
    anywhere. Ignored if the player has the character's name.
    """
    return _reward("role_split", prompts, completions, columns)


def reward_grounded_to_user(
    prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> list[float]:
    """Return max(0, s - p); 0 if the user turn asks and s < 0.2.

    s: the cosine of the user turn and the full completion, between the anchors of `grounded`,
    linear, clipped to [0, 1]; 0 for a completion that cannot be embedded (blank, NUL, too long).
    p: 0.10 if `_ngram_overlap_ratio` > 0.70, 0.05 if it is > 0.55.
    With `reward.echo_guard` a reply that repeats the user turn and adds little gets 0.
    """
    return _reward("grounded", prompts, completions, columns)


def reward_character_consistency(
    prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> list[float]:
    """Return (name + speech) / 2.

    name: 1 if the narration has the character's name, else 0; 0.5 if the row has none.
    speech: the share of sentences at the row's level, among spoken sentences with a level; 0
    without any, or without speech; 0.5 if the row has no level.
    """
    return _reward("character", prompts, completions, columns)


def reward_reference_alignment(
    prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> list[float]:
    """Return the scaled cosine of completion and reference.

    It is scaled between the anchors of `reference`, linear, clipped to [0, 1]; 0 for a completion
    that cannot be embedded, 0.5 if the row has no reference.
    """
    return _reward("reference", prompts, completions, columns)


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, its weight, and the stats that explain it (means of a batch)."""

    function: Callable[..., list[float]]
    weight: float
    title: str
    components: tuple[StatSpec, ...]

    @property
    def name(self) -> str:
        """Return the function's name, which TRL uses in its logs."""
        return self.function.__name__

    @property
    def short(self) -> str:
        """Return the prefix of the keys of its components."""
        return self.components[0].key.partition("/")[0]


#: Functions and weights in one table, so that their order cannot differ.
REWARDS: tuple[Reward, ...] = (
    Reward(reward_format, 0.28, "format", formulas.FORMAT_STATS),
    Reward(reward_role_split, 0.18, "role split", formulas.ROLE_STATS),
    Reward(reward_grounded_to_user, 0.14, "grounded to the user", formulas.GROUNDED_STATS),
    Reward(reward_character_consistency, 0.16, "character", formulas.CHARACTER_STATS),
    Reward(reward_reference_alignment, 0.24, "reference", formulas.REFERENCE_STATS),
)


def weights_of(cfg: RewardConfig) -> list[float]:
    """Return a weight for each of REWARDS, in its order.

    Raises UserError for an unknown name, a negative number, or if all weights are 0.
    """
    names = {reward.name: reward.name for reward in REWARDS}
    for name, weight in cfg.weights.items():
        if name not in names:
            suggestion = nearest(name, names)
            hint = (
                f" (did you mean {suggestion}?)"
                if suggestion
                else f". Choose from {', '.join(names)}"
            )
            raise UserError(f"reward.weights: unknown function {name!r}{hint}")
        if weight < 0:
            raise UserError(f"reward.weights.{name}: {weight} is negative")
    weights = [cfg.weights.get(reward.name, reward.weight) for reward in REWARDS]
    if not any(weights):
        raise UserError("reward.weights: all weights are 0. Set one of them above 0")
    return weights


# -- configuration ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    cfg: RewardConfig
    similarity: Similarity | None
    special: frozenset[str]


_setting: _Setting | None = None


def configure(
    cfg: RewardConfig, similarity: Similarity | None, special_tokens: Iterable[str] = ()
) -> None:
    """Set the configuration of the functions in this process.

    special_tokens: of the policy's tokenizer; no reply may have them as text.
    """
    global _setting
    weights_of(cfg)
    if isinstance(special_tokens, str):
        raise UserError(
            "special_tokens: expected a list of tokens, not a text. Put it into a list."
        )
    _setting = _Setting(cfg, similarity, formulas.special_texts(special_tokens))


def _active_setting() -> _Setting:
    return _setting or _Setting(RewardConfig(), None, frozenset())


@cache
def _from_environment(pid: int) -> Similarity:
    """Return the similarity of the environment variables. Raises UserError if one is not set.

    pid: part of the cache key, because a client does not work in a forked process.
    """
    url, path = os.environ.get("REWARD_EMBEDDING_URL"), os.environ.get("REWARD_CALIBRATION")
    if not url or not path:
        raise UserError(
            "no embedding server. Call configure, or set REWARD_EMBEDDING_URL to its address and "
            "REWARD_CALIBRATION to a calibration.json (trainer roleplay calibrate)"
        )
    return open_similarity(RewardConfig(embedding_model=url, calibration=Path(path)), None, None)


# -- from rows to numbers --------------------------------------------------------------------------


def explain(turn: RoleplayTurn, completion: str) -> dict[str, ReplyScore]:
    """Return the score of each function for one reply, with reasons; by the function's name."""
    return explain_all([turn], [completion])[0]


def explain_all(
    turns: Sequence[RoleplayTurn], completions: Sequence[str]
) -> list[dict[str, ReplyScore]]:
    """Return the scores of `explain` for many replies, with the requests of one batch."""
    columns = {name: [getattr(turn, name) for turn in turns] for name in COLUMNS}
    contexts = _read([turn.user_turn for turn in turns], completions, columns)
    by_function = {reward.name: _score(reward.short, contexts) for reward in REWARDS}
    return [{name: scored[k] for name, scored in by_function.items()} for k in range(len(contexts))]


def total(scored: Mapping[str, ReplyScore], cfg: RewardConfig | None = None) -> float:
    """Return the weighted sum of the scores of `explain`, which is the policy's reward."""
    weights = weights_of(cfg or _active_setting().cfg)
    return sum(
        weight * scored[reward.name].value for reward, weight in zip(REWARDS, weights, strict=True)
    )


def _reward(
    short: str, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> list[float]:
    """Return the values; send the mean of each component to `log_metric`, reasons to
    `log_extra`."""
    scored = _score(short, _read(prompts, completions, columns))
    reward = next(reward for reward in REWARDS if reward.short == short)
    if log_metric := columns.get("log_metric"):
        for stat in reward.components:
            values = [s.components[stat.key] for s in scored if stat.key in s.components]
            if values:
                log_metric(stat.key, mean_of(values))
    if log_extra := columns.get("log_extra"):
        log_extra(f"{short}/why", ["; ".join(score.reasons) for score in scored])
    return [score.value for score in scored]


def _read(prompts: Any, completions: Any, columns: Mapping[str, Any]) -> list[ReplyContext]:
    """Return the replies with their rows. Raises UserError for invalid values."""
    return read_replies(prompts, completions, columns, _active_setting().cfg.corner_quotes)


def _score(short: str, contexts: Sequence[ReplyContext]) -> list[ReplyScore]:
    setting = _active_setting()
    if short == "format":
        return [formulas.score_form(context, setting.special) for context in contexts]
    if short == "role_split":
        return [
            formulas.score_roles(context, setting.cfg.player_name_rule, setting.special)
            for context in contexts
        ]
    if short == "character":
        return [formulas.score_character(context) for context in contexts]
    use: Use = "grounded" if short == "grounded" else "reference"
    similarities = _similarities(use, contexts)
    pairs = list(zip(contexts, similarities, strict=True))
    if use == "reference":
        return [formulas.score_reference(reply, *cosines) for reply, cosines in pairs]
    guard = setting.cfg.echo_guard
    return [formulas.score_grounding(reply, *cosines, guard) for reply, cosines in pairs]


def _similarities(
    use: Use, contexts: Sequence[ReplyContext]
) -> list[tuple[float | None, float | None]]:
    """Return similarities, raw and between the anchors.

    The texts of both functions are embedded in the same requests.
    """
    if not contexts:
        return []
    extra_texts = {
        text for context in contexts for text in (context.user_turn, context.reference or "")
    }
    similarity = _active_setting().similarity or _from_environment(os.getpid())
    pairs = [
        (
            context.user_turn if use == "grounded" else context.reference or "",
            context.reply.raw_text,
        )
        for context in contexts
    ]
    return [(raw, similarity.score(use, raw)) for raw in similarity.cosines(pairs, extra_texts)]


# -- the arguments of the functions ----------------------------------------------------------------
#
# An invalid value would be scored like a wrong reply, without an error: so each error names the
# argument and the row.


def read_replies(
    prompts: Any, completions: Any, columns: Mapping[str, Any], corner_quotes: bool
) -> list[ReplyContext]:
    """Return one reply for each completion, with what its row says.

    prompts, completions: texts or lists of messages.
    columns: a value or None for each of `COLUMNS`, one per completion; a missing column is all
    None.
    Raises UserError.
    """
    replies = _entries("completions", completions, None)
    turns = _entries("prompts", prompts, len(replies))
    nothing = [None] * len(replies)
    values = {
        name: nothing if columns.get(name) is None else _entries(name, columns[name], len(replies))
        for name in COLUMNS
    }
    texts = {
        name: [_optional(f"{name}[{k}]", v) for k, v in enumerate(values[name])] for name in values
    }
    return [
        ReplyContext(
            ParsedReply(_checked_text(f"completions[{index}]", reply), corner_quotes),
            _user_turn(f"prompts[{index}]", turns[index]),
            texts["reference"][index],
            texts["player_name"][index],
            texts["character_name"][index],
            _level(f"speech_level[{index}]", texts["speech_level"][index]),
        )
        for index, reply in enumerate(replies)
    ]


def _level(name: str, text: str | None) -> SpeechLevel | None:
    """Return the level that a text names; None if it is blank. Raises UserError."""
    return parse_level(name, text) if text and text.strip() else None


def _entries(name: str, values: Any, count: int | None) -> list[Any]:
    """Return the entries of a list.

    count: how many there must be; None: any number.
    """
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        raise UserError(
            f"{name}: expected a list with an entry for each completion, not {_kind(values)}. "
            "Put it into a list."
        )
    entries = list(values)
    if count is not None and len(entries) != count:
        raise UserError(
            f"{name}: {len(entries)} entries for {count} completions. Give one for each."
        )
    return entries


def _optional(name: str, value: Any) -> str | None:
    """Return a text, or None."""
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"{name}: expected a text or None, not {_kind(value)}. Correct the column.")


def _checked_text(name: str, message: Any) -> str:
    """Return the text of a prompt or completion."""
    if not isinstance(message, str):
        _check_messages(name, message)
    return message_text(message)


def _user_turn(name: str, prompt: Any) -> str:
    """Return the last user turn of a prompt; a text as it is."""
    if isinstance(prompt, str):
        return prompt
    _check_messages(name, prompt)
    turns = [turn for turn in prompt if turn.get("role") == "user"]
    return message_text(turns[-1:] or prompt)


def _check_messages(name: str, messages: Any) -> None:
    """Raise UserError if these are no messages with texts, lists of parts or nothing as content."""
    is_list = isinstance(messages, list | tuple)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise UserError(
            f"{name}: expected a text or a list of messages, not {_kind(messages)}. "
            'A message is {"role": ..., "content": ...}.'
        )
    for message in messages:
        content = message.get("content")
        if not (content is None or isinstance(content, str) or _are_parts(content)):
            raise UserError(
                f"{name}: expected a text as content, not {_kind(content)}. Correct the message."
            )


def _are_parts(content: Any) -> bool:
    """Return whether a content is a list of parts, each with a text or without."""
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text") or "", str) for part in content
    )


def _kind(value: Any) -> str:
    """Return what a value is, in words."""
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
