"""Check that a truncated read gives the ids of the full text without tokenizing its end."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from scorekit.schemas import MetricXOptions, TranslationSample, XCometOptions
from scorekit.server import tokenizers
from scorekit.server.tokenizers import BoundedTokenizer, slices, splits_at_spaces
from services.metricx.model import MetricXBackend, load_tokenizer
from testing.checkpoints.xcomet import loaded
from tests.kits.examples import examples
from tests.kits.real_tokenizers import real_tokenizer

ROOT = Path(__file__).parents[4]
#: Bytes for unknown characters (demo); NFKC and runs of unknown characters (golden, as in mT5).
FOLDERS = {
    "metricx": ROOT / "demo/models/metricx",
    "xcomet": ROOT / "demo/models/xcomet/encoder",
    "golden": ROOT / "tests/golden/metricx_tiny",
}
NAMES = (*FOLDERS, "qwen3", "mistral")
#: Characters that a normalizer joins, splits, drops or turns into spaces; marks that combine with
#: neighboring characters; special tokens as text; long runs without a space.
NASTY = [
    " ",
    "  ",
    " " * 30,
    "a",
    "the house",
    " is",
    ", ",
    ". ",
    "1 2",
    "집",
    "은 ",
    "빨간색이다. ",
    "日本語の文章",
    "。",
    "龘",
    "龘" * 9,
    "豈",
    "㎏",
    "㍿",
    "ﷺ",
    "´",
    "¨",
    "e\u0301",
    "\u0301",
    "\u0300" * 20,
    "\u1100\u1161\u11a8",
    "\uff9e",
    "ｶﾞ ",
    "\u200d",
    "👩\u200d👩\u200d👧",
    "🇰🇷",
    "🇰",
    "\u0600",
    "\u0d4e",
    "\u0e33",
    "\u20e3",
    "\u00a0",
    "\u3000",
    "\n",
    "\t",
    "\u200b",
    "\u00ad",
    "▁",
    "</s>",
    "<pad>",
    "<mask>",
    "<0xE9>",
    "x" * 40,
    "한국어 문장 ",
    "ａ ｂ ",
]


@cache
def fast_tokenizer(name):
    if name in ("metricx", "golden"):
        return load_tokenizer(FOLDERS[name], name)
    if name in FOLDERS:
        return AutoTokenizer.from_pretrained(FOLDERS[name]).backend_tokenizer
    return real_tokenizer(name).backend_tokenizer


def read(name, texts, max_tokens, **kwargs):
    return list(BoundedTokenizer(fast_tokenizer(name)).read(texts, max_tokens, **kwargs))


texts_of_nasty = st.lists(st.sampled_from(NASTY), max_size=60).map("".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(40))
@given(texts=st.lists(texts_of_nasty, min_size=1, max_size=4), max_tokens=st.integers(1, 40))
def test_what_is_read_has_the_ids_of_the_whole_text(name, texts, max_tokens):
    """Check every limit, however small."""
    with (
        patch.object(tokenizers, "_CHARS_AN_ID", 1),
        patch.object(tokenizers, "_SEARCH", 40),
        patch.object(tokenizers, "SLICE_BYTES", 200),
    ):
        results = read(name, texts, max_tokens)
    for text, result in zip(texts, results, strict=True):
        full_encoding = fast_tokenizer(name).encode(text, add_special_tokens=False)
        assert result.ids == full_encoding.ids[:max_tokens]
        assert result.offsets == full_encoding.offsets[:max_tokens]
        assert result.is_cut == (len(full_encoding) > max_tokens)
        assert result.is_cut or result.covered == len(text)
        (counted,) = read(name, [text], max_tokens, count=True)
        assert counted.total == len(full_encoding) and counted.ids == result.ids


@pytest.mark.parametrize("name", NAMES)
def test_a_start_is_cut_off_where_words_are_told_apart_and_only_there(name):
    text = "Das Haus ist rot. 집은 빨간색이다. " * 3000
    tokenized_texts = []

    class Watched:
        def __getattr__(self, name_of_attribute):
            return getattr(fast_tokenizer(name), name_of_attribute)

        def encode_batch(self, texts, **kwargs):
            tokenized_texts.extend(texts)
            return fast_tokenizer(name).encode_batch(texts, **kwargs)

    (result,) = BoundedTokenizer(Watched()).read([text], 100)
    full_encoding = fast_tokenizer(name).encode(text, add_special_tokens=False)
    assert result.ids == full_encoding.ids[:100] and result.is_cut
    # Llama's form has no pre-tokenizer: any character might matter to any id.
    assert splits_at_spaces(fast_tokenizer(name)) == (name != "mistral")
    assert (sum(map(len, tokenized_texts)) < 2000) == (name != "mistral")


@pytest.mark.parametrize("text", ["龘" * 5000, " " * 5000, "e" + "\u0301" * 5000, "日本語" * 2000])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_text_without_a_place_to_cut_is_read_as_a_whole(name, text):
    full_encoding = fast_tokenizer(name).encode(text, add_special_tokens=False)
    (result,) = read(name, [text], 50)
    assert result.ids == full_encoding.ids[:50] and result.is_cut == (len(full_encoding) > 50)


def decoded_length(tokenizer, ids):
    """Return the number of characters that the ids decode to, without using offsets.

    A character that was cut leaves up to three bytes.
    """
    for left_over in range(4):
        text = tokenizer.decode(ids[: len(ids) - left_over], skip_special_tokens=False)
        if "\ufffd" not in text:
            return len(text)
    raise AssertionError(ids)


MANY_IDS = ["a", " ", "집", "龘", "龘龘", "🜁", "é", "㍿", "the ", "👩\u200d👧", "字"]


@pytest.mark.parametrize("name", ["metricx", "xcomet"])
@settings(max_examples=examples(50))
@given(
    text=st.lists(st.sampled_from(MANY_IDS), min_size=20, max_size=60).map("".join),
    max_tokens=st.integers(1, 60),
)
def test_what_is_covered_is_what_the_ids_give_back(name, text, max_tokens):
    (result,) = read(name, [text], max_tokens)
    if result.is_cut:
        assert result.covered == decoded_length(fast_tokenizer(name), result.ids)
    # A byte belongs to its own character, not to the whole run of unknown ones.
    assert all(end - start <= 16 for start, end in result.own_offsets)
    assert all(
        a <= b for (a, _), (b, _) in zip(result.own_offsets, result.own_offsets[1:], strict=False)
    )


def test_a_character_that_became_several_is_covered_when_all_of_it_is_read():
    text = "株式会社㍿㍿㍿"  # NFKC writes each ㍿ as four characters
    for max_tokens in range(1, 17):
        (result,) = read("golden", [text], max_tokens)
        encoding = fast_tokenizer("golden").encode(text, add_special_tokens=False)
        unread = {k for a, b in encoding.offsets[max_tokens:] for k in range(a, b)}
        read_characters = [k for k in range(len(text)) if k not in unread]
        assert result.covered == (len(read_characters) if unread else len(text))


RARE = "龘靐齉爩鱻麤" * 250  # 1,500 characters, 4,500 bytes, each an id


def test_metricx_says_what_it_did_not_read():
    backend = MetricXBackend(str(FOLDERS["metricx"]), device="cpu", threads=1)
    backend.load()
    (encoded,) = backend.encode([TranslationSample(src="a", mt=RARE)], MetricXOptions())
    decoded = decoded_length(fast_tokenizer("metricx"), encoded.payload)
    assert encoded.fields["truncated"] == {"src": False, "mt": True, "ref": False}
    assert encoded.fields["mt_covered"] == decoded - len("source: a candidate: ") < 520
    assert encoded.fields["tokens"] == 1535


def test_xcomet_says_what_it_did_not_read():
    backend = loaded(ROOT / "demo/models/xcomet")
    (encoded,) = backend.encode([TranslationSample(src="a", mt=RARE)], XCometOptions())
    ids = encoded.payload.rows[0][1:509]
    assert encoded.fields["truncated"] == {"src": False, "mt": True, "ref": False}
    assert encoded.fields["mt_covered"] == decoded_length(fast_tokenizer("xcomet"), ids) < 180
    # No span may end beyond the tokenized text.
    assert encoded.payload.read_offsets.max() <= encoded.fields["mt_covered"] + 1


@given(sizes=st.lists(st.integers(0, 50)), max_size=st.integers(1, 60), items=st.integers(1, 5))
def test_slices_are_bounded_whole_and_in_order(sizes, max_size, items):
    ranges = list(slices(sizes, max_size, items))
    assert [k for first, stop in ranges for k in range(first, stop)] == list(range(len(sizes)))
    for first, stop in ranges:
        assert stop - first == 1 or (sum(sizes[first:stop]) <= max_size and stop - first <= items)
