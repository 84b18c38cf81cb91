"""Check which policy weights are trained, the reference model and gradient checkpointing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    Zamba2Config,
)

from scorekit.errors import UserError
from tests.kits.float64 import CLOSE, doubled, float64
from tests.kits.trainer.images import tiny
from tests.kits.trainer.runs import example, letter_tokenizer, rollout, save_policy
from trainer.rl import policy
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.config import PolicyConfig, RLConfig
from trainer.rl.forward import completion_logprobs
from trainer.rl.policy import Reference, check_adapters, load_policy, unwrap_peft
from trainer.rl.update import update_policy
from trainer.translation.config import GenerationConfig
from trainer.translation.rollouts import generate_rollouts

CPU = torch.device("cpu")
PROMPTS, COMPLETIONS = [[3, 4, 2], [5, 2]], [[6, 7, 8, 1], [9, 1]]
LORA = {"r": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"), letter_tokenizer())


def load(path: Path, **keys: Any) -> tuple[nn.Module, PolicyConfig]:
    cfg = PolicyConfig(path=str(path), **keys)
    return load_policy(cfg, CPU)[0], cfg


def exact(path: Path, **keys: Any) -> tuple[nn.Module, PolicyConfig]:
    """Load a float64 policy. Call it within `float64()`."""
    model, cfg = load(path, **keys)
    return doubled(model), cfg


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=CLOSE, rtol=0)


def logprobs(model: nn.Module) -> Tensor:
    return completion_logprobs(model, PROMPTS, COMPLETIONS, 1.0, 0)[0]


def learn(model: nn.Module, lr: float = 0.05) -> None:
    """Run one update that favors the first completion and penalizes the second."""
    rows = [rollout(p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    old = logprobs(model).detach()
    for row, values in zip(rows, old, strict=True):
        row.old_logprobs = values[: len(row.completion_token_ids)].tolist()
    values = torch.tensor([[1.0] * 4, [-1.0] * 4], dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    update_policy(
        rows,
        TokenAdvantages(raw=values, values=values, mask=mask),
        optimizer,
        RLConfig(kl_coef=0.0),
        policy_model=model,
        temperature=1.0,
        pad_id=0,
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@float64()
def test_fresh_adapters_change_nothing(path: Path) -> None:
    close(logprobs(exact(path, lora=LORA)[0]), logprobs(exact(path)[0]))


@pytest.mark.parametrize("keys", [{}, {"weights_dtype": "bfloat16"}])
def test_with_lora_only_adapters_learn_and_they_do_so_in_float32(
    path: Path, keys: dict[str, Any]
) -> None:
    model, _ = load(path, lora=LORA, **keys)
    before = weights(model)
    learn(model)
    changed = {name for name, value in weights(model).items() if not value.equal(before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert all("lm_head" not in name and "embed_tokens" not in name for name in changed)
    assert {before[name].dtype for name in changed} == {torch.float32}
    base_dtype = getattr(torch, keys.get("weights_dtype", "float32"))
    assert {value.dtype for name, value in before.items() if name not in changed} == {base_dtype}


@float64()
def test_an_update_of_the_adapters_is_that_of_the_weights_they_merge_into(path: Path) -> None:
    model, _ = exact(path, lora=LORA)
    learn(model)
    adapted = logprobs(model)
    assert (adapted - logprobs(exact(path)[0])).abs().max() > 0.1
    merged = copy.deepcopy(model).merge_and_unload()
    close(logprobs(merged), adapted)


def test_a_folder_of_adapters_alone_is_told_for_what_it_is(path: Path, tmp_path: Path) -> None:
    """Check a folder of adapters, which a LoRA run reports as its policy."""
    load(path, lora=LORA)[0].save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=r"policy.path: .* has adapters only. .* export"):
        load_policy(PolicyConfig(path=str(tmp_path)), CPU)


@pytest.mark.parametrize("rank", [0, 2])
def test_of_a_model_that_also_sees_only_what_reads_learns(tmp_path: Path, rank: int) -> None:
    tokenizer = letter_tokenizer()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = sizes | {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 8}
    config = Gemma3Config(
        text_config=text,
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load(tmp_path, lora={"r": rank})
    logprobs(model).sum().backward()
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learning == reached
    assert any("mlp" in name for name in learning) and not any("vision" in n for n in learning)


def test_target_modules_name_the_layers_that_learn(path: Path) -> None:
    model, _ = load(path, lora=LORA | {"target_modules": ["q_proj"]})
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names and all(".q_proj." in name for name in names)
    with pytest.raises(UserError, match=r"policy\.lora\.target_modules: .*no_such"):
        load(path, lora=LORA | {"target_modules": ["no_such"]})


@pytest.mark.parametrize(
    ("targets", "named", "other"),
    [
        (["q_proj", "lm_head"], "lm_head", "model.embed_tokens"),
        (["embed_tokens"], "model.embed_tokens", "lm_head"),
        (["model.embed_tokens", "q_proj"], "model.embed_tokens", "lm_head"),
        (r".*_head", "lm_head", "model.embed_tokens"),
        (r"model\.(embed_tokens|layers\.0\.mlp\.up_proj)", "model.embed_tokens", "lm_head"),
    ],
)
def test_adapters_of_tied_weights_are_refused_before_any_are_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any, named: str, other: str
) -> None:
    monkeypatch.setattr(policy, "load_model", lambda *_: pytest.fail("weights were loaded"))
    message = rf"target_modules: {named} has the same weight as {other} \(tied\)"
    with pytest.raises(UserError, match=message):
        load(path, lora=LORA | {"target_modules": targets})


def tied_models() -> dict[str, tuple[Any, str]]:
    """Return the configs of models that tie weights in other ways, and a layer of each."""
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "eos_token_id": 1}
    heads = sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None}
    gpt2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, eos_token_id=1)
    vision: Any = tiny("qwen2_5_vl").config
    vision.tie_word_embeddings = True
    zamba = Zamba2Config(
        **sizes | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
        layer_types=["mamba", "hybrid"] * 2,
        num_mem_blocks=1,
        n_mamba_heads=4,
        mamba_ngroups=1,
        intermediate_size=16,
    )
    return {
        "no key in config.json": (Gemma3TextConfig(**heads, head_dim=8), "embed_tokens"),
        "another name": (gpt2, "wte"),
        "nested": (vision, "lm_head"),
        "blocks that layers share": (zamba, "q_proj"),
    }


@pytest.mark.parametrize("name", tied_models())
def test_every_way_to_share_a_weight_is_noticed(tmp_path: Path, name: str) -> None:
    config, layer = tied_models()[name]
    config.save_pretrained(tmp_path)
    if name == "no key in config.json":
        written = json.loads((tmp_path / "config.json").read_text())
        written.pop("tie_word_embeddings")
        (tmp_path / "config.json").write_text(json.dumps(written))
    cfg = PolicyConfig(path=str(tmp_path), lora=LORA | {"target_modules": [layer]})
    with pytest.raises(UserError, match=rf"{layer} has the same weight as .* \(tied\)"):
        check_adapters(cfg)


def test_adapters_of_embeddings_that_are_not_tied_learn(path: Path, tmp_path: Path) -> None:
    network: Any = load(path)[0]
    network.config.tie_word_embeddings = False
    network.lm_head.weight = nn.Parameter(network.lm_head.weight.detach().clone())
    network.all_tied_weights_keys = {}
    network.save_pretrained(tmp_path)
    letter_tokenizer().save_pretrained(tmp_path)
    targets = {"target_modules": ["lm_head", "embed_tokens"]}
    model, cfg = load(tmp_path, lora=LORA | targets)
    assert len(model.base_model.targeted_module_names) == 2  # type: ignore[union-attr]
    with pytest.raises(UserError, match="TRL, which trains this task, does not train an adapter"):
        check_adapters(cfg, trl=True)


@pytest.mark.parametrize("keys", [{}, {"lora": LORA}])
@float64()
def test_the_reference_stays_what_the_policy_was(path: Path, keys: dict[str, Any]) -> None:
    model, cfg = exact(path, **keys)
    base = logprobs(exact(path)[0]).detach()
    reference = Reference(cfg, model, CPU)
    learn(model)
    with reference.active() as frozen:
        close(logprobs(frozen), base)
        assert (frozen is model) == bool(keys)  # no second copy of adapted weights
    assert (logprobs(model) - base).abs().max() > 0.1
    learn(model)  # adapters that the reference disabled are enabled
    assert any(p.requires_grad for p in model.parameters())


@float64()
def test_a_reference_of_its_own_is_another_model(path: Path, tmp_path: Path) -> None:
    other = save_policy(tmp_path / "other", letter_tokenizer(), seed=1)
    model, cfg = load(path, lora=LORA, reference_path=str(other))
    with Reference(cfg, model, CPU).active() as frozen:
        close(logprobs(doubled(frozen)), logprobs(exact(other)[0]))
        assert not any(p.requires_grad for p in frozen.parameters())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    logprobs(model).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("keys", [{}, {"lora": LORA}])
@float64()
def test_gradient_checkpointing_computes_layers_twice_for_the_same_gradients(
    path: Path, keys: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = gradients(exact(path, **keys)[0])
    torch.manual_seed(0)
    model, _ = exact(path, gradient_checkpointing=True, **keys)
    mlp = unwrap_peft(model).model.layers[0].mlp
    calls: list[bool] = []
    mlp.register_forward_pre_hook(lambda *_: calls.append(mlp.training))
    with torch.no_grad():
        logprobs(model)
    assert calls == [False]
    checkpointed = gradients(model)
    assert calls == [False] * 3  # once forward, once backward; in eval mode
    assert plain.keys() == checkpointed.keys() and plain
    for name, value in plain.items():
        close(checkpointed[name], value)


def test_gradient_checkpointing_keeps_less_of_the_forward_pass(path: Path) -> None:
    def retained_bytes(model: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = logprobs(model).sum()
        loss.backward()
        return sum(sizes.values())

    plain_bytes = retained_bytes(load(path)[0])
    assert retained_bytes(load(path, gradient_checkpointing=True)[0]) < plain_bytes / 2


def test_a_checkpointed_policy_samples_with_its_cache_what_the_plain_one_does(path: Path) -> None:
    gen_cfg = GenerationConfig(prompt_template="source", max_new_tokens=6)
    samples_by_policy = [
        generate_rollouts(
            [example("abc")], load(path, **keys)[0], letter_tokenizer(), gen_cfg, seed=3
        )
        for keys in ({}, {"gradient_checkpointing": True, "lora": LORA})
    ]
    ids = [[r.completion_token_ids for r in rollouts] for rollouts in samples_by_policy]
    assert ids[0] == ids[1]


def test_sampling_leaves_an_adapted_models_generation_settings_alone(path: Path) -> None:
    model, _ = load(path, lora=LORA)
    before = unwrap_peft(model).generation_config.to_dict()
    gen_cfg = GenerationConfig(prompt_template="source", max_new_tokens=6, temperature=0.5)
    generate_rollouts([example("ab")], model, letter_tokenizer(), gen_cfg, with_logprobs=False)
    assert unwrap_peft(model).generation_config.to_dict() == before


def test_4_bits_without_bitsandbytes_are_refused_before_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.rl.policy.find_spec", lambda name: None)
    cfg = PolicyConfig(path=str(tmp_path / "nowhere"), load_in_4bit=True, lora=LORA)
    with pytest.raises(UserError, match="bitsandbytes"):
        load_policy(cfg, CPU)


def test_4_bit_weights_learn_through_their_adapters(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # quantization blocks have 64 values
    path = save_policy(tmp_path / "policy", letter_tokenizer(), **sizes)
    model, cfg = load(path, load_in_4bit=True, lora=LORA)
    reference = Reference(cfg, model, CPU)
    base, before = logprobs(model).detach(), weights(model)
    learn(model)
    changed = {name for name, value in weights(model).items() if not value.equal(before[name])}
    assert changed == {name for name in before if "lora_" in name}
    with reference.active() as frozen:
        torch.testing.assert_close(logprobs(frozen), base, atol=0.05, rtol=0.05)
    exact = logprobs(load(path)[0])
    assert 0 < (base - exact).abs().mean() < 0.5
