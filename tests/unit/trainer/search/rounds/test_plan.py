"""Check rounds.yaml: what is refused before the first step and the resulting configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scorekit.config import check_config, load_config
from scorekit.errors import UserError
from trainer.search.rounds.config import STEPS, RoundsConfig
from trainer.search.rounds.plan import LoopPlan, LoopState, changed, check_plan, settings_of

ROOT = Path(__file__).parents[5]
TRAIN = {
    "task": "search",
    "data": {"train": "questions.jsonl", "train_limit": 7},
    "policy": {"path": "policy", "revision": "main"},
    "retriever": {"url": "http://127.0.0.1:1"},
}
VERIFIER = {"base_url": "http://127.0.0.1:2/v1", "model": "other"}


@pytest.fixture(autouse=True)
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "questions.jsonl").touch()
    monkeypatch.chdir(tmp_path)


def plan(out: Path, *rounds: dict[str, Any], **sections: Any) -> LoopPlan:
    values = {"train": TRAIN, **sections, "rounds": list(rounds) or [{"name": "one"}]}
    return LoopPlan(check_config(RoundsConfig, values, "rounds.yaml"), out)


def test_the_demos_rounds_are_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides = ["curation.verify.verifier.base_url=http://127.0.0.1:2/v1"]
    overrides += ["curation.verify.verifier.model=v", "train.answering.generator.model=g"]
    cfg = load_config(RoundsConfig, ROOT / "configs/search/demo_rounds.yaml", overrides)
    state = check_plan(LoopPlan(cfg, Path("out")))
    assert state.policy == "demo/models/search_policy"
    assert state.data["train"] == "demo/search/questions.jsonl"


def presets(name: str, *more: str) -> RoundsConfig:
    overrides = ["train.policy.path=MODEL", "train.data.train=demo/search/questions.jsonl"]
    overrides += ["train.answering.generator.model=NAME", *more]
    overrides += [f"curation.verify.verifier.{key}={value}" for key, value in VERIFIER.items()]
    return load_config(RoundsConfig, ROOT / f"configs/search/{name}.yaml", overrides)


@pytest.mark.parametrize("name", ["rounds", "rounds_sft_each_round"])
def test_the_presets_are_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cfg = presets(name, "curation.rewrite.rewriter.model=NAME3")
    loop_plan = LoopPlan(cfg, Path("out"))
    check_plan(loop_plan)
    last = loop_plan.training(cfg.rounds[-1])
    assert last.misc.run_dir == "out/05-round3/train"
    assert last.data.train == "demo/search/questions.jsonl"


def test_the_shortest_loop_calls_no_server_between_its_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    overrides = ["train.policy.path=MODEL", "train.data.train=demo/search/questions.jsonl"]
    overrides += ["train.answering.generator.model=NAME"]
    cfg = load_config(RoundsConfig, ROOT / "configs/search/rounds_short.yaml", overrides)
    loop_plan = LoopPlan(cfg, Path("out"))
    check_plan(loop_plan)  # no verifier is set, and none is asked for
    assert [training.then for training in cfg.rounds] == [
        ["buckets", "focus", "distill", "sft"],
        [],
    ]
    assert not {"alternatives", "diagnose", "hallucinations", "verify", "rewrite"} & {
        name for training in cfg.rounds for name in training.then
    }
    assert loop_plan.training(cfg.rounds[-1]).misc.run_dir == "out/02-round2/train"


def test_the_requirements_rounds_are_those_of_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check questions per update, episodes per question, turns and answer tokens of each round."""
    monkeypatch.chdir(ROOT)
    cfg = presets("rounds", "curation.rewrite.rewriter.model=NAME3")
    trainings = [LoopPlan(cfg, Path("out")).training(training) for training in cfg.rounds]
    table = [
        (
            training.rl.batch_size,
            training.rollout.n_agent,
            training.episode.max_turns,
            training.reward.preset,
        )
        for training in trainings
    ]
    assert table == [
        (32, 4, 7, "phase1"),
        (32, 4, 7, "phase2"),
        (16, 8, 7, "focused"),
        (8, 16, 15, "focused"),
        (32, 16, 15, "focused"),
    ]
    tokens = [training.answering.generator.max_output_tokens for training in trainings[1:]]
    assert tokens == [2048, 3072, 3072, 5120]
    learns = [training.name for training in cfg.rounds if "sft" in training.then]
    assert learns == ["round2"], "round 2 begins with the merged policy of round 1"
    (after,) = (training for training in cfg.rounds if training.name == "round2")
    assert {"distill", "rewrite"} < set(after.then)
    assert after.curation["focus"]["take"] == ["all"], "round 3 plays round 2's rows again"


