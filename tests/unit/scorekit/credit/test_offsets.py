"""Check that token offsets are exact for the ids, however a tokenizer splits characters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scorekit.credit.offsets import (
    DecodeConfig,
    align_completion,
    compute_token_char_offsets,
    decode_completion,
)
from tests.kits.examples import examples
from tests.kits.trainer.runs import byte_fallback_tokenizer, byte_level_tokenizer

RAW = DecodeConfig(lambda text: text)
TEXTS = st.text(
    st.one_of(
        st.sampled_from("가각힣열고 저장하십시오.한국어"),
        st.sampled_from("😀👨‍👩‍👧🇰🇷"),
        st.characters(
            codec="utf-8",
            exclude_categories=["Cs", "Cc"],
            exclude_characters="▁",  # sentencepiece takes it for a space
        ),
    ),
    max_size=20,
)
NAMES = ["byte_level", "llama", "gemma"]


def tokenizer_named(name: str) -> Any:
    return (
        byte_level_tokenizer() if name == "byte_level" else byte_fallback_tokenizer(name == "llama")
    )


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that may spell a special token, such as "<s>"."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return list(ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(50))
@example(text="<s>")
@given(text=TEXTS)
def test_token_char_offsets_rebuild_the_completion_text(name: str, text: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = ids_of(tokenizer, text)
    alignment = align_completion(tokenizer, ids, RAW)
    assert alignment.text == decode_completion(tokenizer, ids) == text
    assert alignment.method == "bytes"
    assert alignment.unaligned == 0
    # the ranges cover the text in order; overlapping ranges share one character
    covered = 0
    for (start, end), token_id in zip(alignment.offsets, ids, strict=True):
        assert covered - 1 <= start <= covered
        assert end >= covered
        covered = end
        alone = decode_completion(tokenizer, [token_id])
        if "\ufffd" not in alone:
            assert alone.strip() in text[start:end]
    assert covered == len(text)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(50))
@given(data=st.data())
def test_any_ids_at_all_are_aligned(name: str, data: st.DataObject) -> None:
    """Check ids that no text encodes to: broken characters and special tokens anywhere."""
    tokenizer = tokenizer_named(name)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    alignment = align_completion(tokenizer, ids, RAW)
    assert alignment.text == decode_completion(tokenizer, ids)
    assert alignment.method == "bytes"
    assert len(alignment.offsets) == len(ids)
    assert all(0 <= start <= end <= len(alignment.text) for start, end in alignment.offsets)
    starts = [start for start, end in alignment.offsets if start < end]
    ends = [end for _, end in alignment.offsets]
    assert (starts, ends) == (sorted(starts), sorted(ends))  # in the order of the text
    for token_id, (start, end) in zip(ids, alignment.offsets, strict=True):
        if token_id in tokenizer.all_special_ids:
            assert start == end


@pytest.mark.parametrize("name", NAMES)
def test_each_token_of_a_character_covers_it(name: str) -> None:
    tokenizer = tokenizer_named(name)
    text = "열 😀 뷁"
    ids = ids_of(tokenizer, text)
    offsets = compute_token_char_offsets(tokenizer, ids, RAW)
    for character in "😀뷁":
        index = text.index(character)
        assert offsets.count((index, index + 1)) >= 2  # 4 and 3 bytes, hardly merged


def test_the_cut_completion_ends_in_a_replacement_character() -> None:
    tokenizer = byte_level_tokenizer()
    ids = ids_of(tokenizer, "a😀")[:-1]
    alignment = align_completion(tokenizer, ids)
    assert alignment.text == "a\ufffd"
    assert alignment.offsets == [(0, 1), (1, 2), (1, 2), (1, 2)]


def test_a_broken_run_of_bytes_gives_one_character_a_token() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("<0xF0>", "<0x9F>", "<0x41>")]
    alignment = align_completion(tokenizer, ids, RAW)
    assert alignment.text == "\ufffd\ufffd\ufffd"
    assert alignment.offsets == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_have_no_width(name: str) -> None:
    tokenizer = tokenizer_named(name)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = [*ids_of(tokenizer, "파일"), pad, *ids_of(tokenizer, "파일"), eos]
    alignment = align_completion(tokenizer, ids)
    middle, last = ids.index(pad), len(ids) - 1
    assert alignment.offsets[middle] == (2, 2)
    assert alignment.offsets[last] == (len(alignment.text), len(alignment.text))


@pytest.mark.parametrize("name", NAMES)
def test_a_leading_strip_shifts_the_offsets(name: str) -> None:
    tokenizer = tokenizer_named(name)
    text = "  \n파일 열기 \n"
    ids = ids_of(tokenizer, text)
    alignment = align_completion(tokenizer, ids)
    assert alignment.text == "파일 열기"
    assert alignment.unaligned == 0
    before = align_completion(tokenizer, ids, RAW)
    assert before.text == text
    for (start, end), (old_start, old_end) in zip(alignment.offsets, before.offsets, strict=True):
        lead = len(text) - len(text.lstrip())
        first, last = (min(max(0, index - lead), 5) for index in (old_start, old_end))
        expected = (first, last) if first < last else (start, start)  # nothing of the token remains
        assert (start, end) == expected
    assert alignment.offsets[0] == (0, 0)
    assert alignment.offsets[-1] == (5, 5)
    assert {i for start, end in alignment.offsets for i in range(start, end)} == set(range(5))


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_id_that_is_not_flagged_special_is_no_text(name: str) -> None:
    """Check `<|im_end|>` added as a plain token: decoding would keep it, and spans could match."""
    tokenizer = copy.deepcopy(tokenizer_named(name))
    tokenizer.add_tokens("<|im_end|>")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = ids_of(tokenizer, "파일")
    alignment = align_completion(tokenizer, [*ids, stop], None, [tokenizer.eos_token_id, stop])
    assert alignment.text == "파일"
    assert alignment.offsets[-1] == (2, 2)
    assert alignment.offsets[:-1] == align_completion(tokenizer, ids).offsets
    assert align_completion(tokenizer, [*ids, stop]).text.endswith("<|im_end|>")
    assert align_completion(tokenizer, [stop], None, [stop]).offsets == [(0, 0)]


def test_a_hook_that_rewrites_is_aligned_and_what_it_removes_is_counted() -> None:
    tokenizer = byte_level_tokenizer()
    ids = ids_of(tokenizer, "Sure! 파일을 열고")
    alignment = align_completion(
        tokenizer, ids, DecodeConfig(lambda text: text.removeprefix("Sure! "))
    )
    assert alignment.text == "파일을 열고"
    removed = align_completion(tokenizer, ids_of(tokenizer, "Sure! "), RAW)
    tokens_removed = sum(bool("Sure! "[s:e].strip()) for s, e in removed.offsets)
    assert alignment.unaligned == tokens_removed > 0
    assert all(start == end for start, end in alignment.offsets[:tokens_removed])
    assert alignment.offsets[-1][1] == len(alignment.text)


def test_ids_outside_the_vocabulary_have_no_width() -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*ids_of(tokenizer, "파일"), len(tokenizer) + 5]
    alignment = align_completion(tokenizer, ids)
    assert alignment.text == "파일"
    assert alignment.offsets[-1] == (2, 2)


def wordpiece() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose decoder joins words by rules that the bytes do not show."""
    vocab = {"[UNK]": 0, "[PAD]": 1, "file": 2, "##s": 3, "open": 4, ".": 5, "OPEN": 6}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="[PAD]", pad_token="[PAD]", unk_token="[UNK]"
    )


def test_fallback_to_the_fast_tokenizers_offsets() -> None:
    alignment = align_completion(wordpiece(), [4, 2, 3])
    assert (alignment.text, alignment.method) == ("open files", "encode")
    assert alignment.offsets == [(0, 4), (5, 9), (9, 10)]


def test_fallback_to_search(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        alignment = align_completion(wordpiece(), [3, 2])  # "##s" first: encoding gives other ids
    assert alignment.method == "search"
    assert "search" in caplog.text
    assert alignment.text == "##s file"
    assert alignment.offsets == [(0, 3), (4, 8)]
    assert alignment.unaligned == 0
