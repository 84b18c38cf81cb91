"""The policy: loading it, and one teacher-forced forward pass over completions.

Shapes: B samples, T tokens of the longest completion, L of the longest prompt with its
completion, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scorekit.errors import UserError
from trainer.config import MiscConfig, PolicyConfig

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


def prepare_torch(cfg: MiscConfig) -> torch.device:
    """Set the threads and pick the device."""
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    return pick_device(cfg.device)


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Arithmetic in `dtype`; weights, log-probabilities and optimiser state stay float32."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def load_policy(cfg: PolicyConfig, device: torch.device) -> tuple[nn.Module, Any]:
    """(model, tokenizer) of `cfg.path`, weights in float32, dropout off.

    Raises UserError that names the key and the path, also where the tokenizer has ids that the
    model has no embedding for.
    """
    if cfg.path is None:
        raise UserError("policy.path is not set: give the folder or hub id of a causal LM")
    model = _load_model(cfg.path, cfg.revision, "policy.path").to(device)
    tokenizer = load_tokenizer(cfg)
    highest, rows = _highest_id(tokenizer), embedding_rows(model)
    if highest >= rows:
        raise UserError(
            f"policy.tokenizer: {cfg.tokenizer or cfg.path} has ids up to {highest}, but the model "
            f"in {cfg.path} has {rows} embeddings: use its own tokenizer, or resize them"
        )
    return model, tokenizer


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


def load_reference(cfg: PolicyConfig, policy: nn.Module, device: torch.device) -> nn.Module:
    """The frozen model that the policy is held to: `reference_path`, or a copy of the policy."""
    if cfg.reference_path is None:
        reference = copy.deepcopy(policy)
    else:
        reference = _load_model(cfg.reference_path, None, "policy.reference_path").to(device)
    return reference.requires_grad_(False).eval()


def load_tokenizer(cfg: PolicyConfig) -> Any:
    """The tokenizer, padding on the left."""
    from transformers import AutoTokenizer

    path = cfg.tokenizer or cfg.path
    revision = cfg.revision if cfg.tokenizer is None else None
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, padding_side="left")
    except Exception as error:  # transformers raises half a dozen kinds
        raise UserError(f"policy.tokenizer: cannot load {path!r}: {_first_line(error)}") from None


def _load_model(path: str, revision: str | None, key: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise UserError(f"{key}: {path}: no such folder")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path, revision=revision, dtype=torch.float32, output_loading_info=True
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
    return model.eval()


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
    # `save_pretrained` moves what stands in config.json into the generation config
    for name in model.config._get_non_default_generation_parameters():
        setattr(model.config, name, None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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


def completion_logits(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    pad_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Teacher-forced forward pass over prompt + completion.

    Sequences are padded on the right only, so that no attention mask is needed (a causal model
    does not look ahead) and samples of like total length waste nothing. The head is computed at
    the positions that predict a completion token, and nowhere else.
    Returns logits [B, T, V] (row t predicts completion token t), ids [B, T], mask [B, T].
    """
    device = next(model.parameters()).device
    length = max(map(len, completions))
    total = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    input_ids = torch.full((len(prompts), total), pad_id)  # [B, L]
    ids = torch.full((len(prompts), length), pad_id)  # [B, T]
    mask = torch.zeros(ids.shape, dtype=torch.bool)  # [B, T]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        input_ids[row, : len(prompt) + len(completion)] = torch.tensor([*prompt, *completion])
        ids[row, : len(completion)] = torch.tensor(completion)
        mask[row, : len(completion)] = True
    starts = torch.tensor([len(prompt) - 1 for prompt in prompts])
    positions = (starts[:, None] + torch.arange(length)).clamp(max=total - 1).to(device)  # [B, T]
    with _head_at(model, positions):
        logits = model(input_ids=input_ids.to(device), use_cache=False).logits
    return logits, ids.to(device), mask.to(device)


@contextmanager
def _head_at(model: nn.Module, positions: Tensor) -> Iterator[None]:
    """Hand the output layer only the hidden states [B, L, H] at `positions` [B, T].

    A hook, since a causal LM may do more than its head (scale or cap the logits), and its own
    `logits_to_keep` cannot differ between the rows.
    """

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0]
        index = positions[..., None].expand(-1, -1, hidden.shape[-1])
        return (hidden.gather(1, index), *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def micro_batches(
    lengths: Sequence[int], max_tokens: int, indices: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Indices in batches of at most `max_tokens` padded tokens (or one sample), short ones first.

    lengths: tokens of each sample, prompt and completion together.
    """
    chosen = range(len(lengths)) if indices is None else indices
    batch: list[int] = []
    for index in sorted(chosen, key=lambda i: lengths[i]):
        if batch and lengths[index] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
