"""Test full runs, configured by flags and by YAML, and the files they write."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from typer.testing import CliRunner

from scorekit.errors import UserError
from tests.kits.trainer.roleplay import TEMPLATE, turn, write_policy, write_turns
from trainer.__main__ import app
from trainer.rl import policy
from trainer.roleplay import formulas
from trainer.roleplay.__main__ import main
from trainer.roleplay.rewards import REWARDS
from trainer.roleplay.training.check import check_run
from trainer.roleplay.training.run import run_roleplay
from trainer.runs.checkpoints.checkpoint import damage_reason
from trainer.runs.messages import show_messages
from trainer.runs.run_log import read_jsonl
from trainer.runs.trl import start

DRAWS_CHARTS = ("test_the_requirements_command_trains_in_4_bits",)


def seed_flags(run_files, run_dir):
    """Return TRL's documented command, with other paths and a length that a tiny model reaches."""
    return [
        *("--model_name", str(run_files.policy), "--train_data", str(run_files.train)),
        *("--eval_data", str(run_files.held_out), "--output_dir", str(run_dir)),
        *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "16"),
        *("--num_train_epochs", "2", "--learning_rate", "2e-6", "--max_prompt_length", "1024"),
        *("--max_completion_length", "12", "--num_generations", "4"),
        *("--per_device_eval_batch_size", "4", "--gradient_checkpointing", "--bf16"),
        *("--use_lora", "--load_in_4bit", "--bnb_4bit_quant_type", "nf4"),
        *("--bnb_4bit_use_double_quant", "--bnb_4bit_compute_dtype", "bfloat16"),
        *("--reward_embedding_model", run_files.server.url, "--reward_embedding_batch_size", "16"),
        *("--reward_calibration", str(run_files.anchors), "--use_cpu"),
    ]


