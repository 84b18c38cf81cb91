"""One teacher-forced forward pass over completions: log-probabilities of their tokens.

Shapes: B samples, T tokens of the longest completion, L of the longest prompt with its completion,
H hidden size, V vocabulary, N completion tokens of all samples, P patches of an image, D numbers
of a patch.
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
from trainer.rl.loss import token_logprobs
from trainer.rl.policy import unwrapped, without_wrappers

#: Entries of a chunk's [n, V] float32 logits: 128 MiB.
CHUNK_ENTRIES = 2**25
#: Logit of an id that is never sampled: its probability is exactly 0.
BARRED = -1e9


def completion_logprobs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
    pad_id: int,
    *,
    images: Sequence[Sequence[Image]] | None = None,
    never: Sequence[int] = (),
    with_entropy: bool = False,
    chunk_entries: int = CHUNK_ENTRIES,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probabilities [B, T] of the completion tokens (0 behind a completion's end), entropies
    [B, T] or None, and the mask [B, T] of the tokens there are.

    images: what each sequence shows, in the order of its ids. never: ids that cannot be sampled.
    Sequences are padded on the right only, so that texts need no attention mask (a causal model
    does not look ahead) and samples of like total length waste nothing. The head is computed at
    the positions that predict a completion token, and nowhere else; in chunks, computed again for
    the gradient, so that no [B, T, V] tensor is ever held.
    """
    device = next(model.parameters()).device
    length = max(map(len, completions))
    total = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    input_ids = torch.full((len(prompts), total), pad_id)  # [B, L]
    predicts = torch.zeros(input_ids.shape, dtype=torch.bool)  # [B, L]
    attended = torch.zeros(input_ids.shape, dtype=torch.bool)  # [B, L]
    mask = torch.zeros((len(prompts), length), dtype=torch.bool)  # [B, T]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor([*prompt, *completion])
        attended[row, :end] = True
        predicts[row, len(prompt) - 1 : end - 1] = True
        mask[row, : len(completion)] = True
    ids_N = torch.tensor([token_id for completion in completions for token_id in completion])
    shown = {} if images is None else image_inputs(model, input_ids, attended, images)
    ids_N, predicts, mask = ids_N.to(device), predicts.to(device), mask.to(device)
    barred = torch.tensor(never, device=device, dtype=torch.long)

    def logprobs_of(logits_NV: Tensor, ids: Tensor) -> Tensor:  # [n, 1], with entropy [n, 2]
        if never:  # finite, or the entropy would have 0 times infinity
            logits_NV = logits_NV.float().index_fill(-1, barred, BARRED)
        logprobs, entropy = token_logprobs(logits_NV, ids, temperature, with_entropy=with_entropy)
        return torch.stack([logprobs] if entropy is None else [logprobs, entropy], dim=-1)

    with _head_in_chunks(model, predicts, ids_N, logprobs_of, chunk_entries):
        output = model(input_ids=input_ids.to(device), use_cache=False, **shown).logits
    logprobs_BT, *rest = (_scatter(column, mask) for column in output.unbind(-1))
    return logprobs_BT, rest[0] if rest else None, mask


