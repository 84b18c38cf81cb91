"""Check that checkpoints are exported as plain Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from scorekit.config import load_config
from scorekit.digest import digest_files
from scorekit.errors import ScorekitError, UserError
from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.trainer.images import tiny
from tests.kits.trainer.runs import byte_level_tokenizer, example, save_policy, tiny_llama
from tests.kits.trainer.searching.policies import tiny_tokenizer
from trainer.__main__ import app
from trainer.rl import policy
from trainer.rl.config import LoraConfig, PolicyConfig
from trainer.rl.policy import load_policy, stop_token_ids
from trainer.runs.checkpoints import export
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.checkpoints.checkpoint import checkpoints, load_checkpoint, save_processors
from trainer.runs.checkpoints.export import (
    export_policy,
    logit_tolerance,
    probe_ids,
    probe_logits,
    write_policy,
)
from trainer.translation.config import TranslationConfig
from trainer.translation.train import train_translation

CPU = torch.device("cpu")
NO_SERVICE = ["reward.w_metricx=0", "reward.w_xcomet_span=0", "reward.no_eos_penalty=5"]


def train(folder: Path, *overrides: str, held_out: bool = True) -> Path:
    """Run two updates that need no service, and return the run directory."""
    if not (folder / "policy").exists():
        save_policy(folder / "policy", byte_level_tokenizer())
    settings = [
        *NO_SERVICE,
        f"policy.path={folder}/policy",
        "generation.prompt_template=source",
        "generation.max_new_tokens=8",
        "rl.num_updates=2",
        "rl.batch_size=4",
        "rl.lr=0.02",
        "misc.device=cpu",
        "misc.threads=1",
        f"misc.run_dir={folder}/out",
        "misc.save_every_n_updates=1",
        *overrides,
    ]
    cfg = load_config(TranslationConfig, None, settings)
    examples = [example(f"Open {n}.", str(n)) for n in range(6)]
    return train_translation(examples[:4], examples[4:] if held_out else [], cfg).run_dir


def greedy(model: Any, tokenizer: Any) -> list[list[int]]:
    """Return the ids that a policy generates after some prompts with transformers' generate()."""
    rows = []
    for text in ("Open 1.", "Save the file.", "파일"):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
        )
        rows.append(output[0].tolist())
    return rows


@pytest.mark.parametrize("rank", [0, 4])
@float64()
def test_an_export_writes_what_the_trained_policy_writes(tmp_path: Path, rank: int) -> None:
    run_dir = train(tmp_path, f"policy.lora.r={rank}")
    cfg = load_config(TranslationConfig, run_dir / "config.yaml")
    trained, tokenizer = load_policy(cfg.policy, torch.device("cpu"))
    before = greedy(doubled(trained), tokenizer)
    load_checkpoint(checkpoints(run_dir / "checkpoints")[0], trained)

    to = tmp_path / "exported"
    result = CliRunner().invoke(app, ["export", str(run_dir), "--to", str(to)])
    assert result.exit_code == 0, result.output
    assert "(step-000002, float32, " in result.output
    plain = doubled(AutoModelForCausalLM.from_pretrained(to))
    exported_tokenizer = AutoTokenizer.from_pretrained(to)
    assert greedy(plain, exported_tokenizer) == greedy(trained, tokenizer) != before
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert not list(to.glob("adapter*")) and not list(to.glob("*.pt"))
    assert stop_token_ids(plain, exported_tokenizer) == stop_token_ids(trained, tokenizer)
    ids = torch.tensor([exported_tokenizer("Open 1.")["input_ids"]])
    with torch.no_grad():
        # Merged weights are rounded to float32, each by up to 2**-24 of itself: logits, which are
        # below 4, by some times as much.
        tolerance = 100 * 2**-24 if rank else CLOSE
        torch.testing.assert_close(plain(ids).logits, trained(ids).logits, atol=tolerance, rtol=0)


def test_the_best_by_evaluation_can_be_had(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "eval.eval_every_n_updates=1")
    newest, older = checkpoints(run_dir / "checkpoints")
    state = (older / "state.json").read_text()
    (older / "state.json").write_text(state.replace('"reward": -', '"reward": 1'))
    best = export_policy(run_dir, tmp_path / "best", best=True, dtype="float32")
    last = export_policy(run_dir, tmp_path / "last", dtype="bfloat16")
    assert (best, last) == (older, newest)
    for name, dtype in (("best", torch.float32), ("last", torch.bfloat16)):
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            assert {file.get_tensor(key).dtype for key in file.keys()} == {dtype}  # noqa: SIM118


