"""Reason codes of rejected records and candidates, and their meanings.

For the stages that give them, the report, the card and the terminal. A code has its meaning beside
it: a stage takes a member of an enumeration here, or builds a code with `Family.code`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType, Self

#: A code that `Family.code` built.
FamilyCode = NewType("FamilyCode", str)


class _Explained(StrEnum):
    """Codes with a meaning. On the disk and in logs a member is its code."""

    meaning: str

    def __new__(cls, code: str, meaning: str) -> Self:
        member = str.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member


class Reason(_Explained):
    """Why a document, a segment, a source or a candidate is left out; or a note on a source."""

    # Documents that cannot be read
    BROKEN_JSON = "broken_json", "The line of the file is no JSON, or no Unicode text."
    BROKEN_GZIP = (
        "broken_gzip",
        "The compressed file breaks off here; the rest of it cannot be read.",
    )
    NO_TEXT = "no_text", "The document has no field `text` with a string or a list of strings."
    NOT_A_LIST = (
        "not_a_list",
        "The document is one text, and segmentation.mode asks for lists of lines.",
    )
    NOT_A_STRING = (
        "not_a_string",
        "The document is a list of lines, and segmentation.mode asks for texts.",
    )
    # Segments that are no sources
    NOISE_HTML = "noise_html", "The segment holds HTML tags or entities."
    NOISE_URL = "noise_url", "Most of the segment is addresses."
    NOISE_CODE = "noise_code", "The segment reads as program code."
    NOISE_LETTERS = "noise_letters", "Less than half of the segment is letters."
    SOURCE_LANGUAGE = (
        "source_language",
        "The segment is in another language (or standard of Chinese) than the source language.",
    )
    NO_BUCKET = "no_bucket", "Its length lies in no bucket of bucketing.boundaries."
    BLOB_TOO_LONG = (
        "blob_too_long",
        "The blob has more tokens than blob_max_tokens when measured as a whole.",
    )
    DUPLICATE = "duplicate", "The same text stands elsewhere in the corpus; one of them is kept."
    NOT_SAMPLED = (
        "not_sampled",
        "Good as a source, but the pool was filled by others, drawn at random.",
    )
    NEAR_DUPLICATE = (
        "near_duplicate",
        "Most of it stands in another source of the pool, which is kept.",
    )
    CONTAMINATED = (
        "contaminated",
        "It stands, whole or for a long run of words, in an evaluation set.",
    )
    # Sources that are not chosen
    NOT_SELECTED = (
        "not_selected",
        "Its sampled translation improved less on the greedy one than others did.",
    )
    BELOW_MIN_IMPROVEMENT = (
        "below_min_improvement",
        "Its sampled translation improved less than prefilter.min_improvement asks.",
    )
    # Outputs of the teacher
    CUT = "cut", "The teacher's output was cut by max_tokens."
    UNFINISHED = "unfinished", "The teacher's output ended in a way that was not requested."
    CONTENT_FILTER = "content_filter", "The server's content filter kept the output back."
    LOOPING = "looping", "The output repeats itself without end."
    NO_CANDIDATE = (
        "no_candidate",
        "No candidate of the source could compete: the reason names why each fell out.",
    )
    OVER_MAX_SCORE = (
        "over_max_score",
        "Even its best candidate scored worse than final_generation.max_score.",
    )
    NO_CANDIDATES = "no_candidates", "No candidate was left to filter."
    # Notes on sources that are accepted
    IDENTICAL_CANDIDATES = (
        "identical_candidates",
        "All candidates of the source are one text: where most are, a server ignores seed "
        "or temperature.",
    )
    NO_IMPROVEMENT = (
        "no_improvement",
        "The sampled translation scored no better than the greedy one: "
        "prefilter.min_improvement leaves such sources out.",
    )


class RuleCode(_Explained):
    """Why a rule rejects a translation. Segments and outputs of the teacher share some codes."""

    EMPTY = "empty", "The translation is empty."
    TOO_SHORT = "too_short", "The text has fewer characters than min_chars."
    TOO_LONG = "too_long", "The text has more characters than max_chars."
    ROLE_TOKEN = (
        "role_token",
        "A leftover of a chat stands in the translation, such as `assistant:`.",
    )
    META_PHRASE = (
        "meta_phrase",
        "The translation speaks of itself, such as `Here is the translation`.",
    )
    REFUSAL = "refusal", "The teacher refused, such as `I'm sorry, but I can't help with that`."
    ADDED_NOTE = (
        "added_note",
        "Behind the translation stands a note or an offer of help that is none.",
    )
    ADDED_QUOTES = (
        "added_quotes",
        "Quotation marks stand around the translation that the source does not have.",
    )
    TAG = "tag", "A tag or marker stands in the translation that the source does not have."
    DEBRIS = (
        "debris",
        "A lost character, an escape (`\\n`, `&amp;`) or loose Korean letters stand in it.",
    )
    COPIED_SOURCE = "copied_source", "The translation is the source, copied more or less whole."
    WRONG_SCRIPT = "wrong_script", "Too few letters are in the script of the target language."
    THIRD_SCRIPT = (
        "third_script",
        "A word stands in the translation in a script that the target language does not have.",
    )
    WRONG_VARIANT = "wrong_variant", "The translation is in the other standard of Chinese."
    WRONG_LANGUAGE = "wrong_language", "The translation is written in another language."
    REPETITION = "repetition", "More of the translation loops than of the source."
    TRUNCATED = (
        "truncated",
        "The translation ends too early: something that it opens is not closed.",
    )
    LENGTH_RATIO = "length_ratio", "The translation is too long or too short for its source."
    NUMBERS_MISSING = (
        "numbers_missing",
        "Numbers of the source are in no form in the translation, or in another order.",
    )
    PLACEHOLDERS = (
        "placeholders",
        "Placeholders or tags of the source are missing, or there are more of them.",
    )
    LOST_EMOJI = (
        "lost_emoji",
        "Emoji of the source are missing in the translation, or others stand in their place.",
    )


class Family(_Explained):
    """Beginnings of codes that end with another code. {0}: what the end means."""

    DOUBT_PASSED = "doubt_passed:", "A rule was not sure, and the judge passed it: {0}"
    DOUBT_REFUSED = "doubt_refused:", "A rule was not sure, and the judge refused it: {0}"
    DOUBT_UNJUDGED = "doubt_unjudged:", "A rule was not sure, no judge read it, and it went on: {0}"
    GREEDY = "greedy_", "Of the greedy translation: {0}"
    SAMPLE = "sample_", "Of the sampled translation: {0}"
    TEACHER = "teacher_", "The teacher gave no translation: {0}."
    SCORE = "score_", "MetricX gave no score: {0}."
    JUDGE = "judge_", "The judge gave no verdict: {0}."
    JUDGE_ERROR = (
        "judge_error:",
        "The judge gave no verdict, and filters.llm_judge.fail_policy is conservative: {0}.",
    )
    JUDGE_VERDICT = "judge:", "The judge refused it: {0}."

    def code(self, end: str) -> FamilyCode:
        """Return the code of this family with this end."""
        return FamilyCode(f"{self}{end}")


#: Every code that a stage can give.
Code = Reason | RuleCode | FamilyCode


#: Words of the families: why a service has failed.
FAILURES: dict[str, str] = {
    "unreachable": "it could not be reached, or broke the connection off",
    "timeout": "no answer in time",
    "overloaded": "it was overloaded (HTTP 429)",
    "server_error": "it failed (HTTP 5xx)",
    "malformed": "its answer could not be understood",
    "length": "its answer was cut by max_tokens",
    "overlong": "the text does not fit the model's context",
    "incomplete": "it gave fewer choices than were asked for",
    "refused": "it refused the request (HTTP 4xx)",
    "invalid_input": "it does not take such a text",
    "non_finite": "the model's score was no number",
    "model_failure": "the model failed on this text",
    "cancelled": "the request was cancelled",
    "upstream": "the LLM behind it failed",
}
#: Words of `judge:*`: of the rubric's LLM, then of the judge's rules.
VERDICTS: dict[str, str] = {
    "wrong_language": "it is not written in the target language",
    "meaning": "it distorts the meaning grossly, or leaves out or adds a part",
    "commentary": "it holds an explanation, a note or a reply beside the translation",
    "structure": "it breaks the lines, lists or numbering of the source",
    "empty": "it is empty",
    "meta_phrase": "it speaks of itself",
    "role_token": "a leftover of a chat stands in it",
    "refusal": "the teacher refused",
    "added_note": "a note or an offer of help stands behind it",
    "added_quotes": "quotation marks stand around it that the source does not have",
    "marker": "a tag stands in it that the source does not have",
    "debris": "lost characters, escapes or loose Korean letters stand in it",
    "copied": "it is the source, copied",
    "wrong_script": "too few letters are in the target language's script",
    "third_script": "a word of a script stands in it that the target language does not have",
    "wrong_variant": "it is in the other standard of Chinese",
    "repetition": "it loops",
    "length": "it is too long or too short for its source",
}
UNKNOWN = "This version does not know the reason."


_MEANINGS = {str(member): member.meaning for member in (*Reason, *RuleCode)}


def explain(code: str) -> str:
    """Return the meaning of a reason code in one sentence.

    A custom rubric's code stands for itself; a code of another version is unknown."""
    if code in _MEANINGS:
        return _MEANINGS[code]
    families = [family for family in Family if code.startswith(family)]
    if not families:
        return UNKNOWN
    family = max(families, key=len)
    return family.meaning.format(_inner(family, code.removeprefix(family)))


def _inner(family: Family, end: str) -> str:
    if family in (Family.GREEDY, Family.SAMPLE) or family.startswith("doubt_"):
        meaning = explain(end)
        return meaning[:1].lower() + meaning[1:] if not meaning.startswith("MetricX") else meaning
    if family is Family.JUDGE_VERDICT:
        return VERDICTS.get(end, end.replace("_", " "))
    return FAILURES.get(end, UNKNOWN[:-1])
