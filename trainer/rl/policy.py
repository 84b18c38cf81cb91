"""Load the model that is trained, with its adapters and its tokenizer, and the frozen reference.

From top to bottom: the policy as a whole, models in general, low-rank adapters, the tokenizer and
its ids, image parts (they are not trained), gradient checkpointing, the reference, and models
without the wrappers that distribute or adapt them. Errors name the config key.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scorekit.errors import UserError
from scorekit.hub import hide_short_progress
from scorekit.matmul import MatmulSetting
from scorekit.torch_files import check_weight_files
from trainer.rl.config import PolicyConfig
from trainer.rl.matmul import use_onednn
from trainer.rl.model_files import read_tokenizer


def load_policy(cfg: PolicyConfig, device: torch.device) -> tuple[nn.Module, Any]:
    """Return (model, tokenizer) of `cfg.path`, without dropout.

    The trained weights are float32: every weight, or the adapters that `cfg.lora` configures.
    Raises UserError that names key and path, also if the tokenizer has ids without an embedding.
    """
    if cfg.path is None:
        raise UserError("policy.path: required. Set the folder or hub id of a causal LM")
    check_4bit(cfg)
    check_adapters(cfg)
    model = load_model(cfg, cfg.path, cfg.revision, "policy.path", device)
    tokenizer = load_tokenizer(cfg)
    check_tokenizer(cfg, tokenizer, model)
    if cfg.gradient_checkpointing:
        checkpoint_layers(model)
    if cfg.lora.r:
        model = with_adapters(model, cfg)
    freeze_vision(model)
    return model, tokenizer


def check_4bit(cfg: PolicyConfig) -> None:
    """Raise UserError if the policy is to be loaded in 4 bits and bitsandbytes is not installed."""
    if cfg.load_in_4bit and find_spec("bitsandbytes") is None:
        raise UserError(
            "policy.load_in_4bit needs bitsandbytes: `pip install bitsandbytes`, or leave it out"
        )


def check_folder(path: str, key: str) -> None:
    """Raise UserError if a path is no folder, and cannot be a name on the hub."""
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).is_dir():
        raise UserError(f"{key}: {path}: no such folder")


def holds_adapters(path: str) -> bool:
    """Return whether a folder has adapters without their base model."""
    folder = Path(path)
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def check_has_base_model(path: str, key: str) -> None:
    """Raise UserError if a folder has adapters without their base model."""
    if holds_adapters(path):
        raise UserError(
            f"{key}: {path} has adapters only. Merge them into their model first (python -m "
            "trainer export RUN_DIR --to FOLDER), and name that folder"
        )


def load_model(
    cfg: PolicyConfig, path: str, revision: str | None, key: str, device: torch.device
) -> nn.Module:
    """Return the model of `path` on `device`, with weights in the data type of `cfg`."""
    hide_short_progress()
    options: dict[str, Any] = {"dtype": getattr(torch, cfg.weights_dtype)}
    if cfg.load_in_4bit:
        options |= _in_4bit(cfg, device)
    config = read_config(path, revision, key)
    check_weight_files(Path(path))
    try:
        model, loading = model_class(config).from_pretrained(
            path,
            config=config,
            revision=revision,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # transformers raises many types
        raise UserError(f"{key}: cannot load {path!r}: {first_line(error)}") from None
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(
            f"{key}: {path}: {len(missing)} weights are missing, {missing[0]} first. "
            "They would be random"
        )
    _keep_ids_only(model)
    if cfg.load_in_4bit:  # already loaded onto its device
        _keep_gradients(model)
    else:
        model = model.to(device)
    return model.eval()


def read_config(path: str, revision: str | None, key: str) -> Any:
    from transformers import AutoConfig

    check_folder(path, key)
    check_has_base_model(path, key)
    try:
        return AutoConfig.from_pretrained(path, revision=revision)
    except Exception as error:  # transformers raises many types
        raise UserError(f"{key}: cannot load {path!r}: {first_line(error)}") from None


def without_weights(config: Any) -> nn.Module:
    """Return the model of a config on the meta device; the random state does not change."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = model_class(config).from_config(config).eval()
    return model


