"""A sentence-transformers model behind the Backend protocol: ids, batches, vectors of length 1.

The network is sentence-transformers' own, pooling and dense layers included. Ids are made here: the
tokeniser's thread does it while the model computes, and knows what a text lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scorekit.errors import SampleError, UserError
from scorekit.hub import fetch_model, hide_short_progress, looks_local
from scorekit.server.backend import Encoded, Outcome, installed_versions
from scorekit.server.device import check_dtype, device_memory_bytes, prepare_device
from scorekit.server.queue.tokeniser import Tokeniser
from services.embedder.folder import EMBEDDER_FILES, check_folder, digest_folder, read_prompts
from services.embedder.verb import EmbedderDescription, Embedding, EmbedOptions

if TYPE_CHECKING:
    import torch

#: A limit beyond this is none: tokenizers say 1e30 where they know none.
_NO_LIMIT = 10**6


class EmbedderBackend:
    """An embedding model from a local folder or a hub id.

    pooling, max_input_length: see the settings. dtype: of the weights.
    """

    service = "embedder"
    verb = Embedding()

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        pooling: str | None = None,
        max_input_length: int | None = None,
        device: str = "auto",
        dtype: str = "float32",
        threads: int | None = None,
    ) -> None:
        self._model_name = model
        self._revision = revision
        self._pooling = pooling
        self._max_length = max_input_length
        self._device_name = device
        self._dtype_name = dtype
        self._threads = threads
        self._device: torch.device | None = None
        self._model: Any
        self._tokeniser: Tokeniser

    def check(self) -> None:
        """Refuse at once what cannot work. Raises UserError; loads nothing."""
        check_dtype(self._dtype_name)
        if looks_local(self._model_name):
            check_folder(fetch_model(self._model_name, None, [], "--model"), self._pooling)

    def load(self) -> EmbedderDescription:
        """Load tokenizer and network. Raises UserError where the files are not such a model's."""
        self.check()
        self._device = prepare_device(self._device_name, self._threads)
        folder = fetch_model(self._model_name, self._revision, EMBEDDER_FILES, "--model").absolute()
        check_folder(folder, self._pooling)
        prompts, default_prompt = read_prompts(folder)
        self._model = self._network(folder)
        pooling = _pooling(self._model, folder, any(prompts.values()))
        tokenizer = self._model[0].tokenizer
        if tokenizer is None or not tokenizer.is_fast:
            raise UserError(f"{folder}: its tokenizer has no fast form (tokenizer.json)")
        if tokenizer.truncation_side != "right":
            raise UserError(f"{folder}: its tokenizer cuts the start of a text, not its end")
        self._limit = self._most_tokens(folder)
        self._pad = tokenizer.pad_token_id or 0
        self._tokeniser = Tokeniser(tokenizer.backend_tokenizer)
        self._before, self._behind = _added_ids(tokenizer.backend_tokenizer, folder)
        plain = self.encode([self.probe(1)], EmbedOptions(True, ""))[0]
        assert isinstance(plain, Encoded)
        return EmbedderDescription(
            model=_shown(self._model_name),
            revision=_revision(folder, self._model_name),
            tokenizer=_shown(self._model_name),
            dtype=self._dtype_name,
            device=str(self._device),
            max_input_length=self._limit,
            versions=installed_versions("torch", "transformers", "sentence-transformers"),
            engine={"pooling": pooling, "normalise": "l2", "max_length": f"{self._limit}"},
            pooling=pooling,
            dimension=self._vectors([plain]).shape[1],
            prompts=prompts,
            default_prompt=default_prompt,
        )

    def encode(self, samples: Sequence[str], options: EmbedOptions) -> list[Encoded | SampleError]:
        """Ids as the tokenizer gives them, those that it adds included; the end of what is too
        long is cut where the request says so."""
        room = self._limit - len(self._before) - len(self._behind)
        texts = [options.prompt + text for text in samples] if options.prompt else samples
        encoded: list[Encoded | SampleError] = []
        for read in self._tokeniser.read(texts, room):
            if isinstance(read, Exception):
                raise read
            if read.is_cut and not options.truncate:
                message = f"more than {self._limit} tokens; `truncate` would cut it"
                encoded.append(SampleError("overlong", message))
                continue
            ids = [*self._before, *read.ids, *self._behind]
            encoded.append(Encoded(len(ids), {"tokens": len(ids)}, ids))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Vectors, float32 [D]."""
        return [{"embedding": vector} for vector in self._vectors(batch).numpy()]

    def _vectors(self, batch: Sequence[Encoded]) -> torch.Tensor:
        """[B, D], of length 1, on the CPU."""
        import torch

        longest = max(one.length for one in batch)
        pad = [one.payload + [self._pad] * (longest - one.length) for one in batch]
        mask = [[1] * one.length + [0] * (longest - one.length) for one in batch]
        features = {
            "input_ids": torch.tensor(pad, device=self._device),
            "attention_mask": torch.tensor(mask, device=self._device),
        }
        with torch.inference_mode():
            vectors_BD = self._model(features)["sentence_embedding"].float()
            vectors_BD = vectors_BD[:, : self._model.truncate_dim]
            # In float32, also where the folder's own last step did it in bfloat16.
            return torch.nn.functional.normalize(vectors_BD, dim=1).cpu()

    def probe(self, words: int) -> str:
        """A text of about that many words."""
        return "word " * words

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Bytes that the model holds on its device now, and held at most; None on a CPU."""
        return device_memory_bytes(self._device)

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
                    str(folder),
                    device=str(self._device),
                    local_files_only=True,
                    model_kwargs=weights,
                )
            else:
                reader = Transformer(
                    str(folder), model_kwargs=weights, processor_kwargs=local, config_kwargs=local
                )
                pooling = Pooling(reader.get_embedding_dimension(), self._pooling)
                model = SentenceTransformer(modules=[reader, pooling], device=device)
        except Exception as error:  # a field of the wrong type, a shape that does not fit
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"--model {folder}: cannot be loaded: {reason}") from None
        if "message" in model[0].modality_config:
            raise UserError(f"--model {folder}: it reads chats, not texts (its chat template)")
        return model.train(False).requires_grad_(False)

    def _most_tokens(self, folder: Path) -> int:
        """Tokens that the model reads, or the user's fewer. Raises UserError for more."""
        reader = self._model[0]
        limits = [reader.max_seq_length, _positions(reader.model)]
        own = min((limit for limit in limits if limit and limit < _NO_LIMIT), default=None)
        most = self._max_length or own
        if most is None:
            raise UserError(f"{folder}: no limit of tokens is known: name one, --max-input-length")
        if own is not None and most > own:
            raise UserError(f"--max-input-length {most}: the model reads {own}")
        return int(most)


