"""A run from its start to its end: by flags, by YAML, and what it leaves."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from typer.testing import CliRunner

from scorekit.errors import UserError
from tests.kits.trainer.roleplay import TEMPLATE, turn, write_policy, write_turns
from trainer.__main__ import app
from trainer.roleplay.__main__ import main
from trainer.roleplay.rewards import REWARDS
from trainer.roleplay.scoring import grounding
from trainer.roleplay.training import run as training
from trainer.roleplay.training.check import check_run
from trainer.roleplay.training.run import run_roleplay
from trainer.runs.checkpoints.checkpoint import damage_reason
from trainer.runs.run_log import read_jsonl


def seed_flags(place, run_dir):
    """The requirements' command but for paths, and a length that a tiny model fills at once."""
    return [
        *("--model_name", str(place.policy), "--train_data", str(place.train)),
        *("--eval_data", str(place.held_out), "--output_dir", str(run_dir)),
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "16"),
        *("--num_train_epochs", "2", "--learning_rate", "2e-6", "--max_prompt_length", "1024"),
        *("--max_completion_length", "12", "--num_generations", "4"),
        *("--per_device_eval_batch_size", "4", "--gradient_checkpointing", "--bf16"),
        *("--use_lora", "--load_in_4bit", "--bnb_4bit_quant_type", "nf4"),
        *("--bnb_4bit_use_double_quant", "--bnb_4bit_compute_dtype", "bfloat16"),
        *("--reward_embedding_model", place.server.url, "--reward_embedding_batch_size", "16"),
        *("--reward_calibration", str(place.anchors), "--use_cpu"),
    ]


