"""Make scorekit/text/english_words.txt: words that are English rather than another language.

The words are those of symspellpy's English dictionary that are common in English, and clearly more
so than in any other language of `tools.letter_groups`. wordfreq says how common they are.

    pip install wordfreq==3.1.1 symspellpy==6.10.1
    python -m tools.english_words
"""

from __future__ import annotations

import math
from importlib import resources

from scorekit.command import run_command
from scorekit.text.english_words import TABLE
from tools.letter_groups import OTHERS

NOTICE = """\
# Words that are English rather than another language: see scorekit/text/english_words.py.
# Made by tools/english_words.py: words of symspellpy (MIT License), chosen by frequencies of
# wordfreq (Apache License 2.0; its data CC BY-SA 4.0), which are not in this file.
"""
DICTIONARY = "frequency_dictionary_en_82_765.txt"
#: wordfreq has no Estonian.
OTHER_LANGUAGES = tuple(language for language in (*OTHERS, "de") if language != "et")
#: All are on the Zipf scale: logarithms to base 10 of the frequency in 10^9 words.
RAREST = 3.0  # in English
OVER_ANY = 0.3  # how much commoner than in each other language
OVER_MEAN = 0.8  # how much commoner than on average over the other languages
FLOOR = 1.5  # added to the mean: rarer words are not counted reliably


def main() -> None:
    """Write the table."""
    text = resources.files("symspellpy").joinpath(DICTIONARY).read_text("utf-8-sig")
    words = {line.split()[0] for line in text.splitlines()}
    chosen = sorted(word for word in words if word.isalpha() and _is_english(word))
    TABLE.write_text(NOTICE + "".join(f"{word}\n" for word in chosen), "utf-8")


def _is_english(word: str) -> bool:
    from wordfreq import zipf_frequency  # type: ignore[import-not-found]

    english = zipf_frequency(word, "en")
    if english < RAREST:
        return False
    other_frequencies = [zipf_frequency(word, language) for language in OTHER_LANGUAGES]
    mean = math.log10(
        sum(10**other for other in other_frequencies) / len(other_frequencies) + 10**FLOOR
    )
    return bool(english - max(other_frequencies) >= OVER_ANY and english - mean >= OVER_MEAN)


if __name__ == "__main__":
    run_command(main)
