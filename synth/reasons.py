"""Reason codes of rejected records and candidates, and their meanings.

One table, for the report, the card and the terminal. A new code needs a line here:
tests/unit/synth/test_reasons.py finds every code that a stage can give.
"""

from __future__ import annotations

#: Code -> what it means, in one sentence. {0}: what the rest of a family's code means.
REASONS: dict[str, str] = {
    # Documents that cannot be read
    "broken_json": "The line of the file is no JSON, or no Unicode text.",
    "broken_gzip": "The compressed file breaks off here; the rest of it cannot be read.",
    "no_text": "The document has no field `text` with a string or a list of strings.",
    "not_a_list": "The document is one text, and segmentation.mode asks for lists of lines.",
    "not_a_string": "The document is a list of lines, and segmentation.mode asks for texts.",
    # Segments that are no sources
    "noise_html": "The segment holds HTML tags or entities.",
    "noise_url": "Most of the segment is addresses.",
    "noise_code": "The segment reads as program code.",
    "noise_letters": "Less than half of the segment is letters.",
    "source_language": "The segment is in another language (or standard of Chinese) than the "
    "source language.",
    "no_bucket": "Its length lies in no bucket of bucketing.boundaries.",
    "blob_too_long": "The blob has more tokens than blob_max_tokens when measured as a whole.",
    "duplicate": "The same text stands elsewhere in the corpus; one of them is kept.",
    "not_sampled": "Good as a source, but the pool was filled by others, drawn at random.",
    "near_duplicate": "Most of it stands in another source of the pool, which is kept.",
    "contaminated": "It stands, whole or for a long run of words, in an evaluation set.",
    # Sources that are not chosen
    "not_selected": "Its sampled translation improved less on the greedy one than others did.",
    "below_min_improvement": "Its sampled translation improved less than "
    "prefilter.min_improvement asks.",
    # Outputs of the teacher
    "cut": "The teacher's output was cut by max_tokens.",
    "empty": "The translation is empty.",
    "content_filter": "The server's content filter kept the output back.",
    "looping": "The output repeats itself without end.",
    "no_candidate": "No candidate of the source could compete: the reason names why each fell out.",
    "over_max_score": "Even its best candidate scored worse than final_generation.max_score.",
    "no_candidates": "No candidate was left to filter.",
    # The rules
    "too_short": "The text has fewer characters than min_chars.",
    "too_long": "The text has more characters than max_chars.",
    "role_token": "A leftover of a chat stands in the translation, such as `assistant:`.",
    "meta_phrase": "The translation speaks of itself, such as `Here is the translation`.",
    "refusal": "The teacher refused, such as `I'm sorry, but I can't help with that`.",
    "added_note": "Behind the translation stands a note or an offer of help that is none.",
    "added_quotes": "Quotation marks stand around the translation that the source does not have.",
    "tag": "A tag or marker stands in the translation that the source does not have.",
    "copied_source": "The translation is the source, copied more or less whole.",
    "wrong_script": "Too few letters are in the script of the target language.",
    "wrong_variant": "The translation is in the other standard of Chinese.",
    "wrong_language": "The translation is written in another language.",
    "repetition": "More of the translation loops than of the source.",
    "truncated": "The translation ends too early: something that it opens is not closed.",
    "length_ratio": "The translation is too long or too short for its source.",
    "numbers_missing": "Numbers of the source are in no form in the translation, or in another "
    "order.",
    "placeholders": "Placeholders or tags of the source are missing, or there are more of them.",
    # Notes on sources that are accepted
    "identical_candidates": "All candidates of the source are one text: where most are, a server "
    "ignores seed or temperature.",
    "no_improvement": "The sampled translation scored no better than the greedy one: "
    "prefilter.min_improvement leaves such sources out.",
    # Doubts of a rule
    "doubt_passed:*": "A rule was not sure, and the judge passed it: {0}",
    "doubt_refused:*": "A rule was not sure, and the judge refused it: {0}",
    "doubt_unjudged:*": "A rule was not sure, no judge read it, and it went on: {0}",
    # Families
    "greedy_*": "Of the greedy translation: {0}",
    "sample_*": "Of the sampled translation: {0}",
    "teacher_*": "The teacher gave no translation: {0}.",
    "score_*": "MetricX gave no score: {0}.",
    "judge_*": "The judge gave no verdict: {0}.",
    "judge_error:*": "The judge gave no verdict, and filters.llm_judge.fail_policy is "
    "conservative: {0}.",
    "judge:*": "The judge refused it: {0}.",
}
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
    "copied": "it is the source, copied",
    "wrong_script": "too few letters are in the target language's script",
    "wrong_variant": "it is in the other standard of Chinese",
    "repetition": "it loops",
    "length": "it is too long or too short for its source",
}
UNKNOWN = "This version does not know the reason."


def explain(code: str) -> str:
    """Return the meaning of a reason code in one sentence.

    A custom rubric's code stands for itself; a code of another version is unknown."""
    if code in REASONS:
        return REASONS[code]
    families = [key for key in REASONS if key.endswith("*") and code.startswith(key[:-1])]
    if not families:
        return UNKNOWN
    family = max(families, key=len)
    return REASONS[family].format(_inner(family[:-1], code.removeprefix(family[:-1])))


def _inner(family: str, suffix: str) -> str:
    if family in ("greedy_", "sample_") or family.startswith("doubt_"):
        meaning = explain(suffix)
        return meaning[:1].lower() + meaning[1:] if not meaning.startswith("MetricX") else meaning
    if family == "judge:":
        return VERDICTS.get(suffix, suffix.replace("_", " "))
    return FAILURES.get(suffix, UNKNOWN[:-1])