def _scatter(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Values of the valid tokens in order -> [B, T], 0 elsewhere."""
    zeros = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device)
    return zeros.masked_scatter(mask_BT, values_N)


@contextmanager
def _head_in_chunks(
    model: nn.Module,
    predicts_BL: Tensor,
    ids_N: Tensor,
    logprobs_of: Callable[[Tensor, Tensor], Tensor],
    chunk_entries: int,
) -> Iterator[None]:
    """Let the output layer give log-probabilities [N, 1 or 2] in place of logits [B, L, V].

    In place of the layer's own forward, so that whatever wraps the model (FSDP's gathering of its
    weights, autocast) is around it. A model that does more than its head (Gemma 2 caps the logits,
    Granite and Cohere scale them) gets that done in each chunk, and is told not to do it itself.
    """
    bare = unwrapped(model)
    head = bare.get_output_embeddings()
    own, hook = head.forward, vars(head).get("forward")  # a hook: accelerate's, in its place
    with _tail(bare) as tail:

        def of_chunk(hidden_NH: Tensor, ids: Tensor) -> Tensor:
            return logprobs_of(tail(own(hidden_NH)), ids)

        def forward(hidden_BLH: Tensor) -> Tensor:
            hidden_NH = hidden_BLH[predicts_BL]
            rows = max(1, chunk_entries // head.weight.shape[0])
            if len(ids_N) <= rows:
                return of_chunk(hidden_NH, ids_N)
            pieces = zip(hidden_NH.split(rows), ids_N.split(rows), strict=True)
            return torch.cat(
                [checkpoint(of_chunk, hidden, ids, use_reentrant=False) for hidden, ids in pieces]
            )

        head.forward = forward
        try:
            yield
        finally:
            del head.forward
            if hook is not None:
                head.forward = hook


#: What models do to their logits behind the head: attribute of the model or its config, the value
#: that does nothing, and what it does.
_TAILS: tuple[tuple[str, float | None, Callable[[Tensor, float], Tensor]], ...] = (
    ("final_logit_softcapping", None, lambda logits, cap: torch.tanh(logits / cap) * cap),  # Gemma
    ("logits_scaling", 1.0, lambda logits, scaling: logits / scaling),  # Granite
    ("logit_scale", 1.0, lambda logits, scale: logits * scale),  # Cohere
)


@contextmanager
def _tail(model: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """What a model does to its logits behind the head, and the model without it meanwhile."""
    base = without_wrappers(model)
    owners = [base, base.config, base.config.get_text_config()]
    taken: list[tuple[Any, str, float]] = []
    steps: list[tuple[Callable[[Tensor, float], Tensor], float]] = []
    for name, nothing, change in _TAILS:
        found = [owner for owner in owners if isinstance(getattr(owner, name, None), int | float)]
        if found:
            steps.append((change, getattr(found[0], name)))
        for owner in found:
            taken.append((owner, name, getattr(owner, name)))
            setattr(owner, name, nothing)

    def tail(logits: Tensor) -> Tensor:
        for change, value in steps:
            logits = change(logits, value)
        return logits

    try:
        yield tail
    finally:
        for owner, name, value in reversed(taken):
            setattr(owner, name, value)


def check_head(model: nn.Module) -> None:
    """Raise UserError where `completion_logprobs` would differ from the model's own logits: an
    architecture that does more behind its head than is known here."""
    prompt, completion = [[1, 2]], [[3, 2, 1]]
    with torch.no_grad():
        ours, _, _ = completion_logprobs(model, prompt, completion, 1.0, 0)
        ids = torch.tensor([[*prompt[0], *completion[0]]], device=ours.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, 1:-1]
        theirs, _ = token_logprobs(logits, ids[:, 2:], 1.0)
    if not torch.allclose(ours, theirs, atol=0.1):
        raise UserError(
            f"policy.path: a {type(unwrapped(model)).__name__} changes its logits behind the head "
            "in a way that the trainer does not know; its log-probabilities would be wrong"
        )


class Image(Protocol):
    """What stands among the ids as a run of the model's image token, behind its vision start token:
    one id for each square of patches that the model merges.

    Rollouts go to every process whole, and patches are 8 times as large as the picture's bytes: so
    they are better made when they are asked for.
    """

    @property
    def patches(self) -> Tensor:
        """[P, D], as the model's image processor gives them."""
        ...

    @property
    def grid(self) -> tuple[int, int, int]:
        """How many patches lie side by side in time, height and width."""
        ...

    @property
    def png(self) -> bytes:
        """The picture, for a server that makes its own patches: of just the size that these are
        of, since one that is resized there is another picture."""
        ...


def image_inputs(
    model: nn.Module, ids_BL: Tensor, attended_BL: Tensor, images: Sequence[Sequence[Image]]
) -> dict[str, Tensor]:
    """What the model takes beside the ids: nothing where no row has an image.

    images: of each row, in the order of its ids. attended_BL: False on padding.
    Raises ValueError where a row's ids and images do not match; the model would look at the totals
    of all rows alone.
    """
    seen = [image for row in images for image in row]
    if not seen:
        return {}
    bare = without_wrappers(model)
    config, device = bare.config, next(model.parameters()).device
    merged = config.vision_config.spatial_merge_size**2
    for row, (ids, attended) in enumerate(zip(ids_BL, attended_BL, strict=True)):
        expected = [prod(image.grid) // merged for image in images[row]]
        found = _runs(ids[attended].tolist(), config.image_token_id, config.vision_start_token_id)
        if found != expected:
            raise ValueError(f"row {row}: runs of image ids {found}, but its images are {expected}")
    # Not left to their defaults: without the one or the other some versions are wrong in silence
    inputs = {
        "attention_mask": attended_BL.long(),
        "mm_token_type_ids": ((ids_BL == config.image_token_id) & attended_BL).long(),
        "pixel_values": torch.cat([image.patches for image in seen]),
        "image_grid_thw": torch.tensor([image.grid for image in seen]),
    }
    takes = signature(type(bare).forward).parameters
    if "mm_token_type_ids" not in takes:  # a model that does not need it
        del inputs["mm_token_type_ids"]
    return {name: value.to(device) for name, value in inputs.items()}


def _runs(ids: Sequence[int], image_id: int, start_id: int) -> list[int]:
    """Lengths of the runs of image ids; negative where none starts an image."""
    found, before = [], None
    for token_id, run in groupby(ids):
        if token_id == image_id:
            length = len(list(run))
            found.append(length if before == start_id else -length)
        before = token_id
    return found


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
