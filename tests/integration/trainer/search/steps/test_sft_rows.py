"""Check cold-start rows: fine-tuning trains the tokens that RL would have sampled."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from scorekit.errors import UserError
from tests.kits.real_tokenizers import write_small_qwen, write_tokenizer
from tests.kits.trainer.images import PROCESSOR
from tests.kits.trainer.searching.episodes import (
    COMPLETE,
    ask,
    crop,
    played,
    scripted,
    search,
)
from tests.kits.trainer.searching.policies import TINY_SIGHT, ToldSampler, template, turn_ids
from tests.kits.trainer.sft import sft_config
from trainer.chat.config import ChatConfig
from trainer.chat.labels import label
from trainer.rl.config import SamplingConfig
from trainer.rl.policy import load_tokenizer
from trainer.search.config import SearchConfig
from trainer.search.images.processor import load_reader
from trainer.search.records import EpisodeReward, Trajectory
from trainer.search.rollout.episode import Policy
from trainer.search.rollout.sampled import SampledPolicy
from trainer.search.steps.sft_rows import ROWS, Ended, SftExport, export_sft
from trainer.search.trajectories.store import TrajectoryStore
from trainer.sft.prepare import SftPart, load_train

TURNS = (
    "<think>왜 출생아 수? 뷁 🙂</think>\n<search>births 1990</search>",
    crop(10, 10, 60, 40),
    "<think>ends in spaces </think><search>출생 Korea</search> \n\n",
)
VISION_MODELS = ["qwen2_5_vl", "qwen3_vl"]
_SEGMENT = r"[ -~]|[^ -~]+"
TEMPLATES = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", *VISION_MODELS]


def save_reader(folder: Path, name: str, *, sees: bool, **changes: Any) -> Path:
    """Save a model's files except its weights, with a small tokenizer of Qwen3 and a template."""
    write_small_qwen(folder)
    (folder / "chat_template.jinja").write_text(template(name), encoding="utf-8")
    if not sees:
        text = {"vocab_size": 151936, "max_position_embeddings": 8192, "eos_token_id": 151645}
        transformers.Qwen2Config(**(text | changes)).save_pretrained(folder)
        return folder
    config = transformers.Qwen2_5_VLConfig(
        text_config={"vocab_size": 151936, "max_position_embeddings": 8192} | changes,
        vision_config={"patch_size": 4, "spatial_merge_size": 2},
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
    )
    config.save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    return folder


def search_config(model: Path | None, **episode: Any) -> SearchConfig:
    path = None if model is None else str(model)
    return SearchConfig.model_validate({"policy": {"path": path}, "episode": episode})


def sampled(model: Path, cfg: SearchConfig, *turns: str) -> SampledPolicy:
    """Return a policy as in RL that writes these turns in order, then ends."""
    tokenizer = load_tokenizer(cfg.policy)
    config = transformers.AutoConfig.from_pretrained(model)
    sees = cfg.episode.observation == "image"
    reader = load_reader(str(model), config, cfg.episode.sight) if sees else None
    ids = turn_ids(tokenizer, reader)

    def answer(prompt: str) -> str:
        turn = prompt.count("<|im_start|>assistant") - 1
        text = turns[turn] if turn < len(turns) else COMPLETE
        written = ids.unopened(text)
        assert written is not None
        return written

    sampler = ToldSampler(tokenizer, answer)
    return SampledPolicy(sampler, ids, SamplingConfig(max_new_tokens=200), name="p", context=8192)


def stored(
    folder: Path, policy: Policy, cfg: SearchConfig, *rewards: float | None, **row: Any
) -> list[Trajectory]:
    """Return the episodes of a run with one episode per reward."""
    images: dict[str, bytes] = {}
    questions = [ask(f"q{n}", text="출생아 수는 몇 명?", **row) for n in range(len(rewards) or 1)]
    done = played(policy, questions, pictures=images, **cfg.episode.model_dump())
    for episode, value in zip(done, rewards, strict=False):
        episode.reward = EpisodeReward(status="failed" if value is None else "ok", value=value)
    store = TrajectoryStore(folder / "trajectories", "r")
    for name, png in images.items():
        store.save_image(name, png)
    store.write_step(3, done)
    return done


