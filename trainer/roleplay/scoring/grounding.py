"""The grounding rewards: from a cosine to a score, minus penalties for missed questions and
copying."""

from __future__ import annotations

import re

from scorekit.numeric import above, below
from scorekit.text.markup import normalized
from trainer.roleplay.korean.questions import asks
from trainer.roleplay.reply import readable
from trainer.roleplay.scoring.types import ReplyContext, ReplyScore
from trainer.runs.stats import StatSpec

#: The components of the two rewards.
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
REFERENCE_STATS = (
    StatSpec(key="reference/cosine", title="cosine to the reference"),
    StatSpec(key="reference/similarity", title="similarity to the reference", better="higher"),
    StatSpec(key="reference/missing", title="rows without reference", better="lower"),
    StatSpec(key="reference/not_embedded", title="replies not embedded", better="lower"),
)
#: With a lower similarity, a reply does not answer a question.
_FAR_FROM_QUESTION = 0.2
#: Share of the user turn that is repeated -> penalty; the first exceeded one counts.
_REPEATED = ((0.70, 0.10), (0.55, 0.05))
#: A reply is an echo if its spoken text and the user turn share more than this part of both their
#: letter trigrams.
_ECHOED = 0.55
_SHORT = 10  # letters of a user turn
_NEUTRAL = 0.5
_WORD = re.compile(r"[^\W_]+")


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
