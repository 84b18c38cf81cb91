"""One teacher-forced forward pass over completions: log-probabilities of their tokens.

Shapes: B samples, T tokens of the longest completion, L of the longest prompt with its completion,
H hidden size, V vocabulary, N chosen completion tokens of all samples, P patches of an image, D
numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import groupby
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scorekit.errors import UserError
from trainer.rl.advantage import pad_rows
from trainer.rl.loss import token_logprobs
from trainer.rl.policy import unwrap_distributed, unwrap_peft

#: Entries of a chunk's [n, V] float32 logits: 128 MiB.
CHUNK_ENTRIES = 2**25
#: Logit of an id that is never sampled: its probability is exactly 0.
BARRED = -1e9


def completion_logprobs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float | Sequence[float],
    pad_id: int,
    *,
    actions: Sequence[Sequence[bool]] | None = None,
    images: Sequence[Sequence[Image]] | None = None,
    banned_token_ids: Sequence[int] = (),
    with_entropy: bool = False,
    chunk_entries: int = CHUNK_ENTRIES,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log-probabilities, entropies and the mask of the completion tokens.

    Log-probabilities are [B, T] (0 after a completion's end), entropies [B, T] or None, the mask of
    existing tokens [B, T].
    temperature: that each sequence was sampled at, or that of all.
    actions: False on completion tokens whose numbers nobody needs; they are 0. None: all are True.
    images: images of each sequence, in the order of its ids.
    banned_token_ids: ids that cannot be sampled.
    Sequences are padded on the right only, so that texts need no attention mask (the model is
    causal), and samples of similar length waste nothing. The head is computed only at the positions
    that predict a token of `actions` (most tokens of a searcher's episode are pages); in chunks,
    which are recomputed for the gradient, so that no [B, T, V] tensor exists.
    """
    device = next(model.parameters()).device
    total = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    mask = pad_rows([[True] * len(completion) for completion in completions], torch.bool)  # [B, T]
    chosen = mask if actions is None else pad_rows(actions, torch.bool)  # [B, T]
    input_ids = torch.full((len(prompts), total), pad_id)  # [B, L]
    predicts = torch.zeros(input_ids.shape, dtype=torch.bool)  # [B, L]
    attended = torch.zeros(input_ids.shape, dtype=torch.bool)  # [B, L]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor([*prompt, *completion])
        attended[row, :end] = True
        predicts[row, len(prompt) - 1 : end - 1] = chosen[row, : len(completion)]
    ids_N = pad_rows(completions, torch.long)[chosen]
    temperatures_N = _of_each_token(temperature, chosen).to(device)
    vision_inputs = {} if images is None else image_inputs(model, input_ids, attended, images)
    ids_N, predicts, mask = ids_N.to(device), predicts.to(device), mask.to(device)
    chosen = chosen.to(device)
    barred = torch.tensor(banned_token_ids, device=device, dtype=torch.long)

    # [n, 1], with entropy [n, 2]
    def logprobs_of(logits_NV: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
        if banned_token_ids:  # finite, because the entropy would have 0 times infinity
            logits_NV = logits_NV.float().index_fill(-1, barred, BARRED)
        logprobs, entropy = token_logprobs(logits_NV, ids, temperatures, with_entropy=with_entropy)
        return torch.stack([logprobs] if entropy is None else [logprobs, entropy], dim=-1)

    with _head_in_chunks(model, predicts, (ids_N, temperatures_N), logprobs_of, chunk_entries):
        output = model(input_ids=input_ids.to(device), use_cache=False, **vision_inputs).logits
    logprobs_BT, *entropy_columns = (_scatter(column, chosen) for column in output.unbind(-1))
    return logprobs_BT, entropy_columns[0] if entropy_columns else None, mask


def idle_pass(model: nn.Module, pad_id: int) -> Tensor:
    """Return the log-probabilities of a pass that does not count, over two tokens.

    A process without work makes one because others make a pass and wait for it.
    """
    return completion_logprobs(model, [[pad_id]], [[pad_id]], 1.0, pad_id)[0]


def _of_each_token(temperature: float | Sequence[float], chosen_BT: Tensor) -> Tensor:
    """Return the temperature of each chosen token, [N] in float64."""
    values_B = torch.as_tensor(temperature, dtype=torch.float64).expand(len(chosen_BT))
    return values_B[:, None].expand_as(chosen_BT)[chosen_BT]


def _scatter(values_N: Tensor, chosen_BT: Tensor) -> Tensor:
    """Return the values of the chosen tokens, in order, as [B, T]; 0 elsewhere."""
    zeros = torch.zeros(chosen_BT.shape, dtype=values_N.dtype, device=values_N.device)
    return zeros.masked_scatter(chosen_BT, values_N)


@contextmanager
def _head_in_chunks(
    model: nn.Module,
    predicts_BL: Tensor,
    targets: tuple[Tensor, Tensor],
    logprobs_of: Callable[[Tensor, Tensor, Tensor], Tensor],
    chunk_entries: int,
) -> Iterator[None]:
    """Let the output layer return log-probabilities [N, 1 or 2] instead of logits [B, L, V].

    targets: id and temperature of each predicted token, [N] each.
    Only the layer's own forward is replaced, so that wrappers of the model (FSDP's gathering of its
    weights, autocast) still apply. Models that transform the logits after the head (Gemma 2 caps
    them, Granite and Cohere scale them) get that done in each chunk, and it is turned off in the
    model.
    """
    bare = unwrap_distributed(model)
    head = bare.get_output_embeddings()
    head_forward, hook = head.forward, vars(head).get("forward")  # accelerate puts its hook there
    with _tail(bare) as tail:

        def chunk_logprobs(hidden_NH: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
            return logprobs_of(tail(head_forward(hidden_NH)), ids, temperatures)

        def forward(hidden_BLH: Tensor) -> Tensor:
            hidden_NH = hidden_BLH[predicts_BL]
            rows = max(1, chunk_entries // head.weight.shape[0])
            if len(hidden_NH) <= rows:
                return chunk_logprobs(hidden_NH, *targets)
            parts = [values.split(rows) for values in (hidden_NH, *targets)]
            return torch.cat(
                [
                    checkpoint(chunk_logprobs, *chunk, use_reentrant=False)
                    for chunk in zip(*parts, strict=True)
                ]
            )

        head.forward = forward
        try:
            yield
        finally:
            del head.forward
            if hook is not None:
                head.forward = hook


#: How models transform their logits after the head: attribute of the model or its config, the value
#: that turns it off, and the transform.
_TAILS: tuple[tuple[str, float | None, Callable[[Tensor, float], Tensor]], ...] = (
    ("final_logit_softcapping", None, lambda logits, cap: torch.tanh(logits / cap) * cap),  # Gemma
    ("logits_scaling", 1.0, lambda logits, scaling: logits / scaling),  # Granite
    ("logit_scale", 1.0, lambda logits, scale: logits * scale),  # Cohere
)


@contextmanager
def _tail(model: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the function that a model applies after its head, and turn it off in the model."""
    base = unwrap_peft(model)
    owners = [base, base.config, base.config.get_text_config()]
    saved_values: list[tuple[Any, str, float]] = []
    steps: list[tuple[Callable[[Tensor, float], Tensor], float]] = []
    for name, neutral_value, transform in _TAILS:
        matching_owners = [
            owner for owner in owners if isinstance(getattr(owner, name, None), int | float)
        ]
        if matching_owners:
            steps.append((transform, getattr(matching_owners[0], name)))
        for owner in matching_owners:
            saved_values.append((owner, name, getattr(owner, name)))
            setattr(owner, name, neutral_value)

    def tail(logits: Tensor) -> Tensor:
        for transform, value in steps:
            logits = transform(logits, value)
        return logits

    try:
        yield tail
    finally:
        for owner, name, value in reversed(saved_values):
            setattr(owner, name, value)


def check_head(model: nn.Module) -> None:
    """Raise UserError if `completion_logprobs` would differ from the model's own logits.

    Some architectures transform the logits in a way that `_TAILS` does not list.
    """
    prompt, completion = [[1, 2]], [[3, 2, 1]]
    with torch.no_grad():
        trainer_logprobs, _, _ = completion_logprobs(model, prompt, completion, 1.0, 0)
        ids = torch.tensor([[*prompt[0], *completion[0]]], device=trainer_logprobs.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, 1:-1]
        model_logprobs, _ = token_logprobs(logits, ids[:, 2:], 1.0)
    if not torch.allclose(trainer_logprobs, model_logprobs, atol=0.1):
        model_name = type(unwrap_distributed(model)).__name__
        raise UserError(
            f"policy.path: {model_name} transforms its logits after the "
            "head in a way that the trainer does not support. Its log-probabilities would be wrong"
        )


class Image(Protocol):
    """An image among the ids: a run of the model's image token, after its vision start token.

    There is one id for each square of patches that the model merges. Rollouts go to every process,
    and patches are 8 times as large as the image's bytes: so compute them on access.
    """

    @property
    def patches(self) -> Tensor:
        """Return [P, D], as the model's image processor gives them."""
        ...

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the number of patches in time, height and width."""
        ...

    @property
    def png(self) -> bytes:
        """Return the image for a server that makes its own patches.

        Its size is the size of `patches`: a resized image would be another one.
        """
        ...


def image_inputs(
    model: nn.Module, ids_BL: Tensor, attended_BL: Tensor, images: Sequence[Sequence[Image]]
) -> dict[str, Tensor]:
    """Return the model's inputs besides the ids; empty if no row has an image.

    images: of each row, in the order of its ids.
    attended_BL: False on padding.
    Raises ValueError if a row's ids and images do not match; the model checks the totals only.
    """
    all_images = [image for row in images for image in row]
    if not all_images:
        return {}
    bare = unwrap_peft(model)
    config, device = bare.config, next(model.parameters()).device
    merged = config.vision_config.spatial_merge_size**2
    for row, (ids, attended) in enumerate(zip(ids_BL, attended_BL, strict=True)):
        expected = [prod(image.grid) // merged for image in images[row]]
        run_lengths = _runs(
            ids[attended].tolist(), config.image_token_id, config.vision_start_token_id
        )
        if run_lengths != expected:
            raise ValueError(
                f"row {row}: runs of image ids {run_lengths}, but its images are {expected}"
            )
    # Set explicitly: without one of them some versions are wrong without an error
    inputs = {
        "attention_mask": attended_BL.long(),
        "mm_token_type_ids": ((ids_BL == config.image_token_id) & attended_BL).long(),
        "pixel_values": torch.cat([image.patches for image in all_images]),
        "image_grid_thw": torch.tensor([image.grid for image in all_images]),
    }
    parameters = signature(type(bare).forward).parameters
    if "mm_token_type_ids" not in parameters:  # the model does not need it
        del inputs["mm_token_type_ids"]
    return {name: value.to(device) for name, value in inputs.items()}


def _runs(ids: Sequence[int], image_id: int, start_id: int) -> list[int]:
    """Return the lengths of the runs of image ids; negative without a vision start token."""
    run_lengths, previous_id = [], None
    for token_id, run in groupby(ids):
        if token_id == image_id:
            length = len(list(run))
            run_lengths.append(length if previous_id == start_id else -length)
        previous_id = token_id
    return run_lengths


def micro_batches(
    lengths: Sequence[int], max_tokens: int, indices: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Yield indices, short samples first, by at most `max_tokens` padded tokens or one sample.

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