def lines(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / ROWS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_rows(folder: Path, model: Path, run_dir: Path) -> SftPart:
    """Read the rows as `trainer sft` does."""
    cfg = sft_config(model, folder / ROWS, run_dir, data={"max_length": None})
    return load_train(cfg, load_tokenizer(cfg.policy))


@pytest.mark.parametrize(
    ("name", "sees"),
    [(name, False) for name in TEMPLATES] + [(name, True) for name in VISION_MODELS],
)
def test_fine_tuning_learns_the_ids_and_the_mask_of_reinforcement(
    name: str, sees: bool, tmp_path: Path
) -> None:
    """Check templates that change earlier turns: Qwen3's removes their thinking."""
    model = save_reader(tmp_path / "model", name, sees=sees)
    observation_options: Any = {"sight": TINY_SIGHT} if sees else {"observation": "text"}
    cfg = search_config(model, **observation_options)
    (done,) = stored(tmp_path, sampled(model, cfg, *TURNS), cfg)
    assert [turn.action for turn in done.turns] == ["search", "crop", "search", "complete"]
    export_sft(tmp_path, tmp_path / "rows", cfg)
    (row,) = read_rows(tmp_path / "rows", model, tmp_path / "sft").rows
    assert done.tokens is not None
    assert row.ids == done.tokens.prompt_ids + done.tokens.completion_ids
    prompt = [0] * len(done.tokens.prompt_ids)
    assert row.mask == prompt + [int(action) for action in done.tokens.action_mask]
    assert [Path(path).stem for path in row.images] == done.tokens.images
    assert bool(row.images) == sees
    text = load_tokenizer(cfg.policy).decode(row.ids)
    assert "뷁 🙂</think>" in text and text.endswith(
        COMPLETE.removeprefix("<think>") + "<|im_end|>"
    )


def test_the_ids_are_those_that_were_sampled_though_texts_read_otherwise(tmp_path: Path) -> None:
    """Check ids with one token per letter, which no tokenizer produces."""
    model = save_reader(tmp_path / "model", "qwen2_5", sees=False)
    cfg = search_config(model, observation="text")
    policy = sampled(model, cfg, *TURNS)
    policy._sampler.tokenizer = OneByOne(policy.ids.tokenizer)  # type: ignore[attr-defined]
    (done,) = stored(tmp_path, policy, cfg)
    assert done.tokens is not None and done.turns[1].text == TURNS[1]
    export_sft(tmp_path, tmp_path / "rows", cfg)
    (row,) = lines(tmp_path / "rows")
    assert row["input_ids"] == done.tokens.prompt_ids + done.tokens.completion_ids
    assert row["action_mask"][-len(done.tokens.action_mask) :] == [
        *map(int, done.tokens.action_mask)
    ]
    done.turns[0].text = search("deaths")
    later = done.model_copy(update={"step": 4, "tokens": done.tokens})
    TrajectoryStore(tmp_path / "trajectories", "r").write_step(4, [later])
    export_sft(tmp_path, tmp_path / "others", cfg, steps=[4])
    (other,) = lines(tmp_path / "others")
    text = load_tokenizer(cfg.policy).decode(other["input_ids"])
    assert search("deaths") in text and TURNS[1] in text, "of other texts, ids are made anew"


class OneByOne:
    """A tokenizer that encodes ASCII text letter by letter."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        segment_ids = [
            self._tokenizer(part, **options)["input_ids"] for part in re.findall(_SEGMENT, text)
        ]
        return {"input_ids": [token for segment in segment_ids for token in segment]}


def test_tags_that_are_tokens_of_their_own_are_no_fault(tmp_path: Path) -> None:
    model = save_reader(tmp_path / "model", "qwen2_5", sees=False)
    write_tokenizer("qwen3", model)  # tokens are added behind all others
    tokenizer = load_tokenizer(search_config(model).policy)
    tokenizer.add_tokens(["<search>", "</search>", "<odd>"], special_tokens=True)
    tokenizer.save_pretrained(model)
    odd = "<think>a</think><search>b<odd></search>"
    assert dict(exported(tmp_path / "a", model, odd).left_out) == {
        "a turn has a special token of the model in it": 1
    }
    tag = tokenizer.convert_tokens_to_ids("</search>")
    row = lines(tmp_path / "a/rows")[0]
    marked = zip(row["input_ids"], row["action_mask"], strict=True)
    assert [i for i, is_trained in marked if is_trained].count(tag) == 2


def test_the_messages_beside_are_the_same_to_a_template_that_keeps_turns(tmp_path: Path) -> None:
    """Compare the ids up to the last end of a turn; text after it is never sampled."""
    model = save_reader(tmp_path / "model", "qwen2_5", sees=False)
    cfg = search_config(model, observation="text")
    stored(tmp_path, sampled(model, cfg, *TURNS, "garbage"), cfg)
    export_sft(tmp_path, tmp_path / "rows", cfg)
    (row,) = lines(tmp_path / "rows")
    tokenizer = load_tokenizer(cfg.policy)
    messages = [m | {"content": m["content"].strip()} for m in row["messages"]]
    assert [m["role"] for m in messages][:3] == ["system", "user", "assistant"]
    assert [m.get("weight", 1) for m in messages if m["role"] == "assistant"] == [1, 1, 1, 0, 1]
    message_ids = label(tokenizer, row["messages"], ChatConfig(), template("qwen2_5")).tokens.ids
    assert message_ids[: len(row["input_ids"])] == row["input_ids"]


def test_an_invalid_turn_is_read_and_not_learned(tmp_path: Path) -> None:
    model = save_reader(tmp_path / "model", "qwen3", sees=False)
    cfg = search_config(model, observation="text")
    (done,) = stored(tmp_path, sampled(model, cfg, "garbage", TURNS[0]), cfg)
    export = export_sft(tmp_path, tmp_path / "rows", cfg)
    assert (export.rows, export.turns, export.invalid) == (1, 3, 1)
    (row,) = read_rows(tmp_path / "rows", model, tmp_path / "sft").rows
    tokenizer = load_tokenizer(cfg.policy)
    trained = tokenizer.decode(
        [i for i, is_learned in zip(row.ids, row.mask, strict=True) if is_learned]
    )
    assert trained == f"{TURNS[0]}<|im_end|>{COMPLETE}<|im_end|>"
    assert "garbage<|im_end|>" in tokenizer.decode(row.ids)
    assert done.tokens is not None and export.longest == len(row.ids)


@pytest.mark.parametrize("end_filter", ["complete", "any"])
def test_a_forced_end_is_never_learned(end_filter: Ended, tmp_path: Path) -> None:
    model = save_reader(tmp_path / "model", "qwen2_5", sees=False)
    cfg = search_config(model, observation="text", max_turns=2)
    (done,) = stored(tmp_path, sampled(model, cfg, *TURNS[:2]), cfg)
    assert done.end == "forced" and done.tokens is not None
    if end_filter == "complete":
        with pytest.raises(UserError, match="1 left out: ended as forced"):
            export_sft(tmp_path, tmp_path / "rows", cfg)
        assert not (tmp_path / "rows").exists()
        return
    export_sft(tmp_path, tmp_path / "rows", cfg, end_filter="any")
    (row,) = read_rows(tmp_path / "rows", model, tmp_path / "sft").rows
    assert row.ids == done.tokens.prompt_ids + done.tokens.completion_ids
    assert "no turns left" not in load_tokenizer(cfg.policy).decode(row.ids)


def test_episodes_are_chosen_by_reward_and_told_when_left_out(tmp_path: Path) -> None:
    model = save_reader(tmp_path / "model", "qwen2_5", sees=False)
    cfg = search_config(model, observation="text")
    stored(tmp_path, scripted(*TURNS), cfg, 1.0, 0.25, None, 0.5)
    export = export_sft(tmp_path, tmp_path / "rows", cfg, min_reward=0.5)
    assert [row["reward"] for row in lines(tmp_path / "rows")] == [1.0, 0.5]
    assert dict(export.left_out) == {"a reward below 0.5": 1, "no reward": 1}
    assert "left out: 1 episodes: no reward" in export.lines()
    assert export_sft(tmp_path, tmp_path / "all", cfg).rows == 4
    summed = tmp_path / "summed"
    stored(summed, scripted(*TURNS), cfg, 0.4 * 1 + 0.5 * 0.6 + 0.1)  # 0.7999999999999999
    assert export_sft(summed, tmp_path / "least", cfg, min_reward=0.8).rows == 1
    with pytest.raises(UserError, match="no episodes"):
        export_sft(tmp_path, tmp_path / "none", cfg, steps=[])


def exported(tmp_path: Path, model: Path, *turns: str, **changes: Any) -> SftExport:
    """Export a chat server's episode for a model, together with one that fits the model."""
    cfg = search_config(model, observation="text")
    bad = stored(tmp_path, scripted(*TURNS), cfg, 1.0, 1.0)[1]
    for turn, text in zip(bad.turns, turns, strict=False):
        turn.text = text
    bad = bad.model_copy(update={"step": 4} | changes)
    TrajectoryStore(tmp_path / "trajectories", "r").write_step(4, [bad])
    return export_sft(tmp_path, tmp_path / "rows", cfg)


def test_what_a_model_cannot_have_sampled_is_left_out(tmp_path: Path) -> None:
    plain = save_reader(tmp_path / "plain", "qwen2_5", sees=False)
    export = exported(tmp_path / "a", plain, "<think>a</think><search>b</search><|im_end|>")
    assert dict(export.left_out) == {"a turn has a special token of the model in it": 1}
    thinks = save_reader(tmp_path / "thinks", "qwen3_5_think", sees=False)
    export = exported(tmp_path / "b", thinks, "<search>b</search>")
    assert "the think block that the template opens" in next(iter(export.left_out))
    export = exported(tmp_path / "c", plain, end="failed")
    assert dict(export.left_out) == {"ended as failed": 1}


def test_the_tags_may_be_special_tokens_of_the_model(tmp_path: Path) -> None:
    model = save_reader(tmp_path / "model", "qwen2_5", sees=False)
    file = model / "tokenizer_config.json"
    tokenizer_config = json.loads(file.read_text(encoding="utf-8"))
    added = tokenizer_config["added_tokens_decoder"].items()
    tags = {int(i): token for i, token in added if token["content"] in ("<think>", "</think>")}
    assert len(tags) == 2 and not any(token["special"] for token in tags.values())
    for token in tags.values():
        token["special"] = True
    file.write_text(json.dumps(tokenizer_config), encoding="utf-8")
    export = exported(tmp_path, model)
    assert export.rows == 3 and not export.left_out
    row = lines(tmp_path / "rows")[0]
    trained_ids = {
        i for i, is_action in zip(row["input_ids"], row["action_mask"], strict=True) if is_action
    }
    assert tags.keys() <= trained_ids


def test_rows_that_the_model_cannot_read_are_refused(tmp_path: Path) -> None:
    short = save_reader(tmp_path / "short", "qwen2_5", sees=False, max_position_embeddings=300)
    cfg = search_config(short, observation="text")
    stored(tmp_path, scripted(*TURNS), cfg)
    with pytest.raises(UserError, match="more than the 300 ids"):
        export_sft(tmp_path, tmp_path / "rows", cfg)
    with pytest.raises(UserError, match="reads only text"):
        export_sft(tmp_path, tmp_path / "rows", search_config(short))
    with pytest.raises(UserError, match="--model"):
        export_sft(tmp_path, tmp_path / "rows", search_config(None))


def test_the_end_of_a_turn_may_be_known_to_the_generation_config_alone(tmp_path: Path) -> None:
    model = save_reader(tmp_path / "model", "qwen2_5", sees=False)
    path = model / "tokenizer_config.json"
    tokenizer_config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(tokenizer_config | {"eos_token": "<|endoftext|>"}), encoding="utf-8")
    cfg = search_config(model, observation="text")
    stored(tmp_path, scripted(*TURNS), cfg)
    settings = transformers.GenerationConfig(eos_token_id=[151643])
    settings.save_pretrained(model)
    with pytest.raises(UserError, match="at which the policy does not stop"):
        export_sft(tmp_path, tmp_path / "rows", cfg)
    settings.eos_token_id = [151643, 151645]
    settings.save_pretrained(model)
    export_sft(tmp_path, tmp_path / "rows", cfg)
    assert lines(tmp_path / "rows")[0]["input_ids"][-1] == 151645
