"""The policy: loading it, its tokenizer, and the reference that it is held to."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.hub import hide_short_progress
from trainer.rl.checkpointing import checkpoint_layers
from trainer.rl.config import PolicyConfig
from trainer.rl.tokenizer_files import read_tokenizer

log = logging.getLogger(__name__)


def pick_device(name: str) -> torch.device:
    """`auto`: a GPU where there is one. Raises UserError on a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"misc.device: {name!r}: {str(error).splitlines()[0]}") from None
    return device


def prepare_torch(device: str, threads: int | None) -> torch.device:
    """Set the threads (None: as they are) and pick the device."""
    if threads is not None:
        torch.set_num_threads(threads)
    return pick_device(device)


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Arithmetic in `dtype`; weights, log-probabilities and optimiser state stay float32."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def load_policy(cfg: PolicyConfig, device: torch.device) -> tuple[nn.Module, Any]:
    """(model, tokenizer) of `cfg.path`; dropout off, what learns in float32: every weight, or the
    adapters that `cfg.lora` asks for.

    Raises UserError that names the key and the path, also where the tokenizer has ids that the
    model has no embedding for.
    """
    if cfg.path is None:
        raise UserError("policy.path is not set: give the folder or hub id of a causal LM")
    check_4bit(cfg)
    check_adapters(cfg)
    model = _load_model(cfg, cfg.path, cfg.revision, "policy.path", device)
    tokenizer = load_tokenizer(cfg)
    check_tokenizer(cfg, tokenizer, model)
    if cfg.gradient_checkpointing:
        checkpoint_layers(model)
    if cfg.lora.r:
        model = with_adapters(model, cfg)
    freeze_unread(model)
    return model, tokenizer


def check_tokenizer(cfg: PolicyConfig, tokenizer: Any, model: nn.Module) -> None:
    """Raise UserError where the tokenizer has ids that the model has no embedding for."""
    highest, rows = _highest_id(tokenizer), embedding_rows(model)
    if highest >= rows:
        raise UserError(
            f"policy.tokenizer: {cfg.tokenizer or cfg.path} has ids up to {highest}, but the model "
            f"in {cfg.path} has {rows} embeddings: use its own tokenizer, or resize them"
        )


def check_4bit(cfg: PolicyConfig) -> None:
    """Raise UserError where the policy is asked for in 4 bits and bitsandbytes is not here."""
    if cfg.load_in_4bit and find_spec("bitsandbytes") is None:
        raise UserError(
            "policy.load_in_4bit needs bitsandbytes: `pip install bitsandbytes`, or leave it out"
        )


def check_folder(path: str, key: str) -> None:
    """Raise UserError where a path is none of a folder, and cannot be a name on the hub."""
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).is_dir():
        raise UserError(f"{key}: {path}: no such folder")


def check_whole(path: str, key: str) -> None:
    """Raise UserError where a folder holds adapters without the model that they belong to."""
    folder = Path(path)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(
            f"{key}: {path} holds adapters only: merge them into their model first (python -m "
            "trainer export RUN_DIR --to FOLDER), and name that folder"
        )


def check_adapters(cfg: PolicyConfig) -> None:
    """Raise UserError where `with_adapters` would, before weights are loaded."""
    if cfg.lora.r:
        config = _read_config(str(cfg.path), cfg.revision, "policy.path")
        with_adapters(without_weights(config), cfg)


