"""Check the grammar of the role-play demo's Korean and that its data sets do not overlap."""

from __future__ import annotations

import json
import random
import re
from dataclasses import fields

import pytest

from demo.train.roleplay.data import PROMPTS
from demo.train.roleplay.grammar import TABLES, dialogue, names, tables
from demo.train.roleplay.korean import particle, render
from demo.train.roleplay.noise import FAULTS, noisy
from trainer.roleplay.turn import RoleplayTurn

FORM = re.compile(r'[^"\n]+\n"[^"\n]+"')


@pytest.mark.parametrize(
    ("word", "form", "right"),
    [
        ("서연", "은", "은"),
        ("민수", "은", "는"),
        ("민수", "이라고", "라고"),
        ("북쪽 항구", "으로", "로"),
        ("서울", "으로", "로"),  # after ㄹ
        ("남쪽 섬", "으로", "으로"),
        ("서연", "에게", "에게"),  # does not change
    ],
)
def test_a_particle_follows_the_last_syllable(word, form, right):
    assert particle(word, form) == right


def test_a_particle_after_another_script_is_refused():
    with pytest.raises(ValueError, match="Hangul"):
        particle("Anna", "은")


def test_a_template_has_two_levels():
    template = "[저는/나는] {food:을} 먹[어요/어]."
    assert render(template, "polite", {"food": "만두"}) == "저는 만두를 먹어요."
    assert render(template, "plain", {"food": "떡"}) == "나는 떡을 먹어."


def test_every_template_has_its_words():
    """Check all slots and moods: a missing text would raise an error only when sampled."""
    scenarios, narrations, book = tables()
    slots = {"c", "p", "role", "place", "other", *book["slots"]}
    for entry in book["exchanges"]:
        assert narrations[entry["mood"]]
        for template in entry["ask"] + entry["say"]:
            assert set(re.findall(r"\{(\w+)", template)) <= slots, template
            for level in ("polite", "plain"):
                rendered = render(template, level, dict.fromkeys(slots, "섬"))
                assert not set("[]{}/") & set(rendered), rendered
    assert {s["held_out"] for s in scenarios if "held_out" in s} == {True}


def test_replies_have_the_form_and_faults_break_it():
    rng = random.Random(0)
    replies = [reply for n in range(200) for _, reply in dialogue(rng, str(n)).turns]
    assert all(FORM.fullmatch(reply.text) for reply in replies)
    formed = sum(bool(FORM.fullmatch(noisy(reply, rng))) for reply in replies) / len(replies)
    expected_share = (FAULTS["none"] + FAULTS["puppet"] + FAULTS["marker"]) / sum(FAULTS.values())
    assert abs(formed - expected_share) < 0.1


def test_held_out_scenarios_and_unseen_names_are_in_no_training():
    assert not set(names(True)) & set(names(False))
    rows = {
        name: [json.loads(line) for line in (TABLES / f"{name}.jsonl").open(encoding="utf-8")]
        for name in PROMPTS
    }
    seen = {row["scenario"] for row in rows["train"]}
    trained = (TABLES / "sft_noisy.jsonl").read_text(encoding="utf-8")
    for name in ("heldout", "final_test", "unseen_names"):
        for row in rows[name]:
            assert row["scenario"] not in seen and row["scenario"] not in trained
            people = {row["player_name"], row["character_name"]}
            assert people <= set(names(name == "unseen_names"))
            assert row.keys() == {field.name for field in fields(RoleplayTurn)}