def _positions(network: Any) -> int | None:
    """Positions that the network has for tokens. Models of RoBERTa's kind count them from behind
    the padding's, and say in their config how many rows that makes."""
    most = getattr(network.config, "max_position_embeddings", None)
    table = getattr(getattr(network, "embeddings", None), "position_embeddings", None)
    first = getattr(table, "padding_idx", None)
    return most if most is None or first is None else most - first - 1


def _pooling(model: Any, folder: Path, has_prompts: bool) -> str:
    """How tokens become one vector, in sentence-transformers' words. Raises UserError for what
    would be a different vector here."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    for step in model:
        if isinstance(step, Pooling):
            if has_prompts and not step.include_prompt:
                raise UserError(
                    f"{folder}: its pooling leaves prompts out, which is not known here"
                )
            modes = step.pooling_mode
            return modes if isinstance(modes, str) else "+".join(modes)
    return "none"  # the network itself gives one vector


def _added_ids(tokenizer: Any, folder: Path) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and behind every text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise UserError(f"{folder}: what its tokenizer adds to a text is not understood")


def _shown(name: str) -> str:
    """A hub id as it is; of a local path the folder's name: a caller need not know our disk."""
    return Path(name).absolute().name if looks_local(name) else name


def _revision(folder: Path, name: str) -> str:
    # A hub snapshot's folder is named after its commit.
    return digest_folder(folder) if looks_local(name) else folder.name