def test_what_cannot_be_exported_is_told(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "policy.lora.r=2")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there exists and is not replaced"):
        export_policy(run_dir, tmp_path / "there", dtype="float32")
    with pytest.raises(UserError, match="no complete checkpoint"):
        export_policy(tmp_path, tmp_path / "new", dtype="float32")
    shutil.rmtree(tmp_path / "policy")
    save_policy(tmp_path / "policy", byte_level_tokenizer(), seed=7)
    with pytest.raises(UserError, match="policy is not what the run started with"):
        export_policy(run_dir, tmp_path / "new", dtype="float32")
    with pytest.raises(UserError, match="no checkpoint with an evaluation"):
        without_evaluation = train(tmp_path, "misc.overwrite=true", held_out=False)
        export_policy(without_evaluation, tmp_path / "new", best=True, dtype="float32")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_version_that_cannot_read_a_checkpoint_says_so(tmp_path: Path) -> None:
    run_dir = train(tmp_path)
    checkpoint = checkpoints(run_dir / "checkpoints")[0]
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "next"'))
    state = json.loads((checkpoint / "state.json").read_text())
    state["versions"]["transformers"] = "9.0.0"
    state["files"][config.name] = [config.stat().st_size, digest_files([config])]
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"cannot be loaded: .*transformers 9.0.0 saved it, this"):
        export_policy(run_dir, tmp_path / "new", dtype="float32")


def train_tied(folder: Path, monkeypatch: pytest.MonkeyPatch, targets: str) -> Path:
    """Run an update of adapters of tied weights, which earlier versions allowed."""
    with monkeypatch.context() as patch:
        patch.setattr(policy, "shared_layers", lambda _: {})
        return train(folder, "policy.lora.r=4", f"policy.lora.target_modules={targets}")


@pytest.mark.parametrize(
    "targets", ["[q_proj,lm_head]", "[embed_tokens]", "[embed_tokens,lm_head]"]
)
def test_adapters_of_tied_weights_are_merged_into_their_own_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: str
) -> None:
    run_dir = train_tied(tmp_path, monkeypatch, targets)
    checkpoint = export_policy(run_dir, tmp_path / "exported", dtype="float32")
    base, folder = resolve_base_model(PolicyConfig(path=str(checkpoint)))
    adapted, tokenizer = load_on_base(base, folder, CPU)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    probes = probe_ids(plain, tokenizer)
    before = probe_logits(
        load_policy(base.model_copy(update={"lora": LoraConfig()}), CPU)[0], probes
    )
    expected, actual = probe_logits(adapted, probes), probe_logits(plain, probes)
    tolerance = logit_tolerance(expected[0], plain)
    assert (expected[0] - before[0]).abs().max() > 1e-3 > tolerance  # the run has learned
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_a_wrong_merge_is_an_error_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = train_tied(tmp_path, monkeypatch, "[q_proj,lm_head]")
    monkeypatch.setattr(export, "_untie", lambda *_: None)
    result = CliRunner().invoke(app, ["export", str(run_dir), "--to", str(tmp_path / "new/model")])
    assert result.exit_code == 1 and "policy:" not in result.output
    (line,) = result.output.splitlines()
    assert line.startswith("error: export: merging the adapters makes another model: logits differ")
    assert not list(tmp_path.glob("new/*")) and not list(tmp_path.glob("new/.*"))


def change_theta(folder: Path) -> None:
    """Let a folder have other rotary positions."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 77.0
    (folder / "config.json").write_text(json.dumps(config))


def change_weight(folder: Path) -> None:
    """Change one number of a folder by its last bit."""
    weights = load_file(folder / "model.safetensors")
    changed = weights["model.norm.weight"]
    changed[0] = torch.nextafter(changed[0], torch.tensor(torch.inf, dtype=changed.dtype))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_template(folder: Path) -> None:
    """Give a folder a chat template."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def change_tokens(folder: Path) -> None:
    """Let a folder normalize texts."""
    path = folder / "tokenizer.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}})
    )


