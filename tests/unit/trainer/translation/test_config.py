"""Check that every config key is documented, every file loads and errors name their keys."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from scorekit.config import load_config, save_config
from scorekit.errors import UserError
from trainer.__main__ import _clean_exit, app
from trainer.tasks import TASKS, Commands, commands_of
from trainer.translation.config import TranslationConfig
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.short_form import needed_services
from trainer.translation.train import check_trainable

CONFIGS = Path(__file__).parents[4] / "configs" / "translation"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_loads_and_can_train(path: Path, tmp_path: Path) -> None:
    cfg = load_config(TranslationConfig, path)
    check_trainable(cfg)
    save_config(cfg, tmp_path / "copy.yaml")
    assert load_config(TranslationConfig, tmp_path / "copy.yaml") == cfg


def test_the_seeds_keys_and_defaults() -> None:
    cfg = load_config(TranslationConfig, CONFIGS / "seed.yaml")
    reward: dict[str, Any] = {
        "metricx_offset": 5.0,
        "w_metricx": 1.0,
        "xcomet_model_name": "Unbabel/XCOMET-XL",
        "w_xcomet_seq": 0.0,
        "xcomet_seq_scale": 1.0,
        "overlap_policy": "any_overlap",
        "span_combine": "sum",
        "use_confidence": False,
    }
    assert reward.items() <= cfg.reward.model_dump().items()
    weights = cfg.reward.severity_weights.model_dump(exclude_none=True)
    assert weights == {"MINOR": -1, "MAJOR": -5, "CRITICAL": -10}
    for section, keys in {
        "generation": "max_new_tokens temperature top_p top_k num_samples_per_prompt",
        "reward": "metricx_model_name metricx_tokenizer_name",
        "rl": "algorithm lr batch_size grad_accum clip_eps kl_coef entropy_coef",
        "eval": "eval_every_n_updates eval_limit",
        "misc": "seed device dtype caching",
    }.items():
        assert set(keys.split()) <= set(getattr(cfg, section).model_dump())


def test_every_key_has_a_sentence() -> None:
    def check(section: type[BaseModel]) -> None:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                check(field.annotation)

    check(TranslationConfig)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.learning_rate=1", "rl.learning_rate: Extra inputs"),
        ("reward.severity_weights={BAD: -1}", "reward.severity_weights.BAD"),
        ("generation.top_p=0", "generation.top_p"),
        ("rl.kl_estimator=k4", "rl.kl_estimator"),
        ("rl.lr=.inf", "rl.lr: Input should be a finite number"),
        ("reward.w_metricx=.nan", "reward.w_metricx: Input should be a finite number"),
        ("reward.severity_weights={MAJOR: 5}", "reward.severity_weights.MAJOR"),
        ("rl.clip_eps=1", "rl.clip_eps"),
        ("reward.w_metricx=-1", "reward.w_metricx"),
        ("reward.w_xcomet_seq=-1", "reward.w_xcomet_seq"),
        ("reward.w_xcomet_span=-1", "reward.w_xcomet_span"),
        ("reward.xcomet_seq_scale=-1", "reward.xcomet_seq_scale"),
    ],
)
def test_wrong_keys_and_values_are_named(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(TranslationConfig, None, [override])
    assert message in str(error.value)


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "reinforce"])
@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 50), ("temperature", 0)])
def test_training_refuses_a_cut_distribution_that_nothing_corrects(
    algorithm: str, key: str, value: float
) -> None:
    """Check the refusal: log-probabilities would not match the sampling distribution."""
    overrides = [f"generation.{key}={value}", f"rl.algorithm={algorithm}"]
    corrected = load_config(TranslationConfig, None, overrides)
    assert corrected.corrects_importance == (key != "temperature")
    if key != "temperature":
        check_trainable(corrected)
    cfg = load_config(TranslationConfig, None, [*overrides, "rl.importance_correction=off"])
    with pytest.raises(UserError, match=f"generation.{key}"):
        check_trainable(cfg)
    assert cfg.eval_generation().temperature == 0  # an evaluation may


@pytest.mark.parametrize(
    "rounding",
    ["policy.weights_dtype=bfloat16", "policy.load_in_4bit=true", "misc.dtype=bfloat16"],
)
def test_weights_that_are_rounded_are_corrected_for(rounding: str) -> None:
    """Check rounded weights: sampling with a cache and training on full texts differ slightly."""
    plain = load_config(TranslationConfig, None, ["policy.lora.r=2"])
    assert not plain.corrects_importance
    assert load_config(TranslationConfig, None, ["policy.lora.r=2", rounding]).corrects_importance


def test_samples_of_older_weights_are_corrected_for() -> None:
    assert not load_config(TranslationConfig).corrects_importance
    stale = load_config(TranslationConfig, None, ["rl.max_staleness=1"])
    assert stale.corrects_importance
    with pytest.raises(UserError) as error:
        load_config(TranslationConfig, None, ["rl.max_staleness=2", "rl.importance_correction=off"])
    assert "max_staleness 2" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "summary"),
    [
        ((), "off"),
        (("max_staleness=1",), "ratio of a token, truncated at 2"),
        (
            ("importance_correction=on", "importance_mode=sequence_mask", "importance_cap=5"),
            "product of a sequence's ratios, masked outside 0.2 to 5",
        ),
        (
            ("importance_correction=on", "importance_mode=token_mask", "importance_floor=0.5"),
            "ratio of a token, masked outside 0.5 to 2",
        ),
        (
            ("importance_correction=on", "algorithm=gspo"),
            "geometric mean of a sequence's ratios, truncated at 2",
        ),
    ],
)
def test_the_correction_in_words(settings: tuple[str, ...], summary: str) -> None:
    cfg = load_config(TranslationConfig, None, [f"rl.{setting}" for setting in settings])
    assert cfg.correction_summary == summary


@pytest.mark.parametrize("spans", ["w_xcomet_span=0", "severity_weights={a: 0}"])
def test_a_run_without_any_reward_is_refused(spans: str) -> None:
    spans = spans.replace("{a: 0}", "{MINOR: 0, MAJOR: 0, CRITICAL: 0}")
    none = [
        f"reward.{key}" for key in ("w_metricx=0", "w_xcomet_seq=1", "xcomet_seq_scale=0", spans)
    ]
    with pytest.raises(UserError, match="every weight is 0"):
        check_trainable(load_config(TranslationConfig, None, none))
    check_trainable(load_config(TranslationConfig, None, [*none, "reward.no_eos_penalty=1"]))


def test_a_prompt_template_that_is_not_there_is_told_first() -> None:
    with pytest.raises(UserError, match="neither one of"):
        check_trainable(
            load_config(TranslationConfig, None, ["generation.prompt_template=gone.txt"])
        )


def test_a_postprocess_that_is_not_there_is_told_first() -> None:
    with pytest.raises(UserError, match="postprocess 'gone': neither one of"):
        check_trainable(load_config(TranslationConfig, None, ["generation.postprocess=gone"]))


def test_an_error_of_the_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, _clean_exit():
        raise OSError(28, "No space left on device", "/runs/model.safetensors")
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: /runs/model.safetensors: No space left on device\n"


def test_urls_are_a_list_or_comma_separated() -> None:
    urls = ["http://a:1", "http://b:2"]
    assert RewardConfig(metricx_urls=urls).metricx_urls == urls
    assert RewardConfig(metricx_urls="http://a:1, http://b:2").metricx_urls == urls  # type: ignore[arg-type]


def test_severities_in_any_case() -> None:
    cfg = load_config(TranslationConfig, None, ["reward.severity_weights={minor: -2}"])
    weights = cfg.reward.severity_weights.model_dump(exclude_none=True)
    assert weights == {"MINOR": -2, "MAJOR": -5, "CRITICAL": -10}


def test_what_the_reward_needs() -> None:
    no_weights = {"MINOR": 0, "MAJOR": 0, "CRITICAL": 0}
    assert needed_services(RewardConfig()) == ("metricx", "xcomet")
    assert needed_services(RewardConfig(w_metricx=0)) == ("xcomet",)
    assert needed_services(RewardConfig(w_xcomet_span=0)) == ("metricx",)
    assert needed_services(RewardConfig(w_xcomet_span=0, w_xcomet_seq=1)) == ("metricx", "xcomet")
    assert needed_services(RewardConfig(severity_weights=no_weights)) == ("metricx",)  # type: ignore[arg-type]


def test_the_kl_estimator_is_the_right_one_for_its_place(tmp_path: Path) -> None:
    in_reward = load_config(TranslationConfig, None, ["rl.kl_in=reward"])
    assert in_reward.rl.kl_estimator == "k1"
    assert load_config(TranslationConfig, None, ["rl.kl_in=loss"]).rl.kl_estimator == "k2"
    save_config(in_reward, tmp_path / "copy.yaml")
    assert load_config(TranslationConfig, tmp_path / "copy.yaml") == in_reward
    named = load_config(TranslationConfig, None, ["rl.kl_in=reward", "rl.kl_estimator=k3"])
    assert named.rl.kl_estimator == "k3"


def test_a_warm_up_that_never_ends_is_refused() -> None:
    with pytest.raises(UserError, match="warmup_updates 3 must be less than num_updates 2"):
        load_config(TranslationConfig, None, ["rl.num_updates=2", "rl.warmup_updates=3"])


def test_a_config_is_found_by_its_path_of_the_last_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(CONFIGS.parents[1])
    moved = CliRunner().invoke(
        app, ["check", "--config", "configs/trainer/toy.yaml", "--set", "x=1"]
    )
    assert "configs/trainer/toy.yaml has moved. Use configs/translation/toy.yaml" in moved.stderr
    assert moved.exit_code == 2 and "error: " in moved.stderr and "no such file" not in moved.stderr
    missing = CliRunner().invoke(app, ["check", "--config", "configs/trainer/none.yaml"])
    assert missing.exit_code == 2 and "has moved" not in missing.stderr


def test_the_config_names_the_task(tmp_path: Path) -> None:
    assert TranslationConfig().task == "translation"
    config = tmp_path / "run.yaml"
    config.write_text("task: juggling\n")
    done = CliRunner().invoke(app, ["train", "--config", str(config)])
    assert done.exit_code == 2
    task_names = ", ".join(TASKS)
    assert (
        done.stderr == f"error: {config}: task: 'juggling' is unknown. Choose from {task_names}\n"
    )
    config.write_text("task: [translation]\n")
    assert CliRunner().invoke(app, ["check", "--config", str(config)]).exit_code == 2


def test_every_task_has_every_verb() -> None:
    for task in TASKS:
        commands = commands_of({"task": task}, "here")
        for command in ("train", "evaluate", "check", "report"):
            task_parameters = inspect.signature(getattr(commands, command)).parameters
            expected_names = list(inspect.signature(getattr(Commands, command)).parameters)[1:]
            assert list(task_parameters) == expected_names, command
        assert commands.Config().task == task


@pytest.mark.parametrize("command", ["check", "train", "evaluate", "sft"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("my.yaml", "my.yaml: no_such_key: Extra inputs are not permitted"),
        ("./my.yaml", "my.yaml: no_such_key: Extra inputs are not permitted"),
        ("mine/my.yaml", "mine/my.yaml: no_such_key: Extra inputs are not permitted"),
        ("marked.yaml", "marked.yaml: no_such_key: Extra inputs are not permitted"),
        ("wide.yaml", "wide.yaml: not YAML: not UTF-8 text. Save the file as UTF-8"),
        ("missing.yaml", "missing.yaml: cannot be read: No such file or directory"),
        ("~/my.yaml", "~/my.yaml: cannot be read: No such file or directory"),
        ("~", "~: cannot be read: No such file or directory"),
        ("mine", "mine: cannot be read: Is a directory"),
        (".", ".: cannot be read: Is a directory"),
        ("..", "..: cannot be read: Is a directory"),
        ("/", "/: cannot be read: Is a directory"),
        ("", ".: cannot be read: Is a directory"),
    ],
)
def test_a_config_of_any_path_is_read_or_refused_in_a_line(
    command: str,
    config: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine").mkdir()
    for path, text in {
        "my.yaml": "no_such_key: 1\n",
        "mine/my.yaml": "no_such_key: 1\r\n",
        "marked.yaml": "\ufeffno_such_key: 1\r\n",
    }.items():
        (tmp_path / path).write_text(text, encoding="utf-8", newline="")
    (tmp_path / "wide.yaml").write_text("no_such_key: 1\n", encoding="utf-16")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command, "--config", config])
    assert done.exit_code == 2, done.exception
    assert isinstance(done.exception, SystemExit)
    assert done.output.startswith(f"error: {message}")
    assert done.output.count("\n") == 1
