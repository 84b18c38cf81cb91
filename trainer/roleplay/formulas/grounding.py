"""From a cosine to a score, and what takes from it: questions left alone, words said after."""

from __future__ import annotations

import re

from scorekit.numeric.thresholds import above, below
from scorekit.text.markup import normalised
from trainer.roleplay.formulas.scored import AskedReply, ReplyScore
from trainer.roleplay.korean.questions import asks
from trainer.roleplay.reply import readable
from trainer.runs.figures import Figure

#: Components of the two.
GROUNDED_FIGURES = (
    Figure(key="grounded/cosine", title="cosine to the user turn"),
    Figure(key="grounded/similarity", title="similarity to the user turn", better="higher"),
    Figure(key="grounded/question_missed", title="questions missed", better="lower"),
    Figure(key="grounded/repeats_user", title="user's words repeated", better="lower"),
    Figure(
        key="grounded/echo",
        title="replies that echo the user",
        better="lower",
        column="echo",
        form="5.2f",
        said=True,
    ),
    Figure(key="grounded/not_embedded", title="replies not embedded", better="lower"),
)
REFERENCE_FIGURES = (
    Figure(key="reference/cosine", title="cosine to the reference"),
    Figure(key="reference/similarity", title="similarity to the reference", better="higher"),
    Figure(key="reference/missing", title="rows without reference", better="lower"),
    Figure(key="reference/not_embedded", title="replies not embedded", better="lower"),
)
#: A question is not answered by a reply whose similarity is scored lower.
_FAR_FROM_QUESTION = 0.2
#: Share of the user turn that is said after -> what is taken away; the first that is exceeded.
_REPEATED = ((0.70, 0.10), (0.55, 0.05))
#: A reply is an echo if the trigrams of letters of what it says aloud and of the user turn share
#: more than this, of both.
_ECHOED = 0.55
_SHORT = 10  # letters of a user turn
_NEUTRAL = 0.5
_WORD = re.compile(r"[^\W_]+")


def _ngram_overlap_ratio(user_turn: str, completion: str) -> float:
    """Share of the user turn's word trigrams that the completion has; of its trigrams of letters,
    spaces left out, where it has fewer than three words; 0 where it has fewer than three letters.
    Letters of any case are equal. Particles stay: 민수가 and 민수는 are two words."""
    ours, theirs = _words(user_turn), _words(completion)
    if len(ours) < 3:
        ours, theirs = list("".join(ours)), list("".join(theirs))
    grams = _trigrams(ours)
    return len(grams & _trigrams(theirs)) / len(grams) if grams else 0.0


def is_echo(asked: AskedReply) -> bool:
    """Return whether a reply says the user turn again, and little else: of both, more than
    `_ECHOED` of the trigrams of letters are the other's. Without a quotation all of it is read.

    Two repetitions are no echo, since people talk like that: a turn of fewer than `_SHORT` letters
    (a greeting), and a question that is answered in its own words ("네, 오늘 학교 갔어요.")."""
    reply = asked.reply.quote or asked.reply.text
    user, spoken = _words(asked.user_turn), _words(reply)
    if len("".join(user)) < _SHORT or (set(spoken) - set(user) and _answers(asked, reply)):
        return False
    theirs, ours = _trigrams(list("".join(user))), _trigrams(list("".join(spoken)))
    shared = len(theirs & ours)
    return bool(shared) and above(shared / max(len(theirs), len(ours)), _ECHOED)


def _answers(asked: AskedReply, reply: str) -> bool:
    return asks(readable(asked.user_turn)) and not asks(readable(reply))


def _words(text: str) -> list[str]:
    return _WORD.findall(normalised("NFC", readable(text)).casefold())


def _trigrams(parts: list[str]) -> set[tuple[str, ...]]:
    return set(zip(parts, parts[1:], parts[2:], strict=False))


def score_grounding(
    asked: AskedReply, cosine: float | None, similarity: float | None, echo_guard: bool = False
) -> ReplyScore:
    """Return the score of `reward_grounded_to_user`.

    cosine, similarity: of user turn and completion, raw and between the anchors; None where the
    completion cannot be embedded. echo_guard: an echo of the user turn scores 0.
    """
    question = asks(readable(asked.user_turn))
    repeated = _ngram_overlap_ratio(asked.user_turn, asked.reply.given)
    echoes = is_echo(asked)
    components = {
        "grounded/repeats_user": repeated,
        "grounded/echo": float(echoes),
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
    if echoes and echo_guard:
        reasons.append("it echoes the user turn")
        return ReplyScore(0.0, components, tuple(reasons))
    taken = next((taken for share, taken in _REPEATED if above(repeated, share)), 0.0)
    if taken:
        reasons.append(f"{repeated:.0%} of the user turn is said after")
    return ReplyScore(max(0.0, score - taken), components, tuple(reasons))


def score_reference(
    asked: AskedReply, cosine: float | None, similarity: float | None
) -> ReplyScore:
    """See `reward_reference_alignment`; like `score_grounding`."""
    if not asked.reference or not asked.reference.strip():
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
    told = (f"similarity to the reference {score:.2f} (cosine {cosine:.2f})",)
    return ReplyScore(score, components, () if score >= 1.0 else told)