def model_class(config: Any) -> Any:
    """Return transformers' auto class that loads a text generator from a config."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    takes_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING  # Qwen2.5-VL
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def _in_4bit(cfg: PolicyConfig, device: torch.device) -> dict[str, Any]:
    """Return options for loading in 4 bits, by default as QLoRA does (arXiv 2305.14314)."""
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=cfg.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=cfg.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=getattr(torch, cfg.bnb_4bit_compute_dtype),
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def _keep_gradients(model: nn.Module) -> None:
    """Turn off a packing of 4-bit weights that gives wrong gradients.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 packs its weights at the first pass in eval mode,
    for a product without a gradient. Adapters below would then be trained wrongly, without error.
    """
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False


def _keep_ids_only(model: Any) -> None:
    """Keep only the ids that end, pad and begin sequences of the model's generation settings.

    The others are not used. Transformers loads many settings that it refuses to save, such as a
    temperature with `do_sample: false`; that would fail at the end of the run.
    """
    from transformers import GenerationConfig

    loaded_config = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=loaded_config.bos_token_id,
        eos_token_id=loaded_config.eos_token_id,
        pad_token_id=loaded_config.pad_token_id,
    )


def first_line(error: Exception) -> str:
    """Return the first line, shortened: transformers lists every model that it knows."""
    lines = str(error).strip().splitlines()
    return shorten(lines[0], 240, placeholder=" ...") if lines else type(error).__name__


def check_adapters(cfg: PolicyConfig, *, trl: bool = False) -> None:
    """Raise UserError if `with_adapters` would, before weights are loaded."""
    if cfg.lora.r:
        config = read_config(str(cfg.path), cfg.revision, "policy.path")
        with_adapters(without_weights(config), cfg, trl=trl)


def adapter_config(model: nn.Module, cfg: PolicyConfig) -> Any:
    """Return peft's config of new adapters; with all-linear, image parts get none."""
    from peft import LoraConfig

    prefixes, targets = _image_prefixes(model), cfg.lora.target_modules
    only_images = rf"({'|'.join(map(re.escape, prefixes))}).*"
    return LoraConfig(
        r=cfg.lora.r,
        lora_alpha=cfg.lora.alpha,  # type: ignore[arg-type]  # peft multiplies with it
        target_modules=targets,
        exclude_modules=only_images if prefixes and targets == "all-linear" else None,
        task_type="CAUSAL_LM",
    )


def with_adapters(model: nn.Module, cfg: PolicyConfig, *, trl: bool = False) -> nn.Module:
    """Return the model in peft's wrapper, with new float32 adapters and everything else frozen.

    New adapters change no output. With all-linear, the image parts of a model get no adapters.
    trl: TRL trains it, which computes log-probabilities without an adapter of the output layer.
    Raises UserError if no layer has such a name; if a layer only processes images: it is frozen,
    and vLLM ignores its adapter silently; if a layer shares its weight with another one; or if
    the output layer has an adapter that TRL would not train.
    """
    from peft import get_peft_model

    image_prefixes = tuple(_image_prefixes(model))
    try:
        with without_tie_warnings():
            adapted: Any = get_peft_model(model, adapter_config(model, cfg)).eval()
    except ValueError as error:
        raise UserError(f"policy.lora.target_modules: {first_line(error)}") from None
    for name in adapted.base_model.targeted_module_names:
        if name.startswith(image_prefixes):
            raise UserError(
                f"policy.lora.target_modules: {name} only processes images, and "
                "stays frozen. Set all-linear, or a pattern of full names that excludes it"
            )
    for name, other in shared_layers(adapted).items():
        raise UserError(
            f"policy.lora.target_modules: {name} has the same weight as {other} (tied), so an "
            f"adapter of it cannot be merged: the merged weight would change {other}, too. Leave "
            "it out (a pattern of full names can), or train a model whose weights are not tied"
        )
    head = adapted.get_base_model().get_output_embeddings()
    if trl and hasattr(head, "base_layer"):
        raise UserError(
            "policy.lora.target_modules: TRL, which trains this task, does not train an adapter of "
            "the output layer. Leave it out, as all-linear does"
        )
    return adapted