def test_the_requirements_command_trains_in_4_bits(run_files, tmp_path, capsys, recwarn):
    run_dir = tmp_path / "run"
    show_messages()
    assert main(seed_flags(run_files, run_dir)) == 0
    assert [str(w.message) for w in recwarn if issubclass(w.category, FutureWarning)] == []
    captured = capsys.readouterr()
    assert "policy: " in captured.out and "report: " in captured.out
    assert "loss_type dapo, beta 0.0, scale_rewards group" in captured.err
    assert "stops ['<|im_end|>']" in captured.err
    updates, evals = (read_jsonl(run_dir / f"{name}.jsonl") for name in ("log", "eval"))
    assert [line["update"] for line in updates] == [1, 2]  # 4 of 6 turns make a batch, twice
    assert [line["update"] for line in evals] == [0, 2]  # although no flag sets eval_strategy
    for name in [f"{reward.name}_mean" for reward in REWARDS]:
        assert 0 <= updates[-1][name] <= 1 and 0 <= evals[-1][name] <= 1
    assert evals[0]["grounded/echo"] == 0 and "grounded/echo 0.000" in captured.err
    for name in ("reward_group_std", "clipped_ratio", "grad_norm", "rollout_s", "grounded/echo"):
        assert updates[-1][name] is not None
    assert updates[-1]["grad_norm"] > 0
    for name in ("chrf", "copied_user", "repeated", "distinct", "characters", "kl_start"):
        assert evals[-1][name] is not None
    assert evals[0]["kl_start"] == 0  # adapters start as zero
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
    result = CliRunner().invoke(app, ["export", str(run_dir), "--to", str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "merged/model.safetensors").is_file()


def test_an_adapter_that_trl_would_not_train_is_refused_before_loading(
    run_files, tmp_path, monkeypatch
):
    monkeypatch.setattr(policy, "load_model", lambda *_: pytest.fail("weights were loaded"))
    lora = {"r": 2, "target_modules": ["q_proj", "lm_head"]}
    cfg = run_files.config(tmp_path / "run", policy__lora=lora)
    with pytest.raises(UserError, match="TRL, which trains this task, does not train an adapter"):
        run_roleplay(cfg)
    (failed,) = [c for c in check_run(cfg).checks if c.name == "policy.path"]
    assert not failed.ok and "TRL, which trains this task" in failed.result


def test_a_run_that_learns_to_echo_the_user_is_warned_of(run_files, tmp_path, monkeypatch):
    """Check the warning with a patched count, because a tiny policy's replies are noise."""
    read = []
    monkeypatch.setattr(formulas, "is_echo", lambda _: len(read) >= 14 or bool(read.append(0)))
    run_roleplay(run_files.config(tmp_path / "run"))
    messages = (tmp_path / "run/messages.log").read_text(encoding="utf-8")
    assert "(evaluation), 0.00 at the start: the policy learns to repeat the user" in messages


class _VLLM:
    """Stands in for TRL's client of vLLM, which does not say why a completion ended.

    lengths: of its completions in turn; those below the limit of 12 have no stop id.
    """

    def __init__(self, *lengths):
        self.lengths = lengths

    def sync_weights(self):
        pass

    def generate(self, *, prompts, **_):
        lengths = [self.lengths[n % len(self.lengths)] for n in range(len(prompts))]
        ids = [[5 + (7 * n + t) % 90 for t in range(length)] for n, length in enumerate(lengths)]
        return prompts, ids, [[[-4.0] for _ in row] for row in ids], None


@pytest.mark.parametrize("lengths", [(12,), (12, 3, 12, 12), (12, 0, 12, 12)])
def test_a_run_on_vllm_learns_no_completion_that_was_broken_off(
    run_files, tmp_path, monkeypatch, lengths
):
    """Check with TRL's own loop: only its connection to vLLM is replaced."""
    from trainer.roleplay.training.grpo import RoleplayTrainer

    prepare = RoleplayTrainer.__init__

    def with_vllm(self, *args, **kwargs):
        prepare(self, *args, **kwargs)
        self.use_vllm, self.vllm_generation, self._last_loaded_step = True, _VLLM(*lengths), -1

    monkeypatch.setattr(RoleplayTrainer, "__init__", with_vllm)
    cfg = run_files.config(tmp_path / "run", grpo__max_steps=1)
    artifacts, log = run_roleplay(cfg), tmp_path / "run/log.jsonl"
    updates = [line["update"] for line in read_jsonl(log)] if log.exists() else []
    if lengths == (12,):
        assert (updates, artifacts.exit_code) == ([1], 0)
    else:
        assert (updates, artifacts.exit_code) == ([], 3)
        assert "vLLM broke 2 of 8 completions off" in str(artifacts.stopped)


def test_adapters_on_4_bits_learn_in_float32(run_files, tmp_path):
    """Check float32 adapters: TRL makes them bfloat16, which an update of 2e-6 would not change."""
    from safetensors.torch import load_file

    run_dir = tmp_path / "run"
    run_roleplay(
        run_files.config(
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


def test_yaml_trains_evaluates_and_compares(run_files, tmp_path):
    run_dir = tmp_path / "run"
    config = tmp_path / "run.yaml"
    cfg = run_files.config(run_dir, eval__eval_every_n_updates=1, misc__trackers=["tensorboard"])
    config.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    result = CliRunner().invoke(app, ["train", "--config", str(config)])
    assert result.exit_code == 0, result.output
    evals = read_jsonl(run_dir / "eval.jsonl")
    assert [line["update"] for line in evals] == [0, 1, 2]
    assert evals[0]["kl_start"] == pytest.approx(0, abs=1e-6) and evals[2]["kl_start"] > 0
    assert any((run_dir / "trackers").rglob("events.out.tfevents*"))
    checkpoint = run_dir / "checkpoints/step-000002"
    overrides = ["--set", f"misc.run_dir={tmp_path / 'ev'}", "--set", f"policy.path={checkpoint}"]
    evaluate = ["evaluate", "--config", str(config), *overrides, "--set", "reward.calibration=null"]
    result = CliRunner().invoke(app, [*evaluate, "--against", str(run_files.policy)])
    assert result.exit_code == 0, result.output
    now = json.loads((tmp_path / "ev/evaluation.json").read_text())
    assert now["reward_mean"] == pytest.approx(evals[2]["reward_mean"], abs=1e-6)
    assert now["kl_start"] == pytest.approx(evals[2]["kl_start"], abs=1e-6)
    compared = json.loads((tmp_path / "ev/comparison.json").read_text())
    by_key = {stat["key"]: stat for stat in compared["figures"]}
    assert by_key["reward_mean"]["low"] is not None and by_key["chrf"]["sources"] == 12
    assert "95 % interval" in (tmp_path / "ev/comparison.html").read_text()
    second_run = CliRunner().invoke(app, evaluate)
    assert second_run.exit_code == 2 and "--overwrite" in second_run.stderr
    earlier = ["--against", str(tmp_path / "ev"), "--set", f"misc.run_dir={tmp_path / 'ev2'}"]
    assert CliRunner().invoke(app, [*evaluate, *earlier]).exit_code == 0
    report = CliRunner().invoke(app, ["report", str(run_dir)])
    assert report.exit_code == 0 and "report.html" in report.stdout


def test_check_finds_faults_before_weights_load(run_files, tmp_path, monkeypatch):
    broken = write_policy(
        tmp_path / "broken",
        TEMPLATE.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
    )
    good = check_run(run_files.config(tmp_path / "run"))
    assert good.failed == [] and not (tmp_path / "run/log.jsonl").exists()
    rows = [turn(k) for k in range(6)]
    rows[2]["prompt"][1]["content"] += "<|im_start|>"
    train = write_turns(tmp_path / "train.jsonl", rows)
    findings = check_run(
        run_files.config(
            tmp_path / "run",
            data__train=str(train),
            policy__path=str(broken),
            grpo__options={"use_vlm": True},
            reward__embedding_model=str(tmp_path / "nowhere"),
            misc__trackers=["nobody"],
        )
    )
    message_by_check = {check.name: check.result for check in findings.failed}
    assert any(name.startswith("chat template") for name in message_by_check)
    assert "did you mean use_vllm" in message_by_check["grpo"]
    assert "no such folder" in message_by_check["rewards"]
    assert "misc.trackers" in message_by_check
    bad_row = f"{train} line 3: turn 2 (user): has the control token '<|im_start|>'"
    assert bad_row in message_by_check["messages of data.train"]
    monkeypatch.setattr(start, "load_policy", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match="the chat template fails its check"):
        run_roleplay(run_files.config(tmp_path / "run", policy__path=str(broken)))


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_what_cannot_work_is_told_before_weights_load(
    run_files, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setattr(start, "load_policy", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=message):
        run_roleplay(run_files.config(tmp_path / "run", **changes))


def test_rows_whose_prompt_is_too_long_are_left_out_and_counted(run_files, tmp_path, caplog):
    rows = [turn(k) for k in range(6)]
    rows[0]["prompt"][1]["content"] = "가" * 200
    train = write_turns(tmp_path / "train.jsonl", rows)
    run_dir = tmp_path / "run"
    artifacts = run_roleplay(
        run_files.config(
            run_dir, data__train=str(train), data__max_prompt_length=300, grpo__max_steps=1
        )
    )
    assert artifacts.exit_code == 0
    log_text = (run_dir / "messages.log").read_text()
    assert "1 of 6 prompts have more than data.max_prompt_length 300 tokens" in log_text
    assert "sampled replies are truncated" in log_text or "clipped_ratio" not in log_text
