"""The sentence-transformers backend: encodes texts and returns vectors of length 1.

sentence-transformers runs the network, with pooling and dense layers. This module makes the ids,
because the tokenizer's thread can do so while the model computes, and because it can tell if a text
was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from scorekit.errors import SampleError, UserError
from scorekit.hub import fetch_model, hide_short_progress, looks_local, public_name
from scorekit.server.backend import Encoded, Outcome, installed_versions
from scorekit.server.checkpoint_backend import CheckpointBackend, ModelOptions, token_positions
from scorekit.server.tokenizers import BoundedTokenizer
from services.embedder.endpoint import (
    EmbedderDescription,
    EmbedderRerankEndpoint,
    EmbeddingsEndpoint,
    EmbedOptions,
)
from services.embedder.folder import EMBEDDER_FILES, check_folder, digest_folder, read_prompts

if TYPE_CHECKING:
    import torch

#: Larger limits mean "no limit": some tokenizers report 1e30.
_NO_LIMIT = 10**6


class EmbedderBackend(CheckpointBackend):
    """An embedding model from a local folder or a hub id.

    pooling, max_input_length: see the settings.
    """

    service = "embedder"
    endpoint = EmbeddingsEndpoint(EmbedderRerankEndpoint())

    def __init__(
        self,
        model: str,
        *,
        pooling: str | None = None,
        max_input_length: int | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        super().__init__(model, **options)
        self._pooling = pooling
        self._max_length = max_input_length
        self._model: Any
        self._tokenizer: BoundedTokenizer

    def check(self) -> None:
        """Raise UserError if the settings cannot work. Loads nothing."""
        super().check()
        if looks_local(self._model_name):
            check_folder(fetch_model(self._model_name, None, [], "--model"), self._pooling)

    def load(self) -> EmbedderDescription:
        """Load the tokenizer and the network. Raises UserError if the files do not fit."""
        self.check()
        self._prepare_device()
        folder = fetch_model(self._model_name, self._revision, EMBEDDER_FILES, "--model").absolute()
        check_folder(folder, self._pooling)
        prompts, default_prompt = read_prompts(folder)
        self._model = self._network(folder)
        self._pack(self._model[0])  # its rows are tokens; those of later modules are texts
        pooling = _pooling(self._model, folder, any(prompts.values()))
        tokenizer = self._model[0].tokenizer
        if tokenizer is None or not tokenizer.is_fast:
            raise UserError(f"{folder}: the model has no fast tokenizer (tokenizer.json)")
        if tokenizer.truncation_side != "right":
            raise UserError(
                f"{folder}: the tokenizer cuts the start of a text. Set truncation_side to right"
            )
        self._limit = self._max_tokens(folder)
        self._pad = tokenizer.pad_token_id or 0
        self._tokenizer = BoundedTokenizer(tokenizer.backend_tokenizer)
        self._prefix_ids, self._suffix_ids = _added_ids(tokenizer.backend_tokenizer, folder)
        plain = self.encode([self.probe(1)], EmbedOptions(True, ""))[0]
        assert isinstance(plain, Encoded)
        return EmbedderDescription(
            model=public_name(self._model_name),
            revision=_revision(folder, self._model_name),
            tokenizer=public_name(self._model_name),
            dtype=self._dtype_name,
            device=str(self._device),
            matmul=self._matmul,
            max_input_length=self._limit,
            versions=installed_versions("torch", "transformers", "sentence-transformers"),
            engine={"pooling": pooling, "normalise": "l2", "max_length": f"{self._limit}"},
            pooling=pooling,
            dimension=self._vectors([plain]).shape[1],
            prompts=prompts,
            default_prompt=default_prompt,
        )

    def encode(self, samples: Sequence[str], options: EmbedOptions) -> list[Encoded | SampleError]:
        """Return the ids of each text, special tokens included.

        A text that is too long is cut at its end if the request allows it."""
        max_tokens = self._limit - len(self._prefix_ids) - len(self._suffix_ids)
        texts = [options.prompt + text for text in samples] if options.prompt else samples
        encoded: list[Encoded | SampleError] = []
        for tokenized in self._tokenizer.read(texts, max_tokens):
            if isinstance(tokenized, Exception):
                raise tokenized
            if tokenized.is_cut and not options.truncate:
                message = f"more than {self._limit} tokens; `truncate` would cut it"
                encoded.append(SampleError("overlong", message))
                continue
            ids = [*self._prefix_ids, *tokenized.ids, *self._suffix_ids]
            fields = {"tokens": len(ids), "truncated": {"input": tokenized.is_cut}}
            encoded.append(Encoded(len(ids), fields, ids))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the vectors, float32 [D], in order."""
        return [{"embedding": vector} for vector in self._vectors(batch).numpy()]

    def _vectors(self, batch: Sequence[Encoded]) -> torch.Tensor:
        """Return vectors [B, D] of length 1 on the CPU."""
        import torch

        longest = max(encoded.length for encoded in batch)
        padded_ids = [
            encoded.payload + [self._pad] * (longest - encoded.length) for encoded in batch
        ]
        mask = [[1] * encoded.length + [0] * (longest - encoded.length) for encoded in batch]
        features = {
            "input_ids": torch.tensor(padded_ids, device=self._device),
            "attention_mask": torch.tensor(mask, device=self._device),
        }
        with torch.inference_mode():
            vectors_BD = self._model(features)["sentence_embedding"].float()
            vectors_BD = vectors_BD[:, : self._model.truncate_dim]
            # Normalize in float32, even if the model's last module did it in bfloat16.
            return torch.nn.functional.normalize(vectors_BD, dim=1).cpu()

    def probe(self, words: int) -> str:
        """Return a text of about `words` words."""
        return "word " * words

    def _network(self, folder: Path) -> Any:
        import torch
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        hide_short_progress()
        weights = {"dtype": getattr(torch, self._dtype_name), "local_files_only": True}
        local, device = {"local_files_only": True}, str(self._device)
        try:
            if self._pooling is None:
                model = SentenceTransformer(
                    str(folder), device=device, local_files_only=True, model_kwargs=weights
                )
            else:
                transformer = Transformer(
                    str(folder), model_kwargs=weights, processor_kwargs=local, config_kwargs=local
                )
                pooling = Pooling(transformer.get_embedding_dimension(), self._pooling)
                model = SentenceTransformer(modules=[transformer, pooling], device=device)
        except Exception as error:  # a field of the wrong type, a shape that does not fit
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"--model {folder}: cannot be loaded: {reason}") from None
        if "message" in model[0].modality_config:
            raise UserError(
                f"--model {folder}: the model expects chats, not texts (it has a chat template)"
            )
        return model.train(False).requires_grad_(False)

    def _max_tokens(self, folder: Path) -> int:
        """Return the model's token limit, or the user's lower one. Raises UserError if higher."""
        transformer = self._model[0]
        limits = [transformer.max_seq_length, token_positions(transformer.model)]
        model_limit = min((limit for limit in limits if limit and limit < _NO_LIMIT), default=None)
        max_tokens = self._max_length or model_limit
        if max_tokens is None:
            raise UserError(f"{folder}: the model states no token limit. Set --max-input-length")
        if model_limit is not None and max_tokens > model_limit:
            raise UserError(
                f"--max-input-length {max_tokens}: the model's limit is {model_limit} tokens"
            )
        return int(max_tokens)


def _pooling(model: Any, folder: Path, has_prompts: bool) -> str:
    """Return the pooling mode as sentence-transformers names it.

    Raises UserError if the pooling excludes prompts, which this service does not support."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    for step in model:
        if isinstance(step, Pooling):
            if has_prompts and not step.include_prompt:
                raise UserError(f"{folder}: its pooling excludes prompts, which is not supported")
            modes = step.pooling_mode
            return modes if isinstance(modes, str) else "+".join(modes)
    return "none"  # the network itself gives one vector


def _added_ids(tokenizer: Any, folder: Path) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer adds before and after every text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise UserError(f"{folder}: cannot tell which special tokens the tokenizer adds")


def _revision(folder: Path, name: str) -> str:
    # A hub snapshot's folder is named after its commit.
    return digest_folder(folder) if looks_local(name) else folder.name