@contextmanager
def without_tie_warnings() -> Iterator[None]:
    """Hide peft's warnings of tied weights, a page each, within: `shared_layers` finds them."""
    with warnings.catch_warnings():
        for text in (r"Model (has|with) `tie_word_emb", r"Input and output embeddings are no"):
            warnings.filterwarnings("ignore", text, UserWarning)
        yield


def shared_layers(adapted: nn.Module) -> dict[str, str]:
    """Return each layer with adapters whose weight another layer uses without these adapters.

    Of layers that all have adapters of their own, the last one is left out: it may keep the weight.
    adapted: a model in peft's wrapper. Keys and values are the names of the two layers.
    """
    uses_by_weight: dict[int, dict[int | None, str]] = {}
    for full_name, weight in adapted.named_parameters(remove_duplicate=False):
        owner_name, _, _ = full_name.rpartition(".")
        name, _, inner = owner_name.rpartition(".")
        is_adapted = inner == "base_layer"
        layer = adapted.get_submodule(name) if is_adapted else None  # all plain layers are alike
        uses = uses_by_weight.setdefault(id(weight), {})
        short_name = (name if is_adapted else owner_name).removeprefix("base_model.model.")
        uses.setdefault(id(layer) if is_adapted else None, short_name)
    shared: dict[str, str] = {}
    for uses in uses_by_weight.values():
        adapted_names = [name for layer, name in uses.items() if layer is not None]
        other = uses.get(None, adapted_names[-1] if adapted_names else "")
        shared |= {name: other for name in adapted_names if name != other}
    return shared


def _image_prefixes(model: nn.Module) -> list[str]:
    """Return what the names of layers begin with that only process images."""
    unread = set(vision_parts(model))
    return [f"{name}." for name, part in model.named_modules() if part in unread]


def load_tokenizer(cfg: PolicyConfig) -> Any:
    """Return the tokenizer, padding on the left."""
    path = cfg.tokenizer or cfg.path
    if path is not None:
        check_folder(path, "policy.tokenizer" if cfg.tokenizer else "policy.path")
    revision = cfg.revision if cfg.tokenizer is None else None
    try:
        return read_tokenizer(str(path), revision)
    except Exception as error:  # transformers raises many types
        raise UserError(f"policy.tokenizer: cannot load {path!r}: {first_line(error)}") from None


def plain_prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a prompt that no chat template has rendered.

    The tokenizer adds its tokens before the text. A tokenizer made for training (`add_eos_token`)
    also ends a text with EOS; a prompt must not end with it, because the model would begin
    another text.
    """
    ids = list(tokenizer(text)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    starts = range(len(ids) - len(bare) + 1)
    begin = next((n for n in starts if ids[n : n + len(bare)] == bare), len(ids))
    while len(ids) > begin + len(bare) and ids[-1] == tokenizer.eos_token_id:
        del ids[-1]
    return ids


def check_tokenizer(cfg: PolicyConfig, tokenizer: Any, model: nn.Module) -> None:
    """Raise UserError if the tokenizer has ids that the model has no embedding for."""
    highest, rows = _highest_id(tokenizer), embedding_rows(model)
    if highest >= rows:
        raise UserError(
            f"policy.tokenizer: {cfg.tokenizer or cfg.path} has ids up to {highest}, but the model "
            f"in {cfg.path} has {rows} embeddings. Use its own tokenizer, or resize them"
        )


def embedding_rows(model: nn.Module) -> int:
    """Return the number of ids that the model has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def _highest_id(tokenizer: Any) -> int:
    """Return the largest of the ids of texts, and of those that end and pad sequences.

    Other special tokens do not count: Gemma 3's text models have no row for the tokenizer's image
    token. If a chat template writes one, `check_prompts` reports it.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    ids = set(tokenizer.get_vocab().values()) - special
    return max(ids | {token_id for token_id in named if token_id is not None}, default=0)


def stop_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the ids that end a turn: the tokenizer's EOS, and the generation config's.

    Chat models end a turn with another token than a document.
    """
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    stops = sorted({token_id for token_id in ids if token_id is not None})
    if not stops:
        raise UserError("policy.path: the model has no end-of-sequence token: it cannot stop")
    return stops


