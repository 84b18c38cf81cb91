"""Check credit assignment in one call, on every form of tokenizer, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scorekit.credit import DecodeConfig, align_completion, assign_credit
from scorekit.errors import UserError
from scorekit.schemas import ErrorSpan
from tests.kits.examples import examples
from tests.kits.real_tokenizers import real_tokenizer
from tests.kits.trainer.runs import byte_fallback_tokenizer, byte_level_tokenizer

#: Byte-level BPE; sentencepiece with byte fallback, with Gemma's and with Llama's decoder.
TOKENIZERS = {
    "byte_level": byte_level_tokenizer,
    "gemma": lambda: byte_fallback_tokenizer(False),
    "llama": lambda: byte_fallback_tokenizer(True),
    "qwen3": lambda: real_tokenizer("qwen3"),
    "mistral": lambda: real_tokenizer("mistral"),
}
#: Not imported by the library: a process in which they cannot be imported uses it.
HEAVY = ("torch", "transformers", "numpy", "openai", "tokenizers", "trl", "verl")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def span(start: int, end: int, severity: str = "MAJOR") -> ErrorSpan:
    return ErrorSpan(start=start, end=end, severity=severity)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_token_has_a_penalty_iff_its_characters_are_in_the_span(
    name: str, data: st.DataObject
) -> None:
    """Check texts with combining marks and characters of several tokens, cut at any token."""
    tokenizer = TOKENIZERS[name]()
    characters = [
        "e\u0301",
        "o\u0308\u0323",
        "한",
        "뷁",
        "😀",
        "🫨",
        "👨‍👩‍👧",
        "क्षि",
        " a",
        "word",
        ".",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(characters), min_size=1, max_size=8)))
    ids = ids_of(tokenizer, text)
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    position = data.draw(st.integers(0, len(ids)))
    ids = [*ids[:position], tokenizer.eos_token_id, *ids[position:], tokenizer.eos_token_id]
    alignment = align_completion(tokenizer, ids)
    size = len(alignment.text)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    credit = assign_credit(tokenizer, ids, [span(start, end)])
    assert (credit.text, credit.offsets) == (alignment.text, alignment.offsets)
    assert credit.method == "bytes"
    hits = [bool(set(range(*offset)) & set(range(start, end))) for offset in alignment.offsets]
    assert credit.rewards == [-5.0 if hit else 0.0 for hit in hits]
    assert credit.missed_spans == 0 and (start == end or any(hits))
    assert credit.rewards[position] == credit.rewards[-1] == 0.0


@pytest.mark.parametrize("name", TOKENIZERS)
def test_all_tokens_of_a_character_pay_for_it_and_no_neighbor(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = ids_of(tokenizer, "가🫨나")
    credit = assign_credit(tokenizer, ids, [span(1, 2, "CRITICAL")])
    penalized = [
        offset for offset, reward in zip(credit.offsets, credit.rewards, strict=True) if reward
    ]
    assert len(penalized) >= 2 and set(penalized) == {(1, 2)}
    assert set(credit.rewards) == {0.0, -10.0}


def test_a_combining_mark_pays_alone() -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*ids_of(tokenizer, "e"), *ids_of(tokenizer, "\u0301")]
    credit = assign_credit(tokenizer, ids, [span(1, 2)])
    assert credit.text == "e\u0301" and credit.rewards[0] == 0.0
    assert set(credit.rewards[1:]) == {-5.0}


def test_overlapping_spans_add_up_and_may_be_dicts() -> None:
    tokenizer = byte_level_tokenizer()
    ids = ids_of(tokenizer, "abc")
    spans = [{"start": 0, "end": 3, "severity": "minor"}, {"start": 0, "end": 1, "severity": "x"}]
    credit = assign_credit(tokenizer, ids, spans, {"MINOR": -1, "UNKNOWN": -2})
    assert credit.rewards[0] == -3.0 and sum(credit.covered) == len(ids)
    with pytest.raises(UserError, match=r"'X', which has no weight. Set severity_weights\.UNKNOWN"):
        assign_credit(tokenizer, ids, spans)


@pytest.mark.parametrize("bounds", [(2, 4), (3, 4)])
def test_a_span_past_the_end_is_refused(bounds: tuple[int, int]) -> None:
    tokenizer = byte_level_tokenizer()
    with pytest.raises(ValueError, match=f"span {bounds[0]}-4 in a text of 3"):
        assign_credit(tokenizer, ids_of(tokenizer, "abc "), [span(*bounds)])


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "llama"])
def test_ids_that_the_text_does_not_encode_to_are_located_by_the_ids(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "설정을 저장"
    ids = [token_id for character in text for token_id in ids_of(tokenizer, character)]
    alone = assign_credit(tokenizer, ids, [])
    assert ids != ids_of(tokenizer, text)
    start = alone.text.index("저")
    credit = assign_credit(tokenizer, ids, [span(start, start + 1)])
    penalized = {o for o, reward in zip(credit.offsets, credit.rewards, strict=True) if reward}
    assert penalized == {(start, start + 1)}


def test_the_scored_text_may_be_a_part_of_the_completion() -> None:
    tokenizer = byte_level_tokenizer()
    ids = ids_of(tokenizer, "Sure! 파일 을")
    credit = assign_credit(tokenizer, ids, [span(0, 2)], text="파일을")
    same = assign_credit(tokenizer, ids, [span(0, 2)], decode_cfg=DecodeConfig(lambda _: "파일을"))
    assert credit == same and credit.unaligned > 0
    (first, *_), hits = credit.offsets, [r for r in credit.rewards if r]
    assert first == (0, 0) and hits and credit.rewards[0] == 0.0


@pytest.mark.parametrize("text", ["파일", "a file", "elif a", "A FIL"])
def test_another_text_than_that_of_the_ids_is_refused(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*ids_of(tokenizer, "a fil"), *ids_of(tokenizer, "e")]
    with pytest.raises(ValueError, match=r"the ids decode to 'a fil', but"):
        assign_credit(tokenizer, ids, [], text=text, stop_ids=[ids[-1]])
    assert assign_credit(tokenizer, ids, [], text="fil", stop_ids=[ids[-1]]).text == "fil"


def test_a_span_on_text_that_no_token_wrote_is_counted() -> None:
    tokenizer = byte_level_tokenizer()
    decode_cfg = DecodeConfig(lambda text: f"{text} [end]")
    spans = [span(0, 1), span(4, 9), span(2, 2)]
    credit = assign_credit(tokenizer, ids_of(tokenizer, "abc"), spans, decode_cfg=decode_cfg)
    assert credit.missed_spans == 1 and credit.rewards[0] == -5.0


def test_tokens_that_the_model_did_not_read_are_not_covered() -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*ids_of(tokenizer, "가"), *ids_of(tokenizer, "나"), tokenizer.eos_token_id]
    credit = assign_credit(tokenizer, ids, [], mt_covered=1)
    first = len(ids_of(tokenizer, "가"))
    assert credit.covered == [True] * first + [False] * (len(ids) - first)


def test_the_postprocess_function_has_to_return_a_text() -> None:
    tokenizer = byte_level_tokenizer()
    with pytest.raises(UserError, match="postprocess: the function returned int"):
        assign_credit(tokenizer, [1], [], decode_cfg=DecodeConfig(lambda _: 3))  # type: ignore[arg-type,return-value]


_WITHOUT_HEAVY = f"""
import sys
for name in {HEAVY!r}: sys.modules[name] = None  # an import of it raises ImportError
from scorekit.credit import assign_credit, compute_advantages

class Letters:
    is_fast, all_special_ids, added_tokens_decoder = False, [0], {{}}
    def decode(self, ids, **options): return "".join(chr(96 + i) for i in ids if i)
    def convert_ids_to_tokens(self, ids): return [chr(96 + i) if i else "<s>" for i in ids]

spans = [{{"start": 1, "end": 3, "severity": "MINOR"}}]
print(assign_credit(Letters(), [1, 2, 3, 0], spans).rewards)
print(compute_advantages([1.0, 3.0], [[0.0], [0.0]], [[True], [True]], "aa", eps=0.0))
"""


def test_neither_torch_nor_transformers_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_HEAVY], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[0.0, -1.0, -1.0, 0.0]", "[[-1.0], [1.0]]"], done.stderr
