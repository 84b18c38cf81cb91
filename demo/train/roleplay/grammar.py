"""A seeded grammar of Korean role-play dialogues: scenario, names, level, turns and replies.

The tables in demo/data/roleplay were written for this demo; nothing in them is anybody else's.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from demo.common import DATA
from demo.train.roleplay.korean import render, slots_of
from trainer.roleplay.turn import Message, RoleplayTurn, SpeechLevel

TABLES = DATA / "roleplay"
SYSTEM = (
    "당신은 {place}의 {role} {c}입니다. 상대는 {other} {p}입니다. "
    "{c:은} {p}에게 [존댓말을/반말을] 씁니다. 서술 한 줄, 큰따옴표 대사 한 줄로 답합니다."
)
FIRST = "서민지하도예수유은현재태승다나가소채시주준정영윤규선세우진해"
SECOND = "연준우윤아호린빈진영원현희민서은율솔혁재경인람결"
#: Names that are words, some of them of the dialogues.
WORDS = (
    "수영,주인,정원,시인,하인,서재,소원,가경,다람,나인,유서,해서,수은,지진,나서,가서,도서,주민,시민,"
    "도민,현재,영재,소재,주재,우연,정서,유희,다재,선인,소인,유람,도인,지인,해결,가결,시서,예서,예인"
)
#: One name in so many is held out: in no training.
HELD_OUT_NAMES = 7
OTHER: dict[SpeechLevel, SpeechLevel] = {"polite": "plain", "plain": "polite"}


@cache
def tables() -> tuple[list[dict[str, Any]], dict[str, list[str]], dict[str, Any]]:
    """Return scenarios, narrations by mood, and the exchanges with their slots."""
    names = ("scenarios", "narrations", "exchanges")
    loaded = [yaml.safe_load((TABLES / f"{n}.yaml").read_text(encoding="utf-8")) for n in names]
    return loaded[0], loaded[1], loaded[2]


@cache
def names(held_out: bool) -> list[str]:
    """Return given names of two syllables, with and without a final consonant."""
    grid = [a + b for a in FIRST for b in SECOND if a != b]
    allowed = [name for name in grid if name not in WORDS.split(",")]
    return [n for n in allowed if (zlib.crc32(n.encode()) % HELD_OUT_NAMES == 0) == held_out]


@dataclass(frozen=True, slots=True)
class Reply:
    """Holds a narration and a quote, without marks.

    puppet: the same narration with the player acting.
    other_level: the quote at the other speech level.
    """

    narration: str
    puppet: str
    quote: str
    other_level: str

    @property
    def text(self) -> str:
        """Return the seed's form: a line of narration, a line in double quotes."""
        return f'{self.narration}\n"{self.quote}"'


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Holds a system turn, and exchanges of the player's turn and the character's reply."""

    name: str
    scenario: str
    character: str
    player: str
    level: SpeechLevel
    system: str
    turns: tuple[tuple[str, Reply], ...]

    def messages(self, exchanges: int, replies: list[str] | None = None) -> list[Message]:
        """Return the first exchanges.

        replies: replaces the character's replies.
        """
        chat = [{"role": "system", "content": self.system}]
        for index, (user, reply) in enumerate(self.turns[:exchanges]):
            content = reply.text if replies is None else replies[index]
            chat += [{"role": "user", "content": user}, {"role": "assistant", "content": content}]
        return chat

    def turn(self, index: int) -> RoleplayTurn:
        """Return the prompt of a reply with its scenario, names and speech level."""
        return RoleplayTurn(
            id=f"{self.name}-{index}",
            prompt=tuple(self.messages(index + 1)[:-1]),
            reference=self.turns[index][1].text,
            player_name=self.player,
            character_name=self.character,
            speech_level=self.level,
            scenario=self.scenario,
            dialogue=self.name,
            place=index,
        )


def words(rng: random.Random, templates: list[str], scene: dict[str, Any]) -> dict[str, str]:
    """Return a word for each slot of some templates.

    scene: the scenario, with the names.
    """
    book = tables()[2]["slots"]
    word_by_slot = {name: word for name, word in scene.items() if isinstance(word, str)}
    word_by_slot |= {"spot": rng.choice(scene["spots"]), "prop": rng.choice(scene["props"])}
    slots = {name for template in templates for name in slots_of(template)}
    return word_by_slot | {name: rng.choice(book[name]) for name in sorted(slots & book.keys())}


def exchange(
    rng: random.Random, entry: dict[str, Any], scene: dict[str, Any], levels: list[SpeechLevel]
) -> tuple[str, Reply]:
    """Return a turn of the player and a reply.

    levels: the player's, the character's.
    """
    ask, answer = rng.choice(entry["ask"]), rng.choice(entry["say"])
    act = rng.choice(tables()[1][entry["mood"]])
    slots = words(rng, [ask, answer], scene)
    quotes = {level: render(answer, level, slots) for level in OTHER}
    reply = Reply(
        narration=render(act, levels[1], slots),
        puppet=render(act, levels[1], slots | {"c": slots["p"], "p": slots["c"]}),
        quote=quotes[levels[1]],
        other_level=quotes[OTHER[levels[1]]],
    )
    return render(ask, levels[0], slots), reply


def scramble(rng: random.Random, scene: dict[str, Any]) -> dict[str, Any]:
    """Replace the place and roles of a scenario by random nouns.

    The text makes no sense. It teaches a small model to find a name wherever it is, instead of
    memorizing 24 roles.
    """
    scenarios, _, book = tables()
    nouns = [p for s in scenarios if not s.get("held_out") for p in s["props"]]
    nouns += [
        w
        for k, slot_words in book["slots"].items()
        if k not in ("sky", "dream", "trait")
        for w in slot_words
    ]
    return scene | {key: rng.choice(nouns) for key in ("place", "role", "other")}


def dialogue(
    rng: random.Random,
    name: str,
    held_out: bool = False,
    longest: int = 3,
    unseen_names: bool = False,
    scrambled: bool = False,
) -> Dialogue:
    """Return a dialogue of one to `longest` exchanges, each on another topic.

    held_out: use a scenario that is in no training.
    unseen_names: use names that are in no training.
    scrambled: see `scramble`.
    """
    scenarios, _, book = tables()
    scene = rng.choice([s for s in scenarios if s.get("held_out", False) == held_out])
    if scrambled:
        scene = scramble(rng, scene)
    character, player = rng.sample(names(unseen_names), 2)
    named_scene = scene | {"c": character, "p": player}
    levels: list[SpeechLevel] = [rng.choice(["polite", "plain"]) for _ in range(2)]
    entries: list[dict[str, Any]] = []
    num_exchanges = rng.randint(1, longest)
    while len(entries) < num_exchanges:
        entry = rng.choice(book["exchanges"])
        if entry["topic"] not in {e["topic"] for e in entries}:
            entries.append(entry)
    slots = {k: v for k, v in named_scene.items() if isinstance(v, str)}
    return Dialogue(
        name=name,
        scenario=scene["place"],
        character=character,
        player=player,
        level=levels[1],
        system=render(SYSTEM, levels[1], slots),
        turns=tuple(exchange(rng, entry, named_scene, levels) for entry in entries),
    )