def pad_token_id(model: nn.Module, tokenizer: Any) -> int:
    """Return the id that pads a batch; any id works, because it is masked."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return stop_token_ids(model, tokenizer)[0]


def freeze_vision(model: nn.Module) -> None:
    """Freeze the image parts of a model that also reads images.

    They get no gradient from texts, and processes that share an update would wait for it.
    """
    bare = unwrap_peft(model)
    if takes_images(bare):
        text_parameter_ids = _text_parameter_ids(bare)
        for parameter in model.parameters():
            if id(parameter) not in text_parameter_ids:
                parameter.requires_grad_(False)


def vision_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that text does not pass, each as large as possible."""
    bare = unwrap_peft(model)
    if not takes_images(bare):
        return []
    text_parameter_ids, image_parts, remaining = _text_parameter_ids(bare), [], [bare]
    while remaining:
        for part in remaining.pop().children():
            reads_text = [id(parameter) in text_parameter_ids for parameter in part.parameters()]
            if any(reads_text):
                remaining.append(part)
            elif reads_text:
                image_parts.append(part)
    return image_parts


def takes_images(bare: Any) -> bool:
    """Return whether a transformers model also reads images."""
    return bare.config.get_text_config() is not bare.config


def _text_parameter_ids(bare: Any) -> set[int]:
    """Return the ids (`id()`) of the parameters that text passes."""
    parts = (bare.get_decoder(), bare.get_output_embeddings())
    return {id(parameter) for part in parts for parameter in part.parameters()}


def checkpoint_layers(model: nn.Module) -> None:
    """Let each layer store only its input, and recompute the rest (arXiv 1604.06174).

    Transformers' own switch works in train mode only, where dropout would be active too.
    Raises UserError if the model has no layers that support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"policy.gradient_checkpointing: {type(model).__name__} does not support it. Set it to "
            "false"
        )
    for layer in layers:
        layer.forward = partial(_forward_with_recompute, layer.forward)


def _forward_with_recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # sampling, with its cache
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class Reference:
    """The frozen reference model: `reference_path`, or the policy at the start.

    The latter is the policy without its adapters, or a copy if every weight is trained.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        policy: nn.Module,
        device: torch.device,
        shard: Callable[[nn.Module], None] | None = None,
        *,
        matmul: MatmulSetting = "torch",
    ) -> None:
        """Load the reference, or copy or share `policy`, which is not trained or distributed yet.

        shard: distributes a model, if the processes share the weights.
        matmul: who multiplies.
        """
        self._adapted: Any = None
        if cfg.reference_path is not None:
            model = load_model(cfg, cfg.reference_path, None, "policy.reference_path", device)
            if matmul == "onednn":
                use_onednn(model)
        elif cfg.lora.r:
            self._adapted = policy
            return
        else:
            model = copy.deepcopy(policy)
        self._model = model.requires_grad_(False).eval()
        if shard is not None:
            shard(self._model)

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Yield the model that gives the reference's log-probabilities."""
        if self._adapted is None:
            yield self._model
            return
        with self._adapted.disable_adapter():
            yield self._adapted


def unwrap_distributed(model: Any) -> Any:
    """Return the model without the wrapper that distributes it."""
    return getattr(model, "module", model)


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model without wrappers, peft's included; its adapters still apply."""
    bare = unwrap_distributed(model)
    return bare.get_base_model() if hasattr(bare, "get_base_model") else bare