def with_adapters(model: nn.Module, cfg: PolicyConfig) -> nn.Module:
    """The model in peft's wrapper, with fresh adapters (which change nothing yet) in float32 and
    everything else frozen. all-linear: of a model that also sees, what reads text.

    Raises UserError where no layer is so named, or one that only images pass: it is frozen, and
    vLLM leaves its adapter out without a word.
    """
    from peft import LoraConfig, get_peft_model

    unread = set(unread_parts(model))
    sees = [f"{name}." for name, part in model.named_modules() if part in unread]
    only_images, targets = rf"({'|'.join(map(re.escape, sees))}).*", cfg.lora.target_modules
    told = LoraConfig(
        r=cfg.lora.r,
        lora_alpha=cfg.lora.alpha,  # type: ignore[arg-type]  # peft multiplies with it
        target_modules=targets,
        exclude_modules=only_images if sees and targets == "all-linear" else None,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: Any = get_peft_model(model, told).eval()
    except ValueError as error:
        raise UserError(f"policy.lora.target_modules: {_first_line(error)}") from None
    for name in adapted.base_model.targeted_module_names:
        if name.startswith(tuple(sees)):
            raise UserError(
                f"policy.lora.target_modules: {name} is one of them, which only images pass: that "
                "part stays frozen; set all-linear, or a pattern of whole names that leaves it out"
            )
    return adapted


def freeze_unread(model: nn.Module) -> None:
    """Of a model that also sees, let only the part that reads text learn: the rest gets no gradient
    from texts, and processes that share an update would wait for it."""
    bare = without_wrappers(model)
    if takes_images(bare):
        reads = _reading(bare)
        for parameter in model.parameters():
            if id(parameter) not in reads:
                parameter.requires_grad_(False)


def unread_parts(model: nn.Module) -> list[nn.Module]:
    """Of a model that also sees, the parts that no text passes; each as large as may be."""
    bare = without_wrappers(model)
    if not takes_images(bare):
        return []
    reads, found, left = _reading(bare), [], [bare]
    while left:
        for part in left.pop().children():
            known = [id(parameter) in reads for parameter in part.parameters()]
            if any(known):
                left.append(part)
            elif known:
                found.append(part)
    return found


def takes_images(bare: Any) -> bool:
    """Whether a transformers model reads more than text."""
    return bare.config.get_text_config() is not bare.config


def _reading(bare: Any) -> set[int]:
    """Ids of the parameters that read text."""
    parts = (bare.get_decoder(), bare.get_output_embeddings())
    return {id(parameter) for part in parts for parameter in part.parameters()}


def embedding_rows(model: nn.Module) -> int:
    """Ids that the model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def _highest_id(tokenizer: Any) -> int:
    """Of the ids that text becomes and those that end and fill up sequences.

    Other special tokens do not count: Gemma 3's text models have no row for the tokenizer's image
    token. Where a chat template writes one, `check_prompts` tells.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    ids = set(tokenizer.get_vocab().values()) - special
    return max(ids | {token_id for token_id in named if token_id is not None}, default=0)


class Reference:
    """The frozen model that the policy is held to: `reference_path`, or the policy as it was. That
    is the policy without its adapters, where it has them, and a copy where every weight learns."""

    def __init__(
        self,
        cfg: PolicyConfig,
        policy: nn.Module,
        device: torch.device,
        shard: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """policy: not trained yet, not spread over processes yet. shard: spreads a model, where
        the processes share the weights."""
        self._adapted: Any = None
        if cfg.reference_path is not None:
            model = _load_model(cfg, cfg.reference_path, None, "policy.reference_path", device)
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
        """The model that gives the reference's log-probabilities, within."""
        if self._adapted is None:
            yield self._model
            return
        with self._adapted.disable_adapter():
            yield self._adapted


def load_tokenizer(cfg: PolicyConfig) -> Any:
    """The tokenizer, padding on the left."""
    path = cfg.tokenizer or cfg.path
    if path is not None:
        check_folder(path, "policy.tokenizer" if cfg.tokenizer else "policy.path")
    revision = cfg.revision if cfg.tokenizer is None else None
    try:
        return read_tokenizer(str(path), revision)
    except Exception as error:  # transformers raises half a dozen kinds
        raise UserError(f"policy.tokenizer: cannot load {path!r}: {_first_line(error)}") from None


def _load_model(
    cfg: PolicyConfig, path: str, revision: str | None, key: str, device: torch.device
) -> nn.Module:
    """The model of `path` on `device`, its weights held as `cfg` says."""
    hide_short_progress()
    options: dict[str, Any] = {"dtype": getattr(torch, cfg.weights_dtype)}
    if cfg.load_in_4bit:
        options |= _in_4bit(cfg, device)
    config = _read_config(path, revision, key)
    try:
        model, loading = model_class(config).from_pretrained(
            path,
            config=config,
            revision=revision,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # transformers raises half a dozen kinds
        raise UserError(f"{key}: cannot load {path!r}: {_first_line(error)}") from None
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(
            f"{key}: {path}: {len(missing)} weights are missing, {missing[0]} first; "
            "they would be random"
        )
    _keep_ids_only(model)
    if cfg.load_in_4bit:  # which is placed where it is made
        _keep_gradients(model)
    else:
        model = model.to(device)
    return model.eval()


def _read_config(path: str, revision: str | None, key: str) -> Any:
    from transformers import AutoConfig

    check_folder(path, key)
    check_whole(path, key)
    try:
        return AutoConfig.from_pretrained(path, revision=revision)
    except Exception as error:  # transformers raises half a dozen kinds
        raise UserError(f"{key}: cannot load {path!r}: {_first_line(error)}") from None


def without_weights(config: Any) -> nn.Module:
    """The model of a config, on the meta device; the random state as before after."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = model_class(config).from_config(config).eval()
    return model


def model_class(config: Any) -> Any:
    """Of transformers' auto classes the one that loads what generates text from a config."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING  # Qwen2.5-VL
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def _in_4bit(cfg: PolicyConfig, device: torch.device) -> dict[str, Any]:
    """QLoRA's form (arXiv 2305.14314) by default."""
    from transformers import BitsAndBytesConfig

    told = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=cfg.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=cfg.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=getattr(torch, cfg.bnb_4bit_compute_dtype),
    )
    return {"quantization_config": told, "device_map": {"": device}}


def _keep_gradients(model: nn.Module) -> None:
    """Of a model in 4 bits. On a CPU with AVX512-BF16 bitsandbytes 0.50 packs its weights anew when
    they are first passed in eval mode, for a product without a gradient: from then on adapters
    below would learn something wrong, in silence."""
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False


def _keep_ids_only(model: Any) -> None:
    """Leave of the model's generation settings the ids that end, fill up and begin sequences.

    Nothing else of them is used; and transformers refuses to save many that it loads, such as
    a temperature beside `do_sample: false`, which would be found out when the run is over.
    """
    from transformers import GenerationConfig

    theirs = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )


def _first_line(error: Exception) -> str:
    """Cut off where it is long: transformers names every model that it knows."""
    lines = str(error).strip().splitlines()
    return shorten(lines[0], 240, placeholder=" ...") if lines else type(error).__name__


def unwrapped(model: Any) -> Any:
    """The model itself, out of what spreads it over processes."""
    return getattr(model, "module", model)


def without_wrappers(model: Any) -> Any:
    """The transformers model itself, out of peft's wrapper, too; its adapters act all the same."""
    bare = unwrapped(model)
    return bare.get_base_model() if hasattr(bare, "get_base_model") else bare


def stop_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Ids that end a turn: the tokenizer's EOS and those that the model's generation config names
    (chat models end a turn by another token than a document)."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    stops = sorted({token_id for token_id in ids if token_id is not None})
    if not stops:
        raise UserError("the policy has no end-of-sequence token: it could never learn to stop")
    return stops


def pad_token_id(model: nn.Module, tokenizer: Any) -> int:
    """The id that fills up a batch; any will do, since it is masked."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return stop_token_ids(model, tokenizer)[0]
