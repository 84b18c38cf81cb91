"""Check offsets with tokenizers of real models on difficult scripts and sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit.credit.offsets import Alignment, DecodeConfig, align_completion, decode_completion
from tests.kits.examples import examples
from tests.kits.real_tokenizers import NAMES, real_tokenizer

RAW = DecodeConfig(lambda text: text)
HARD = {
    "korean": "파일을 열고 저장하십시오. 뷁, 쀍; 'ㅋㅋㅋ'",
    "chinese": "请保存设置，然后再试一次。𠮷野家 龘",
    "arabic": "اِحْفَظِ المِلَفَّ ثُمَّ أَعِدِ المُحَاوَلَةَ؟",
    "thai": "กรุณาบันทึกการตั้งค่าแล้วลองอีกครั้ง ๆ น้ำ",
    "emoji": "👨‍👩‍👧‍👦 🇰🇷🇩🇪 👍🏽 ☺️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "combining": "e\u0301 o\u0308\u0323 \u1112\u1161\u11ab \u0928\u093f",
    "spaces": "  two\n\n\tthree\u00a0four\u3000five\r\n six   ",
    "code": "print('안녕')  # <b>&amp;</b>\n\treturn {'a': 1}",
    "controls": "a\u200bb\u200ec\ufeffd\u00ade",
}
TEXTS = st.text(
    st.one_of(
        st.sampled_from("".join(HARD.values())),
        st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="▁"),
    ),
    max_size=24,
)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check(alignment: Alignment, tokenizer: Any, ids: list[int]) -> None:
    """Check that offsets cover the decoded text once from start to end."""
    assert alignment.text == decode_completion(tokenizer, ids)
    assert (alignment.method, alignment.unaligned, len(alignment.offsets)) == ("bytes", 0, len(ids))
    covered = 0
    for start, end in alignment.offsets:
        if start < end:
            assert covered - 1 <= start <= covered  # two may share a character, none is missing
            assert end >= covered
            covered = end
    assert covered == len(alignment.text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("script", HARD)
def test_offsets_agree_with_the_tokenizers_own(name: str, script: str) -> None:
    """Compare offsets computed from ids with those from encoding the text."""
    tokenizer = real_tokenizer(name)
    text = decode_completion(tokenizer, ids_of(tokenizer, HARD[script]))  # normalized text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    alignment = align_completion(tokenizer, encoded["input_ids"], RAW)
    check(alignment, tokenizer, encoded["input_ids"])
    if name == "qwen3":  # Llama's leading spaces are not restored
        assert (alignment.text, alignment.offsets) == (text, encoded["offset_mapping"])
    for (start, end), token_id in zip(alignment.offsets, encoded["input_ids"], strict=True):
        alone = decode_completion(tokenizer, [token_id])
        if "\ufffd" not in alone:
            assert alignment.text[start:end].strip(" ") == alone.strip(" ")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(100))
@given(text=TEXTS)
def test_offsets_rebuild_any_text(name: str, text: str) -> None:
    tokenizer = real_tokenizer(name)
    ids = ids_of(tokenizer, text)
    check(align_completion(tokenizer, ids, RAW), tokenizer, ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(100))
@given(text=TEXTS, data=st.data())
def test_a_text_cut_anywhere_with_special_tokens_in_it(
    name: str, text: str, data: st.DataObject
) -> None:
    """Check texts cut inside a character and special tokens at any position."""
    tokenizer = real_tokenizer(name)
    ids = ids_of(tokenizer, text)
    first = data.draw(st.integers(0, len(ids)))
    last = data.draw(st.integers(first, len(ids)))
    middle = data.draw(st.integers(first, last))
    eos = tokenizer.eos_token_id
    ids = [*ids[first:middle], eos, *ids[middle:last], eos]
    alignment = align_completion(tokenizer, ids, RAW)
    check(alignment, tokenizer, ids)
    for index in (middle - first, len(ids) - 1):
        assert alignment.offsets[index][0] == alignment.offsets[index][1]


@pytest.mark.parametrize("name", NAMES)
def test_ids_at_random_are_aligned(name: str) -> None:
    """Check random ids, which give many kinds of broken characters."""
    tokenizer, draw = real_tokenizer(name), random.Random(0)
    bytes_alone = range(3, 259) if name == "mistral" else range(256)
    for _ in range(300):
        pool = bytes_alone if draw.random() < 0.5 else range(len(tokenizer))
        ids = draw.choices(pool, k=draw.randrange(24))
        check(align_completion(tokenizer, ids, RAW), tokenizer, ids)


@pytest.mark.parametrize("name", NAMES)
def test_every_token_of_a_spread_character_covers_it(name: str) -> None:
    tokenizer = real_tokenizer(name)
    ids = ids_of(tokenizer, "🫨")
    offsets = align_completion(tokenizer, ids, RAW).offsets
    assert offsets.count((0, 1)) >= 2
    assert set(offsets) <= {(0, 1), (0, 0)}  # the space that Llama's decoder drops
    cut = align_completion(tokenizer, ids[:-1], RAW)
    assert cut.text.endswith("\ufffd")
    check(cut, tokenizer, ids[:-1])


def test_plain_added_tokens_are_text_and_special_ones_are_not() -> None:
    """Check that Qwen's `<think>` is decoded and its `<|im_end|>` is not."""
    tokenizer = real_tokenizer("qwen3")
    ids = ids_of(tokenizer, "<think>생각</think>답<|im_end|>")
    alignment = align_completion(tokenizer, ids, RAW)
    assert alignment.text == "<think>생각</think>답"
    assert alignment.text[slice(*alignment.offsets[0])] == "<think>"
    assert alignment.offsets[-1] == (len(alignment.text), len(alignment.text))