def change_stops(folder: Path) -> None:
    """Give a folder another end of turns."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_theta, r"logits differ by 0\.\d+ \(rounding: 0\.000\d\)"),
        (change_weight, "the weight model.norm.weight is another"),
        (change_template, "the tokenizer's chat template is another"),
        (change_tokens, "the tokenizer's ids is another"),
        (change_stops, "the tokenizer's ends of turns is another"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_with_another_model_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str, dtype: torch.dtype
) -> None:
    def save_and_change(model: Any, tokenizer: Any, folder: Path) -> None:
        save_processors(model, tokenizer, folder)
        change(folder)

    monkeypatch.setattr(export, "save_processors", save_and_change)
    tokenizer = byte_level_tokenizer()
    with pytest.raises(ScorekitError, match=f"writing makes another model: {reason}"):
        write_policy(tiny_llama(tokenizer), tokenizer, tmp_path, dtype)


def test_weights_that_no_text_passes_are_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_change(model: Any, tokenizer: Any, folder: Path) -> None:
        save_processors(model, tokenizer, folder)
        weights = load_file(folder / "model.safetensors")
        next(weights[name] for name in weights if "visual" in name).add_(1)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    (tmp_path / "right").mkdir()
    write_policy(tiny("qwen2_5_vl").float(), tiny_tokenizer(), tmp_path / "right", torch.bfloat16)
    monkeypatch.setattr(export, "save_processors", save_and_change)
    (tmp_path / "wrong").mkdir()
    with pytest.raises(ScorekitError, match=r"the weight model\.visual\..* is another"):
        write_policy(
            tiny("qwen2_5_vl").float(), tiny_tokenizer(), tmp_path / "wrong", torch.float32
        )


def test_two_weights_beside_a_config_that_ties_them_stay_two(tmp_path: Path) -> None:
    """transformers 5 loads them as two, version 4 as one."""
    save_policy(tmp_path / "policy", byte_level_tokenizer())
    weights = load_file(tmp_path / "policy/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.5
    save_file(weights, tmp_path / "policy/model.safetensors", {"format": "pt"})
    run_dir = train(tmp_path)
    export_policy(run_dir, tmp_path / "exported", dtype="float32")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "exported/model.safetensors")


def test_weights_that_stay_in_float32_are_not_rounded(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_llama(tokenizer)
    model._keep_in_fp32_modules_strict = {"norm"}
    write_policy(model, tokenizer, tmp_path, torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.norm.weight"].dtype == torch.float32
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_a_policy_that_diverged_is_not_exported(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_llama(tokenizer)
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ScorekitError, match="logits that are not numbers"):
        write_policy(model, tokenizer, tmp_path, torch.float32)


@pytest.mark.parametrize("rank", [0, 2])
def test_exports_and_checkpoints_have_the_keys_of_transformers_4(tmp_path: Path, rank: int) -> None:
    tokenizer = byte_level_tokenizer()
    rope_parameters = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    tokenizer.add_special_tokens({"extra_special_tokens": ["<pad>"]})
    save_policy(tmp_path / "policy", tokenizer, rope_parameters=rope_parameters)
    run_dir = train(tmp_path, f"policy.lora.r={rank}")
    checkpoint = export_policy(run_dir, tmp_path / "exported", dtype="bfloat16")
    for folder in [tmp_path / "exported", *([] if rank else [checkpoint])]:
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 1e6
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
        assert config["torch_dtype"] == config["dtype"]
    for folder in (tmp_path / "exported", checkpoint):
        saved = json.loads((folder / "tokenizer_config.json").read_text())
        assert saved["additional_special_tokens"] == ["<pad>"]
        assert "extra_special_tokens" not in saved
        assert AutoTokenizer.from_pretrained(folder).extra_special_tokens == ["<pad>"]


def test_frozen_weights_are_rounded_as_they_were_for_training(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "policy.lora.r=4", "policy.weights_dtype=bfloat16")
    checkpoint = export_policy(run_dir, tmp_path / "exported", dtype="float32")
    cfg = load_config(TranslationConfig, run_dir / "config.yaml")
    trained, tokenizer = load_policy(cfg.policy, CPU)
    load_checkpoint(checkpoint, trained)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    probes = probe_ids(plain, tokenizer)
    actual, expected = probe_logits(plain, probes), probe_logits(trained.float(), probes)
    tolerance = logit_tolerance(expected[0], plain)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
