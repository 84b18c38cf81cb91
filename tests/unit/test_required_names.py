"""Check that the names of the requirements exist, take what they say, and are documented."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import trainer
from scorekit.config import load_config
from synth.config import SynthConfig
from synth.stages.table import stage_names
from trainer.roleplay.config import RoleplayConfig
from trainer.search.config import SearchConfig
from trainer.translation.config import TranslationConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/required-names.md").read_text(encoding="utf-8")

#: Name -> the module to import it from, and its first parameters as the requirement writes them.
FUNCTIONS: dict[str, tuple[str, str]] = {
    "load_examples": ("trainer", ""),
    "format_translation_prompt": ("trainer", "example"),
    "postprocess_translation": ("trainer", "raw_text"),
    "generate_rollouts": ("trainer", "examples policy_model tokenizer gen_cfg"),
    "compute_token_char_offsets": ("trainer", "tokenizer completion_token_ids decode_cfg"),
    "metricx_reward": ("trainer", "score"),
    "spans_to_token_rewards": (
        "trainer",
        "mt_text token_char_offsets error_spans severity_weights overlap_policy",
    ),
    "update_policy": ("trainer", "rollouts advantages optimizer ppo_cfg"),
    "evaluate_on_dataset": ("trainer", "examples policy_model"),
    "run_toy_rl": ("trainer", "train_examples eval_examples cfg"),
    "reward_format": ("trainer", "prompts completions"),
    "reward_role_split": ("trainer", "prompts completions"),
    "reward_grounded_to_user": ("trainer", "prompts completions"),
    "reward_character_consistency": ("trainer", "prompts completions"),
    "reward_reference_alignment": ("trainer", "prompts completions"),
    "_ngram_overlap_ratio": ("trainer.roleplay.formulas", ""),
}
#: Class -> the module to import it from, and fields or methods that the requirement gives it.
CLASSES: dict[str, tuple[str, str]] = {
    "Example": (
        "trainer",
        "id src_text src_lang tgt_lang src_lang_code tgt_lang_code ref_text",
    ),
    "Rollout": (
        "trainer",
        "example_id prompt_text prompt_input_ids completion_text completion_token_ids old_logprobs "
        "ref_logprobs token_char_offsets",
    ),
    "SampleForScoring": ("trainer", "src mt ref"),
    "RewardOutput": ("trainer", "sequence_scores metadata"),
    "TrainStats": ("trainer", "policy_loss approx_kl clip_frac kl_ref"),
    "Report": ("trainer", ""),
    "MetricXQEScorer": ("services.metricx", "score_batch"),
    "XCometXLScorer": ("services.xcomet", "score_batch"),
}
#: Config of each requirement -> its class, and the keys that the requirement gives.
CONFIGS: dict[str, tuple[Any, str]] = {
    "translation/seed": (
        TranslationConfig,
        "generation.max_new_tokens generation.temperature generation.top_p generation.top_k "
        "generation.num_samples_per_prompt reward.metricx_model_name reward.metricx_tokenizer_name "
        "reward.metricx_offset reward.w_metricx reward.xcomet_model_name reward.w_xcomet_seq "
        "reward.xcomet_seq_scale reward.severity_weights.MINOR reward.severity_weights.MAJOR "
        "reward.severity_weights.CRITICAL reward.overlap_policy reward.use_confidence rl.algorithm "
        "rl.lr rl.batch_size rl.grad_accum rl.clip_eps rl.kl_coef rl.entropy_coef "
        "eval.eval_every_n_updates eval.eval_limit misc.seed misc.device misc.dtype misc.caching",
    ),
    "synth/seed": (
        SynthConfig,
        "run.out_dir run.seed run.log_level data.madlad_dataset data.madlad_split data.src_lang "
        "data.tgt_lang data.target_examples_total data.sample_pool_size segmentation.mode "
        "segmentation.min_chars segmentation.max_chars bucketing.boundaries bucketing.measure "
        "bucketing.per_bucket_quota teacher.backend teacher.base_url teacher.api_key_env "
        "teacher.model teacher.request_timeout_s teacher.max_concurrency "
        "teacher.retry.max_attempts teacher.retry.backoff_s teacher.generation.max_tokens "
        "teacher.generation.top_p teacher.generation.greedy_temperature "
        "teacher.generation.sample_temperature teacher.generation.final_temperature "
        "teacher.generation.seed final_generation.num_candidates final_generation.store_top_k "
        "final_generation.strategy final_generation.blob.enabled final_generation.blob.blob_ratio "
        "final_generation.blob.sentence_ratio final_generation.blob.blob_max_tokens "
        "metricx.checkpoint metricx.batch_size metricx.device metricx.cache_db filters.rule_based "
        "filters.llm_judge.enabled filters.llm_judge.model filters.llm_judge.temperature "
        "filters.llm_judge.max_tokens filters.llm_judge.fail_policy",
    ),
    "roleplay/seed": (
        RoleplayConfig,
        "data.train data.eval data.max_prompt_length policy.path policy.load_in_4bit "
        "policy.bnb_4bit_quant_type policy.bnb_4bit_use_double_quant policy.bnb_4bit_compute_dtype "
        "policy.gradient_checkpointing reward.embedding_model reward.embedding_batch_size "
        "reward.weights.reward_format grpo.per_device_train_batch_size "
        "grpo.gradient_accumulation_steps grpo.num_train_epochs grpo.learning_rate "
        "grpo.num_generations grpo.max_completion_length",
    ),
    "search/focused_r1": (
        SearchConfig,
        "rl.batch_size rollout.n_agent episode.max_turns rl.advantage_norm rl.algorithm "
        "rl.clip_eps rl.clip_eps_high rl.lr rl.entropy_coef rl.kl_coef rl.minibatch_size "
        "rl.micro_batch_tokens data.max_prompt_length episode.max_response_length rl.epochs "
        "misc.save_every_n_updates answering.generator.effort "
        "answering.generator.max_output_tokens answering.generator.max_requests "
        "answering.generator.deadline_s answering.judge.max_in_flight answering.judge.deadline_s "
        "reward.w_judge reward.w_ndcg reward.w_format",
    ),
}
#: The command of role-play as the requirement writes it; only the folders differ.
ROLEPLAY_FLAGS = """
--model_name models/qwen3_4b_rp --train_data grpo_train.jsonl --eval_data grpo_eval.jsonl
--output_dir runs/qwen3_4b_rp_grpo --per_device_train_batch_size 1 --gradient_accumulation_steps 16
--num_train_epochs 2 --learning_rate 2e-6 --max_prompt_length 1024 --max_completion_length 220
--num_generations 4 --per_device_eval_batch_size 4 --gradient_checkpointing --bf16 --use_lora
--load_in_4bit --bnb_4bit_quant_type nf4 --bnb_4bit_use_double_quant
--bnb_4bit_compute_dtype bfloat16 --reward_embedding_model data/embedding/BGE-m3-ko
--reward_embedding_batch_size 16
"""
ENVIRONMENT = "RM_JUDGE_COEF RM_NDCG_COEF RM_FORMAT_COEF"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_required_function_takes_the_required_arguments(name: str) -> None:
    module, first_parameters = FUNCTIONS[name]
    function = getattr(importlib.import_module(module), name)
    parameters = list(inspect.signature(function).parameters)
    expected = first_parameters.split()
    assert parameters[: len(expected)] == expected
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", CLASSES)
def test_a_required_class_has_the_required_fields(name: str) -> None:
    module, names = CLASSES[name]
    cls = getattr(importlib.import_module(module), name)
    is_dataclass = dataclasses.is_dataclass(cls)
    fields = {field.name for field in dataclasses.fields(cls)} if is_dataclass else set()
    assert all(name in fields or hasattr(cls, name) for name in names.split())
    assert f"`{name}`" in PAGE


def test_a_call_with_the_required_arguments_alone_is_possible() -> None:
    """Check that what is not in the requirement has a default, where the page says nothing."""
    for name, (module, first_parameters) in FUNCTIONS.items():
        if not first_parameters or name == "evaluate_on_dataset":
            continue
        signature = inspect.signature(getattr(importlib.import_module(module), name))
        signature.bind(*first_parameters.split())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "MetricXQEScorer",
            "metricx_model_name metricx_tokenizer_name batch_size device dtype max_input_length",
        ),
        ("XCometXLScorer", "xcomet_model_name batch_size device dtype max_input_length"),
    ],
)
def test_the_scorers_take_the_required_options(name: str, options: str) -> None:
    scorer = getattr(importlib.import_module(CLASSES[name][0]), name)
    parameters = inspect.signature(scorer).parameters
    assert set(options.split()) <= set(parameters)
    assert list(inspect.signature(scorer.score_batch).parameters)[1:] == ["samples", "cfg"]


def test_the_names_of_trainer_are_seen_and_loaded_when_they_are_used() -> None:
    """Check `dir`, `__all__`, what a type checker reads, and that nothing heavy is loaded."""
    tree = ast.parse((ROOT / "trainer/__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    sources = {
        name: source if ":" in source else f"{source}:{name}"
        for name, source in trainer._SOURCES.items()
    }
    assert typed == sources
    assert set(trainer.__all__) == set(sources) <= set(dir(trainer))
    for name, source in sources.items():
        module, _, source_name = source.partition(":")
        assert getattr(trainer, name) is getattr(importlib.import_module(module), source_name)
    with pytest.raises(AttributeError, match="no attribute 'load_example'"):
        trainer.load_example  # noqa: B018
    code = (
        "import sys, json, trainer, services.metricx, services.xcomet\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'scorekit'}\n"
        "seen = dir(trainer) + dir(services.metricx) + dir(services.xcomet)\n"
        "print(json.dumps([sorted(heavy & set(sys.modules)), 'update_policy' in seen]))\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(result.stdout) == [[], True]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_a_requirement_loads_and_has_its_keys(name: str) -> None:
    config_type, keys = CONFIGS[name]
    cfg = load_config(config_type, ROOT / "configs" / f"{name}.yaml")
    for key in keys.split():
        value: Any = cfg
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert f"configs/{name}.yaml" in PAGE or name in ("roleplay/seed", "search/focused_r1")


def test_the_flags_of_the_role_play_command_are_taken() -> None:
    from trainer.roleplay.__main__ import config_of

    cfg = RoleplayConfig.model_validate(config_of(ROLEPLAY_FLAGS.split()))
    assert (cfg.policy.path, cfg.reward.embedding_batch_size) == ("models/qwen3_4b_rp", 16)
    assert cfg.policy.load_in_4bit and cfg.grpo.num_generations == 4


def test_the_options_and_stages_of_the_synthesis_command_exist() -> None:
    from synth_parallel.cli import app

    (run,) = [command for name, command in get_command(app).commands.items() if name == "run"]  # type: ignore[attr-defined]
    options = {option for parameter in run.params for option in parameter.opts}
    required = "--config --stage --dry-run --resume --overwrite --limit --shard-id --num-shards"
    assert set(required.split()) <= options
    stages = re.findall(r"^\| stages (.*?) \|", PAGE, re.MULTILINE)[0]
    for stage in [*re.findall(r"`(\w+)`", stages), "score_128_select_best"]:
        assert len(stage_names(stage)) == 1
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'synth_parallel = "synth.__main__:main"' in scripts


def test_the_options_of_the_label_check_exist() -> None:
    from trainer.__main__ import app

    (sft,) = [command for name, command in get_command(app).commands.items() if name == "sft"]  # type: ignore[attr-defined]
    options = {option for parameter in sft.params for option in parameter.opts}
    assert {"--debug_label_mask", "--debug_only"} <= options


def test_tags_and_environment_of_the_search_exist() -> None:
    from trainer.search.config import ENVIRONMENT as VARIABLES
    from trainer.search.rollout.actions import ANSWER, BBOX, COMPLETE, SEARCH, THINK

    tags = {THINK, SEARCH, BBOX, COMPLETE, ANSWER}
    assert tags == {"think", "search", "bbox", "search_complete", "answer"}
    assert set(VARIABLES.values()) == set(ENVIRONMENT.split())
    assert all(f"`<{tag}>`" in PAGE for tag in tags)
    assert all(f"`{name}`" in PAGE for name in ENVIRONMENT.split())