@pytest.mark.parametrize(
    ("rounds", "sections", "message"),
    [
        ([{"name": "a"}, {"name": "a"}], {}, "'a' is the name of several rounds"),
        ([{"name": "../a"}], {}, "name"),
        ([{"name": "a", "then": ["sft"]}], {}, "sft requires the rows of distill"),
        ([{"name": "a", "then": ["focus", "focus"]}], {}, "named twice"),
        ([{"name": "a", "then": ["sweep"]}], {}, "then"),
        ([{"name": "a", "limits": {"hours": 0}}], {}, "limits.hours"),
        ([{"name": "a", "config": "no.yaml"}], {}, "a: config: no.yaml: no such file here"),
        ([{"name": "a", "train": {"rl": {"lrr": 1}}}], {}, "rl.lrr"),
        ([{"name": "a", "curation": {"focus": {"taken": []}}}], {}, "focus.taken"),
        ([{"name": "a", "sft": {"sft": {"epochs": 1}}}], {}, "sft.epochs"),
        ([{"name": "a", "then": ["verify"]}], {}, "set base_url and model"),
        (
            [{"name": "a", "then": ["distill", "rewrite"]}],
            {"curation": {"rewrite": {"rewriter": {"model": ""}}}},
            "rewriter.model",
        ),
        ([{"name": "a", "train": {"data": {"columns": {"question": "q"}}}}], {}, "data.columns"),
        ([{"name": "a", "train": {"data": {"train": None}}}], {}, "data.train: not set"),
        (
            [{"name": "a"}, {"name": "b", "train": {"data": {"train": "mine"}}}],
            {},
            "b: train.data.train: a later round uses",
        ),
        (
            [{"name": "a"}, {"name": "b", "train": {"policy": {"path": "mine"}}}],
            {},
            "b: train.policy.path: a later round uses",
        ),
        ([{"name": "a", "sft": {"data": {"train": "x"}}}], {}, "sft.data.train: only the loop"),
        (
            [{"name": "a"}],
            {"curation": {"data": {"train": "x"}}},
            "curation.data.train: only the loop",
        ),
        ([{"name": "a", "sft": {"data": "x"}}], {}, "sft.data: expected a mapping"),
        (
            [{"name": "a", "train": {"data": {"eval": "no.jsonl"}}}],
            {},
            "no.jsonl: the file does not exist",
        ),
        (
            [{"name": "a", "then": ["alternatives"]}],
            {"train": TRAIN | {"answering": {"generator": {"model": ""}}}},
            "alternatives: requires the generator",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    rounds: list[dict[str, Any]], sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        check_plan(plan(tmp_path, *rounds, **sections))


def test_a_verifier_that_is_the_generator_is_refused(tmp_path: Path) -> None:
    service = {"base_url": "http://127.0.0.1:2/v1", "model": "same"}
    train = TRAIN | {"answering": {"generator": service}}
    loop_plan = plan(
        tmp_path,
        {"name": "a", "then": ["verify"]},
        train=train,
        curation={"verify": {"verifier": service}},
    )
    with pytest.raises(UserError, match="verifier"):
        check_plan(loop_plan)


def test_steps_are_done_in_their_own_order(tmp_path: Path) -> None:
    loop_plan = plan(tmp_path, {"name": "a", "then": ["sft", "focus", "distill", "buckets"]})
    assert loop_plan.cfg.rounds[0].then == ["buckets", "focus", "distill", "sft"]
    assert [step for step in STEPS if step in loop_plan.cfg.rounds[0].then] == loop_plan.cfg.rounds[
        0
    ].then


def test_a_later_round_plays_what_was_kept_from_the_policy_that_was_left(tmp_path: Path) -> None:
    loop_plan = plan(tmp_path, {"name": "one"}, {"name": "two", "train": {"rl": {"batch_size": 2}}})
    state = check_plan(loop_plan)
    assert state == LoopState(
        {"train": "questions.jsonl", "train_split": None, "train_limit": 7}, "policy"
    )
    first = loop_plan.training(loop_plan.cfg.rounds[0], state)
    assert (first.data.train_limit, first.policy.revision) == (7, "main")
    state.rows, state.policy, state.runs = "kept.jsonl", "left", [tmp_path / "run"]
    second = loop_plan.training(loop_plan.cfg.rounds[1], state)
    assert (second.data.train, second.data.train_limit) == ("kept.jsonl", None)
    assert (second.policy.path, second.policy.revision) == ("left", None)
    assert second.rl.batch_size == 2
    assert second.misc.run_dir == str(tmp_path / "02-two/train")
    curation = loop_plan.curation(loop_plan.cfg.rounds[1], state)
    assert (curation.data.train, curation.data.train_limit) == ("questions.jsonl", 7)
    assert curation.answers == str(tmp_path / "answers.sqlite")
    assert curation.retriever.url == "http://127.0.0.1:1"


def test_rows_are_learned_at_their_length_unless_another_is_told(tmp_path: Path) -> None:
    loop_plan = plan(tmp_path, {"name": "one"}, {"name": "two", "sft": {"data": {"max_length": 5}}})
    lengths = [
        loop_plan.finetuning(round_cfg, "p", Path("r"), 123).data.max_length
        for round_cfg in loop_plan.cfg.rounds
    ]
    assert lengths == [123, 5]


def test_all_questions_are_played_whole_where_a_command_has_written_them(tmp_path: Path) -> None:
    loop_plan = plan(tmp_path, {"name": "one"}, {"name": "two", "train": {"rl": {"batch_size": 2}}})
    state = check_plan(loop_plan)
    state.data, state.runs = {"train": "grown.jsonl"}, [tmp_path / "run"]
    data = loop_plan.training(loop_plan.cfg.rounds[1], state).data
    assert (data.train, data.train_limit) == ("grown.jsonl", None)


def settings(out: Path, step: str, *flags: object, **sections: Any) -> dict[str, Any]:
    loop_plan = plan(out, {"name": "a", **sections})
    round_cfg = loop_plan.cfg.rounds[0]
    cfg = loop_plan.training(round_cfg) if step == "train" else loop_plan.curation(round_cfg)
    return settings_of(step, cfg, out, flags)


def test_a_done_step_may_lie_behind_another_address_and_nothing_else(tmp_path: Path) -> None:
    def differ(step: str, **sections: Any) -> list[str]:
        return list(changed(settings(out, step), settings(out, step, **sections)))

    out = tmp_path / "out"

    def asks(**keys: Any) -> dict[str, Any]:
        return {"curation": {"verify": {"verifier": VERIFIER | keys}}}

    assert differ("train", train={"retriever": {"url": "http://127.0.0.1:9"}}) == []
    (difference,) = differ("train", train={"rollout": {"n_agent": 3}})
    assert difference.startswith("rollout.n_agent: ") and difference.endswith("3 now")
    (difference,) = differ("train", train={"rl": {"num_updates": 7}})
    assert difference.endswith("7 now")
    (difference,) = differ("train", train={"rl": {"epochs": 2}})
    assert difference == "rl.epochs: None then, 2 now"
    (difference,) = differ("train", train={"policy": {"path": "other"}})
    assert difference == "policy.path: 'policy' then, 'other' now"
    before = settings(out, "verify", **asks())
    for key, value in {"base_url": "http://a/v1", "max_requests": 3, "api_key_env": "K"}.items():
        assert changed(before, settings(out, "verify", **asks(**{key: value}))) == []
    assert differ("verify", curation={"verify": {"k": 5}}) == ["verify.k: 3 then, 5 now"]
    other = {"answering": {"generator": {"model": "another"}}}
    (difference,) = differ("verify", curation=other)
    assert difference.startswith("answering.generator.model")
    assert differ("focus", curation=other) == []
    slower = {"answering": {"generator": {"max_requests": 1, "base_url": "http://h/v1"}}}
    assert differ("verify", curation=slower) == []
    assert differ("alternatives", curation={"alternatives": {"embeddings_url": "http://h"}}) == []
    (difference,) = differ("focus", curation={"buckets": {"mastered": 0.9}})
    assert difference.startswith("buckets.mastered")


def test_sft_on_other_rows_is_another(tmp_path: Path) -> None:
    loop_plan = plan(tmp_path, {"name": "a"})
    round_cfg = loop_plan.cfg.rounds[0]

    def sft_settings(rows: str, policy: str, longest: int) -> dict[str, Any]:
        return settings_of(
            "sft", loop_plan.finetuning(round_cfg, policy, tmp_path / rows, longest), tmp_path
        )

    before = sft_settings("a/rows.jsonl", "p", 5)
    assert before["data.train"] == "OUT/a/rows.jsonl"
    for other, key in (("b", "p", 5), "data.train"), (("a/rows.jsonl", "q", 5), "policy.path"):
        (difference,) = changed(before, sft_settings(*other))
        assert difference.startswith(key)
    (difference,) = changed(before, sft_settings("a/rows.jsonl", "p", 6))
    assert difference == "data.max_length: 5 then, 6 now"


def test_rows_that_a_later_rounds_file_names_are_not_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "later.yaml"
    file.write_text("task: search\ndata: {train: not-yet.jsonl}\n")
    train = {key: section for key, section in TRAIN.items() if key != "data"}
    first = {"name": "a", "train": {"data": TRAIN["data"]}}
    check_plan(plan(tmp_path, first, {"name": "b", "config": str(file)}, train=train))
    with pytest.raises(UserError, match=r"a: data\.train: not-yet\.jsonl: the file does not exist"):
        check_plan(plan(tmp_path, {"name": "a", "config": str(file)}, train=train))


def test_what_a_done_step_has_read_is_known_wherever_the_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    done_settings = settings(
        out, "focus", "--run", out / "01-a/train", "--verified", out / "01-a/verify"
    )
    assert done_settings["read"] == ["--run", "OUT/01-a/train", "--verified", "OUT/01-a/verify"]
    short = Path("out")
    assert (
        changed(
            done_settings,
            settings(
                short,
                "focus",
                *(
                    part if isinstance(part, str) else short / part.relative_to(out)
                    for part in ("--run", out / "01-a/train", "--verified", out / "01-a/verify")
                ),
            ),
        )
        == []
    )
    (difference,) = changed(done_settings, settings(out, "focus", "--run", out / "01-a/train"))
    assert difference.startswith("read: ")
