"""Test the demo's sentence encoder: a folder in sentence-transformers' format, and its quality."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ENCODER = Path(__file__).parents[3] / "demo/models/encoder"


@pytest.fixture(scope="module")
def encoder():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(ENCODER), device="cpu", local_files_only=True)


def test_it_pools_the_first_token_and_normalises(encoder):
    kinds = [
        m["type"].rpartition(".")[2] for m in json.loads((ENCODER / "modules.json").read_text())
    ]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    assert json.loads((ENCODER / "1_Pooling/config.json").read_text())["pooling_mode"] == "cls"
    vector = encoder.encode("안녕하세요!")
    assert vector.shape == (128,) and abs(float(vector @ vector) - 1) < 1e-5
    assert sum(path.stat().st_size for path in ENCODER.rglob("*") if path.is_file()) < 5_000_000


def test_a_reply_is_nearer_to_its_question_than_other_replies_are(encoder):
    question, own_reply, other_dish, other_topic = encoder.encode(
        [
            "감자전을 좋아해?",
            '서윤은 눈을 반짝였다.\n"응, 감자전은 제일 좋아하는 음식이야."',
            '서윤은 눈을 반짝였다.\n"응, 만두는 제일 좋아하는 음식이야."',
            '서윤은 눈을 반짝였다.\n"괜찮아. 사과해 줘서 고마워."',
        ]
    )
    assert question @ own_reply - 0.3 > question @ other_dish > question @ other_topic + 0.2


def test_held_out_pairs_are_told_from_shuffled_ones(encoder):
    from demo.train.roleplay.encoder import compute_stats

    stats = compute_stats(encoder, 100)
    assert stats["true"] > 0.9 and stats["shuffled"] < 0.15
