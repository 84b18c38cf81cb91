"""The five rewards of a role-play: plain functions with TRL's signature, and the one table of them.

    trainer = GRPOTrainer(
        reward_funcs=[reward.function for reward in REWARDS],
        args=GRPOConfig(reward_weights=weights_of(cfg), ...), ...)

Each gives a number in [0, 1] for each completion, before its weight. Prompts and completions are
texts, or lists of messages; of a prompt the last user turn is read, of a text all of it. The rows'
columns come by keyword, each a list: `reference`, `player_name`, `character_name`, `speech_level`
(polite, plain, 존댓말, 반말, ...); None, or no such column: the row does not tell. A value that
is no text, no known level, or not one for each completion, is a UserError.

`configure` says what they are asked with in this process. Without it they have their defaults, and
the two that embed take server and anchors from REWARD_EMBEDDING_URL and REWARD_CALIBRATION.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scorekit.config import nearest
from scorekit.errors import UserError
from trainer.roleplay.calibration.anchors import Use
from trainer.roleplay.formulas import character, form, grounding, roles
from trainer.roleplay.formulas.inputs import COLUMNS, read_replies
from trainer.roleplay.formulas.roles import NO_TOKENS, SpecialTokens
from trainer.roleplay.formulas.scored import AskedReply, ReplyScore
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.similarity import Similarity, open_similarity
from trainer.roleplay.turn import RoleplayTurn
from trainer.runs.figures import Figure, mean_of

LogMetric = Callable[[str, float], Any]
LogExtra = Callable[[str, list[Any]], Any]


# -- the functions ---------------------------------------------------------------------------------


def reward_format(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    **columns: Any,
) -> list[float]:
    """Narration, then speech. Of the lines that are not blank:

    1.0   two lines: narration (a letter, no double quotation mark), then one closed pair of double
          quotation marks (straight or curly) that is the whole line and is not empty
    0.6   the same two in the other order
    0.3   anything else with a line of narration, or with a closed pair: one part alone, text beside
          the pair in its line, other than two lines, a role marker anywhere (see reward_role_split)
    0     neither
    """
    return _rewarded("format", prompts, completions, columns, log_metric, log_extra)


def reward_role_split(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    **columns: Any,
) -> list[float]:
    """max(0, 1 - 0.45 * (kinds + acts)); 0 for a reply without a letter.

    kinds: how many kinds of role markers the reply has: system, user, assistant (`USER:`, in any
    case, letters apart or not), role (`role:`), token (`<|im_start|`, `</s>`, the model's own
    special tokens as text). acts: 1 where the player's name is subject or topic of a finite clause
    of the narration, or begins a line with a colon; with `player_name_rule: literal`, where it
    stands before such a particle anywhere. A player who has the character's name is not looked for.
    """
    return _rewarded("role_split", prompts, completions, columns, log_metric, log_extra)


def reward_grounded_to_user(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    **columns: Any,
) -> list[float]:
    """max(0, s - p), and 0 where the user turn asks and s < 0.2.

    s: the cosine of the user turn and the whole completion, between the anchors of `grounded`,
    linear, clipped to [0, 1]; 0 for a completion that cannot be embedded (blank, NUL, too long).
    p: 0.10 where `_ngram_overlap_ratio` > 0.70, 0.05 where it is > 0.55. With `reward.echo_guard` a
    reply that says the user turn again and little else has 0.
    """
    return _rewarded("grounded", prompts, completions, columns, log_metric, log_extra)


def reward_character_consistency(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    **columns: Any,
) -> list[float]:
    """(name + speech) / 2.

    name: 1 where the character's name stands in the narration, else 0; 0.5 where the row has none.
    speech: of the sentences said aloud whose level can be decided, the share at the row's level; 0
    where none can, or nothing is said aloud; 0.5 where the row has no level.
    """
    return _rewarded("character", prompts, completions, columns, log_metric, log_extra)


def reward_reference_alignment(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    log_metric: LogMetric | None = None,
    log_extra: LogExtra | None = None,
    **columns: Any,
) -> list[float]:
    """The cosine of completion and reference, between the anchors of `reference`, linear, clipped
    to [0, 1]; 0 for a completion that cannot be embedded, 0.5 where the row has no reference."""
    return _rewarded("reference", prompts, completions, columns, log_metric, log_extra)


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reward:
    """A function, its weight, and the figures that say why it is low (means of a batch)."""

    function: Callable[..., list[float]]
    weight: float
    title: str
    components: tuple[Figure, ...]

    @property
    def name(self) -> str:
        """The function's, under which TRL logs it."""
        return self.function.__name__

    @property
    def short(self) -> str:
        """What the keys of its components begin with."""
        return self.components[0].key.partition("/")[0]


#: Functions and weights together, so that their order cannot differ.
REWARDS: tuple[Reward, ...] = (
    Reward(reward_format, 0.28, "format", form.FIGURES),
    Reward(reward_role_split, 0.18, "role split", roles.FIGURES),
    Reward(reward_grounded_to_user, 0.14, "grounded to the user", grounding.GROUNDED_FIGURES),
    Reward(reward_character_consistency, 0.16, "character", character.FIGURES),
    Reward(reward_reference_alignment, 0.24, "reference", grounding.REFERENCE_FIGURES),
)


