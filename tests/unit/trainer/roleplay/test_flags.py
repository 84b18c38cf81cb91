"""Check that TRL's command-line flags become a config."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from scorekit.config import check_config, load_config
from scorekit.errors import UserError
from trainer.roleplay.__main__ import config_of
from trainer.roleplay.config import RoleplayConfig

CONFIGS = Path(__file__).parents[4] / "configs" / "roleplay"
#: The command that users of TRL write, but for paths.
SEED = """\
--model_name qwen3_4b_rp --train_data grpo_train.jsonl --eval_data grpo_eval.jsonl
--output_dir qwen3_4b_rp_grpo --per_device_train_batch_size 1 --gradient_accumulation_steps 16
--num_train_epochs 2 --learning_rate 2e-6 --max_prompt_length 1024 --max_completion_length 220
--num_generations 4 --per_device_eval_batch_size 4 --gradient_checkpointing --bf16 --use_lora
--load_in_4bit --bnb_4bit_quant_type nf4 --bnb_4bit_use_double_quant
--bnb_4bit_compute_dtype bfloat16 --reward_embedding_model data/embedding/BGE-m3-ko
--reward_embedding_batch_size 16"""


def config(flags: str) -> RoleplayConfig:
    return check_config(RoleplayConfig, config_of(shlex.split(flags)), "flags")


def test_the_requirements_command_is_read_as_typed():
    cfg = config(SEED)
    assert cfg.policy.path == "qwen3_4b_rp"
    assert (cfg.data.train, cfg.data.eval) == ("grpo_train.jsonl", "grpo_eval.jsonl")
    assert cfg.misc.run_dir == "qwen3_4b_rp_grpo"
    assert cfg.grpo.per_device_train_batch_size == 1
    assert cfg.grpo.gradient_accumulation_steps == 16
    assert (cfg.grpo.num_train_epochs, cfg.grpo.learning_rate) == (2, 2e-6)
    assert (cfg.data.max_prompt_length, cfg.grpo.max_completion_length) == (1024, 220)
    assert (cfg.grpo.num_generations, cfg.eval.batch_size) == (4, 4)
    policy = cfg.policy
    assert policy.gradient_checkpointing and policy.load_in_4bit and policy.lora.r == 16
    assert (policy.bnb_4bit_quant_type, policy.bnb_4bit_use_double_quant) == ("nf4", True)
    assert policy.bnb_4bit_compute_dtype == "bfloat16"
    assert (cfg.misc.dtype, policy.weights_dtype) == ("bfloat16", "bfloat16")
    assert cfg.reward.embedding_model == "data/embedding/BGE-m3-ko"
    assert cfg.reward.embedding_batch_size == 16
    assert cfg.grpo.options == {}


def test_the_seeds_yaml_is_the_seeds_command():
    of_yaml = load_config(RoleplayConfig, CONFIGS / "seed.yaml").model_dump()
    of_flags = config(SEED).model_dump()
    for section, key in (
        ("policy", "path"),
        ("data", "train"),
        ("data", "eval"),
        ("misc", "run_dir"),
        ("misc", "save_every_n_updates"),  # the command does not set it
        ("reward", "weights"),  # the defaults
    ):
        of_flags[section][key] = of_yaml[section][key]
    assert of_yaml == of_flags


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_of_ours_is_one(path):
    assert load_config(RoleplayConfig, path).task == "roleplay"


def test_values_are_read_as_yaml_and_numbers_as_python():
    assert config_of(["--beta", "1e-3", "--epsilon_high=0.28", "--use_vllm", "--optim", "sgd"]) == {
        "task": "roleplay",
        "grpo": {
            "beta": 0.001,
            "epsilon_high": 0.28,
            "options": {"use_vllm": True, "optim": "sgd"},
        },
    }
    assert config_of(["--report-to", "tensorboard,wandb"])["misc"]["trackers"] == [
        "tensorboard",
        "wandb",
    ]
    assert config_of(["--report_to", "none"])["misc"]["trackers"] == []
    assert config_of(["--bf16", "false"]) == {"task": "roleplay"}
    assert config_of(["--bf16"]) == {"task": "roleplay", "misc": {"dtype": "bfloat16"}}
    assert config_of(["--min_p", "null"])["grpo"] == {"min_p": None}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--load_in_4bit", "--load_in_4bit freezes the weights. Add --use_lora"),
        ("--lora_r 8", "--lora_r requires --use_lora"),
        ("grpo_train.jsonl", "'grpo_train.jsonl': expected a flag"),
        ("--bf16 perhaps", "--bf16: 'perhaps' is neither true nor false"),
        ("--reward_embedding_model http://a:secret@host:1", "--reward_embedding_model: a password"),
        ("--num_generations 1", "grpo.num_generations"),
        ("--learning_rate fast", "grpo.learning_rate"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, message):
    with pytest.raises(UserError) as caught:
        config(flags)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_printed_flags_are_a_config(capsys):
    from trainer.roleplay.__main__ import main

    assert main([*shlex.split(SEED), "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert check_config(RoleplayConfig, printed, "printed") == config(SEED)
