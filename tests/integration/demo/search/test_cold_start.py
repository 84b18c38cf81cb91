"""Check the cold-start rows and initial weights of the demo's search policy."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch

from demo.search.make_corpus import FINAL_TEST, HELD_OUT, HELDOUT, TRAIN
from demo.train.chat_policy import STOP
from demo.train.search.copying import new_model
from demo.train.search.policy import query_row, questions_of
from demo.train.search.questions import Questions, bare
from demo.train.search.scripts import BROKEN, DONE, STYLES, Scripts, search_turn
from demo.train.search.tokenizer import TAGS, new_tokenizer
from trainer.search.rollout.actions import Complete, Crop, Invalid, Search, parse
from trainer.search.rollout.episode import TurnRequest
from trainer.search.rollout.prompt import Message

QUESTION = "How much rain came down on Seattle in May 2014, counted in mm?"
SEARCH_OBSERVATION = """\
[50, 33, 262, 55] Seattle 2014
[50, 431, 115, 438] (a line too small to read)
[49, 390, 684, 417] (13 lines too small to read)
5 turns left."""


def turn_request(turn: int, page_text: str = SEARCH_OBSERVATION) -> TurnRequest:
    messages = [Message("system", "s"), Message("user", f"Question: {QUESTION}")]
    if turn > 1:
        messages += [Message("assistant", "t"), Message("user", page_text)]
    return TurnRequest("t", turn, messages, None, 300)


@pytest.fixture(scope="module")
def tokenizer():
    corpus, common = ["Seattle rain 시애틀 강수량"], ["garden lamp 정원 조명"]
    questions = Questions(corpus, common, random.Random(1))
    return new_tokenizer([questions.draw() for _ in range(200)], 256)


@pytest.mark.parametrize("style", STYLES)
def test_a_query_is_words_of_the_question_that_stand_together(style) -> None:
    words = " ".join(bare(word) for word in QUESTION.split())
    for seed in range(20):
        action = parse(search_turn(QUESTION, style, random.Random(seed)))
        assert isinstance(action, Search) and action.query in words


def test_scripts_do_everything_that_can_be_done_and_break_the_form_now_and_then() -> None:
    scripts = Scripts(seed=1)
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for _ in range(600):
        scripts(turn_request(1))
        action = parse(scripts(turn_request(2)))
        kinds[type(action).__name__] += 1
        if isinstance(action, Invalid):
            reasons[action.reason] += 1
        if isinstance(action, Crop):
            assert action.box[:2] in {(50, 33), (50, 431), (49, 390)}
    assert set(kinds) == {"Search", "Crop", "Complete", "Invalid"}
    assert BROKEN / 2 < kinds["Invalid"] / 600 < BROKEN * 2
    assert {"no_think", "unclosed_think", "unclosed_tag", "several_actions"} <= set(reasons)
    assert parse(DONE) == Complete(True)


def test_scripts_are_the_same_for_the_same_seed() -> None:
    def turns(seed: int) -> list[str]:
        scripts = Scripts(seed)
        return [scripts(turn_request(1)) for _ in range(20)]

    assert turns(1) == turns(1) != turns(2)


def test_what_is_learned_of_a_row_is_the_turns(tokenizer) -> None:
    row, trained_mask = query_row(QUESTION, tokenizer, random.Random(1))
    turns = "".join(
        tokenizer.decode([token]) if is_trained else ""
        for token, is_trained in zip(row, trained_mask, strict=True)
    )
    parts = turns.split("<|im_end|>")
    assert parts.pop() == "" and len(parts) == 3
    assert all(isinstance(parse(turn), Search) for turn in parts)
    assert trained_mask[-1] and row[-1] == STOP and not trained_mask[0]


def test_nothing_is_unknown_and_every_tag_is_one_piece(tokenizer) -> None:
    for text in ("한국어 1977년, 🙂 naïve", "[49, 390, 684, 417]"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert all(len(tokenizer(tag)["input_ids"]) == 1 for tag in TAGS)


def test_the_first_weights_copy() -> None:
    """Check that the untrained model predicts the next token of a repeated random sequence."""
    torch.manual_seed(1)
    model = new_model(512, 128).eval()
    sequences = torch.stack([torch.randperm(500)[:12] + 11 for _ in range(16)])  # [B, 12]
    ids = sequences.repeat(1, 2)
    with torch.no_grad():
        predicted = model(input_ids=ids).logits[:, 12:-1].argmax(-1)
    assert (predicted == ids[:, 13:]).float().mean() > 0.9


def test_no_document_is_asked_about_on_both_sides() -> None:
    def documents(path) -> set[str]:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {row["file_name"].removesuffix(".pdf") for row in rows}

    assert documents(HELDOUT) == set(HELD_OUT) and not documents(TRAIN) & set(HELD_OUT)
    assert not documents(FINAL_TEST) & (documents(TRAIN) | documents(HELDOUT))
    assert len(questions_of(TRAIN)) >= 60 and len(questions_of(HELDOUT)) >= 30