def test_the_requirements_command_trains_in_4_bits(place, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main(seed_flags(place, run_dir)) == 0
    said = capsys.readouterr()
    assert "policy: " in said.out and "report: " in said.out
    assert "loss_type dapo, beta 0.0, scale_rewards group" in said.err
    assert "stops ['<|im_end|>']" in said.err
    updates, evals = (read_jsonl(run_dir / f"{name}.jsonl") for name in ("log", "eval"))
    assert [line["update"] for line in updates] == [1, 2]  # of 6 turns 4 make a batch, twice
    assert [line["update"] for line in evals] == [0, 2]  # though eval_strategy is nobody's flag
    for name in [f"{reward.name}_mean" for reward in REWARDS]:
        assert 0 <= updates[-1][name] <= 1 and 0 <= evals[-1][name] <= 1
    assert evals[0]["grounded/echo"] == 0 and "grounded/echo 0.000" in said.err
    for name in ("reward_group_std", "clipped_ratio", "grad_norm", "rollout_s", "grounded/echo"):
        assert updates[-1][name] is not None
    assert updates[-1]["grad_norm"] > 0
    for name in ("chrf", "copied_user", "repeated", "distinct", "characters", "kl_start"):
        assert evals[-1][name] is not None
    assert evals[0]["kl_start"] == 0  # adapters begin as nothing
    checkpoint = run_dir / "checkpoints/step-000002"
    assert damage_reason(checkpoint) is None
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "training_args.bin").exists()  # a pickle
    lines = read_jsonl(run_dir / "completions/train-000002.jsonl")
    assert len(lines) == 16 and {line["group"] for line in lines} == {0, 1, 2, 3}
    assert lines[0]["id"].startswith("t") and "format/why" in lines[0]
    assert lines[0]["reward"] == pytest.approx(
        sum(r.weight * lines[0]["rewards"][r.name] for r in REWARDS), abs=1e-6
    )
    settings = json.loads((run_dir / "grpo.json").read_text())
    assert settings["reward_weights"] == [0.28, 0.18, 0.14, 0.16, 0.24]
    page = (run_dir / "report.html").read_text()
    assert "reward_format" in page and "never a reward" in page and "<svg" in page
    assert "replies that echo the user" in page
    done = CliRunner().invoke(app, ["export", str(run_dir), "--to", str(tmp_path / "merged")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "merged/model.safetensors").is_file()


def test_a_run_that_learns_to_echo_the_user_is_warned_of(place, tmp_path, monkeypatch):
    """The replies of a tiny policy are noise: what counts as an echo is said from outside."""
    read = []
    monkeypatch.setattr(grounding, "is_echo", lambda _: len(read) >= 14 or bool(read.append(0)))
    run_roleplay(place.config(tmp_path / "run"))
    messages = (tmp_path / "run/messages.log").read_text(encoding="utf-8")
    assert "(evaluation), 0.00 at the start: the policy learns to repeat the user" in messages


def test_adapters_on_4_bits_learn_in_float32(place, tmp_path):
    """TRL makes them bfloat16, which an update of 2e-6 would not change."""
    from safetensors.torch import load_file

    run_dir = tmp_path / "run"
    run_roleplay(
        place.config(
            run_dir,
            policy__load_in_4bit=True,
            policy__lora={"r": 2},
            policy__weights_dtype="bfloat16",
            grpo__learning_rate=1e-6,
            grpo__max_steps=1,
        )
    )
    saved = load_file(run_dir / "checkpoints/step-000001/adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(tensor.abs().sum() > 0 for tensor in saved.values())


def test_yaml_trains_evaluates_and_compares(place, tmp_path):
    run_dir = tmp_path / "run"
    config = tmp_path / "run.yaml"
    cfg = place.config(run_dir, eval__eval_every_n_updates=1, misc__trackers=["tensorboard"])
    config.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    done = CliRunner().invoke(app, ["train", "--config", str(config)])
    assert done.exit_code == 0, done.output
    evals = read_jsonl(run_dir / "eval.jsonl")
    assert [line["update"] for line in evals] == [0, 1, 2]
    assert evals[0]["kl_start"] == pytest.approx(0, abs=1e-6) and evals[2]["kl_start"] > 0
    assert any((run_dir / "trackers").rglob("events.out.tfevents*"))
    checkpoint = run_dir / "checkpoints/step-000002"
    told = ["--set", f"misc.run_dir={tmp_path / 'ev'}", "--set", f"policy.path={checkpoint}"]
    evaluate = ["evaluate", "--config", str(config), *told, "--set", "reward.calibration=null"]
    done = CliRunner().invoke(app, [*evaluate, "--against", str(place.policy)])
    assert done.exit_code == 0, done.output
    now = json.loads((tmp_path / "ev/evaluation.json").read_text())
    assert now["reward_mean"] == pytest.approx(evals[2]["reward_mean"], abs=1e-6)
    assert now["kl_start"] == pytest.approx(evals[2]["kl_start"], abs=1e-6)
    compared = json.loads((tmp_path / "ev/comparison.json").read_text())
    by_key = {figure["key"]: figure for figure in compared["figures"]}
    assert by_key["reward_mean"]["low"] is not None and by_key["chrf"]["sources"] == 12
    assert "95 % interval" in (tmp_path / "ev/comparison.html").read_text()
    again = CliRunner().invoke(app, evaluate)
    assert again.exit_code == 2 and "--overwrite" in again.stderr
    earlier = ["--against", str(tmp_path / "ev"), "--set", f"misc.run_dir={tmp_path / 'ev2'}"]
    assert CliRunner().invoke(app, [*evaluate, *earlier]).exit_code == 0
    report = CliRunner().invoke(app, ["report", str(run_dir)])
    assert report.exit_code == 0 and "report.html" in report.stdout


def test_check_finds_faults_before_weights_load(place, tmp_path, monkeypatch):
    broken = write_policy(
        tmp_path / "broken",
        TEMPLATE.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
    )
    good = check_run(place.config(tmp_path / "run"))
    assert good.failed == [] and not (tmp_path / "run/log.jsonl").exists()
    found = check_run(
        place.config(
            tmp_path / "run",
            policy__path=str(broken),
            grpo__options={"use_vlm": True},
            reward__embedding_model=str(tmp_path / "nowhere"),
            misc__trackers=["nobody"],
        )
    )
    faults = {fault.name: fault.result for fault in found.failed}
    assert any(name.startswith("chat template") for name in faults)
    assert "did you mean use_vllm" in faults["grpo"]
    assert "no such folder" in faults["rewards"]
    assert "misc.trackers" in faults
    monkeypatch.setattr(training, "load_policy", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match="the chat template fails its check"):
        run_roleplay(place.config(tmp_path / "run", policy__path=str(broken)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"grpo__gradient_accumulation_steps": 32}, "6 turns are fewer than the 32 prompts"),
        ({"grpo__options": {"save_steps": 3}}, "set misc.save_every_n_updates"),
        ({"grpo__options": {"beta": 3}}, "set grpo.beta"),
        ({"grpo__options": {"push_to_hub": True}}, "this command does not support it"),
        ({"grpo__options": {"use_vlm": True}}, "did you mean use_vllm"),
        ({"grpo__steps_per_generation": 3}, "must divide each other"),
        ({"grpo__steps_per_generation": 4}, "must be multiples of 2"),
        ({"grpo__options": {"optim": "no such"}}, "grpo: .*no such"),
        ({"data__max_prompt_length": 8}, "prompts have more than data.max_prompt_length 8"),
        ({"reward__weights": {"reward_length": 1.0}}, "unknown function 'reward_length'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_told_before_weights_load(place, tmp_path, monkeypatch, changes, told):
    monkeypatch.setattr(training, "load_policy", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=told):
        run_roleplay(place.config(tmp_path / "run", **changes))


def test_rows_whose_prompt_is_too_long_are_left_out_and_counted(place, tmp_path, caplog):
    rows = [turn(k) for k in range(6)]
    rows[0]["prompt"][1]["content"] = "가" * 200
    train = write_turns(tmp_path / "train.jsonl", rows)
    run_dir = tmp_path / "run"
    artifacts = run_roleplay(
        place.config(
            run_dir, data__train=str(train), data__max_prompt_length=300, grpo__max_steps=1
        )
    )
    assert artifacts.exit_code == 0
    told = (run_dir / "messages.log").read_text()
    assert "1 of 6 prompts have more than data.max_prompt_length 300 tokens" in told
    assert "sampled replies are truncated" in told or "clipped_ratio" not in told