def weights_of(cfg: RewardConfig) -> list[float]:
    """A weight for each of REWARDS, in its order. Raises UserError for an unknown name, a negative
    number, or none that counts."""
    names = {reward.name: reward.name for reward in REWARDS}
    for name, weight in cfg.weights.items():
        if name not in names:
            meant = nearest(name, names)
            hint = f" (did you mean {meant}?)" if meant else f"; there are {', '.join(names)}"
            raise UserError(f"reward.weights: unknown function {name!r}{hint}")
        if weight < 0:
            raise UserError(f"reward.weights.{name}: {weight} is negative")
    weights = [cfg.weights.get(reward.name, reward.weight) for reward in REWARDS]
    if not any(weights):
        raise UserError("reward.weights: all are 0: nothing is rewarded")
    return weights


# -- what they are asked with ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    cfg: RewardConfig
    similarity: Similarity | None
    special: SpecialTokens


_setting: _Setting | None = None


def configure(
    cfg: RewardConfig, similarity: Similarity | None, special_tokens: Iterable[str] = ()
) -> None:
    """What the functions use in this process from now on. special_tokens: of the policy's
    tokenizer, which no reply may have as text."""
    global _setting
    weights_of(cfg)
    if isinstance(special_tokens, str):
        raise UserError(
            "special_tokens: expected a list of tokens, not a text. Put it into a list."
        )
    _setting = _Setting(cfg, similarity, SpecialTokens.of(special_tokens))


def _used() -> _Setting:
    return _setting or _Setting(RewardConfig(), None, NO_TOKENS)


def _similarity() -> Similarity:
    """Raises UserError if nothing says which server embeds, or by which anchors."""
    return _used().similarity or _from_environment(os.getpid())


@cache
def _from_environment(pid: int) -> Similarity:
    """pid: a client does not live on in a forked process."""
    url, path = os.environ.get("REWARD_EMBEDDING_URL"), os.environ.get("REWARD_CALIBRATION")
    if not url or not path:
        raise UserError(
            "no embedding server: call configure, or set REWARD_EMBEDDING_URL to its address and "
            "REWARD_CALIBRATION to a calibration.json (trainer roleplay calibrate)"
        )
    return open_similarity(RewardConfig(embedding_model=url, calibration=Path(path)), None, None)


# -- from rows to numbers --------------------------------------------------------------------------


def explain(turn: RoleplayTurn, completion: str) -> dict[str, ReplyScore]:
    """What each function says of one reply, and why; by the function's name."""
    return explain_all([turn], [completion])[0]


def explain_all(
    turns: Sequence[RoleplayTurn], completions: Sequence[str]
) -> list[dict[str, ReplyScore]]:
    """The same for many replies, with the requests of one batch."""
    columns = {name: [getattr(turn, name) for turn in turns] for name in COLUMNS}
    asked = _read([turn.user_turn for turn in turns], completions, columns)
    by_function = {reward.name: _score(reward.short, asked) for reward in REWARDS}
    return [{name: scored[k] for name, scored in by_function.items()} for k in range(len(asked))]


def total(scored: Mapping[str, ReplyScore], cfg: RewardConfig | None = None) -> float:
    """The weighted sum of what `explain` gives, which is the reward that the policy gets."""
    weights = weights_of(cfg or _used().cfg)
    return sum(
        weight * scored[reward.name].value for reward, weight in zip(REWARDS, weights, strict=True)
    )


def _rewarded(
    short: str,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Any],
    log_metric: LogMetric | None,
    log_extra: LogExtra | None,
) -> list[float]:
    """Values, with the mean of each component to `log_metric` and the reasons to `log_extra`."""
    scored = _score(short, _read(prompts, completions, columns))
    reward = next(reward for reward in REWARDS if reward.short == short)
    for figure in reward.components if log_metric else ():
        mean = mean_of(
            [one.components[figure.key] for one in scored if figure.key in one.components]
        )
        if mean is not None and log_metric:
            log_metric(figure.key, mean)
    if log_extra:
        log_extra(f"{short}/why", ["; ".join(one.reasons) for one in scored])
    return [one.value for one in scored]


def _read(prompts: Any, completions: Any, columns: Mapping[str, Any]) -> list[AskedReply]:
    """Return the replies with their rows. Raises UserError on what no function knows."""
    return read_replies(prompts, completions, columns, _used().cfg.corner_quotes)


def _score(short: str, asked: Sequence[AskedReply]) -> list[ReplyScore]:
    used = _used()
    if short == "format":
        return [form.score_form(one, used.special) for one in asked]
    if short == "role_split":
        return [roles.score_roles(one, used.cfg.player_name_rule, used.special) for one in asked]
    if short == "character":
        return [character.score_character(one) for one in asked]
    use: Use = "grounded" if short == "grounded" else "reference"
    found = _similarities(use, asked)
    pairs = list(zip(asked, found, strict=True))
    if use == "reference":
        return [grounding.score_reference(reply, *cosines) for reply, cosines in pairs]
    guard = used.cfg.echo_guard
    return [grounding.score_grounding(reply, *cosines, guard) for reply, cosines in pairs]


def _similarities(use: Use, asked: Sequence[AskedReply]) -> list[tuple[float | None, float | None]]:
    """Raw and between the anchors. The texts of both functions are asked about at once."""
    others = [one.user_turn if use == "grounded" else one.reference or "" for one in asked]
    beside = {text for one in asked for text in (one.user_turn, one.reference or "")}
    if not asked:
        return []
    similarity = _similarity()
    pairs = [(other, one.reply.given) for one, other in zip(asked, others, strict=True)]
    return [(raw, similarity.score(use, raw)) for raw in similarity.cosines(pairs, beside)]
