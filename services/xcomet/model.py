"""xCOMET behind the `Backend` protocol: unbabel-comet's weights and rules without its `predict`.

Input, as upstream writes it (the translation first; each text cut on its own, then the whole):

    always            <s> mt </s></s> src </s>
    with a reference  <s> mt </s></s> ref </s>   and   <s> mt </s></s> src </s></s> ref </s>

Shapes: R rows of a batch (1 or 3 a sample), S samples, L tokens, M positions of the translation
with its <s> and </s>, H hidden size, N layers. The sentence head reads only the first position of
each layer, so nothing of size [R, L, H] is kept but the one layer that the word head reads.

Scores are upstream's (`XCOMETMetric.predict_step`), quirks included: each head is capped at 1 but
not at 0, and the share of the spans counts the raw spans, of which some are lost.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from scorekit.digest import digest_files
from scorekit.errors import SampleError, UserError
from scorekit.hub import XCOMET_FILES, fetch_model, looks_local
from scorekit.schemas import ScoreRange, TranslationSample, XCometOptions
from scorekit.server.backend import (
    Encoded,
    Outcome,
    installed_versions,
    translation_probe,
)
from scorekit.server.device import check_dtype, device_memory_bytes, prepare_device
from scorekit.server.local import LocalScorer
from scorekit.server.queue.tokeniser import Read, Tokeniser
from scorekit.server.scoring import ScoreDescription, Scoring
from services.xcomet.checkpoint import Checkpoint, find_file, inspect, read_checkpoint
from services.xcomet.layers import LayerTaps, layer_weights
from services.xcomet.spans import exact_spans, mqm_score, upstream_spans

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class _Input:
    """What `encode` leaves for `forward`.

    rows: ids of each sequence. offsets [n, 2]: as upstream pairs them with positions.
    read_offsets [m, 2]: of the positions that hold the translation; differs from `offsets` where
    the text itself has padding marks, which upstream removes from the ids but not from these, and
    where unknown characters are written in bytes.
    """

    rows: list[list[int]]
    offsets: np.ndarray
    read_offsets: np.ndarray
    mt: str
    span_offsets: str


class XCometBackend:
    """An `xcomet_metric` checkpoint (XCOMET-XL, XCOMET-XXL, or another) that scores batches.

    model: hub id, folder, or `.ckpt`. encoder: overrides where the encoder's config and tokenizer
    lie. revision: of a hub id. device: auto, cpu, cuda, cuda:N. dtype: float32, bfloat16 or
    float16, of the encoder; both heads stay in float32.
    """

    service = "xcomet"
    verb = Scoring(TranslationSample, XCometOptions)

    def __init__(
        self,
        model: str = "Unbabel/XCOMET-XL",
        encoder: str | None = None,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        threads: int | None = None,
    ) -> None:
        self._model_name = model
        self._encoder_name = encoder
        self._revision = revision
        self._device_name = device
        self._dtype_name = dtype
        self._threads = threads
        self._device: torch.device | None = None

    def check(self) -> None:
        """Refuse at once what cannot work. Raises UserError; reads no weights.

        A model of the hub is checked by `load`, once it has been fetched.
        """
        check_dtype(self._dtype_name)
        if looks_local(self._model_name):
            self._find()

    def load(self) -> ScoreDescription:
        """Load tokenizer and weights. Raises UserError where the files are not xCOMET's."""
        import torch

        check_dtype(self._dtype_name)
        self._torch = torch
        self._device = prepare_device(self._device_name, self._threads)
        checkpoint = self._find()
        metric = _load_metric(checkpoint, self._device, getattr(torch, self._dtype_name))
        encoder = metric.encoder
        self._tokenizer = encoder.tokenizer
        self._tokeniser = Tokeniser(self._tokenizer.backend_tokenizer)
        self._limit = encoder.max_positions
        self._heads = metric.score_weights  # mt+src, mt+ref, mt+src+ref, spans
        self._span_weights = metric.input_weights_spans.tolist()
        self._transformer, self._estimator = encoder.model, metric.estimator
        self._hidden2tag = metric.hidden2tag
        self._mix = layer_weights(metric).to(self._device)  # [N+1]
        self._taps = LayerTaps(
            self._transformer,
            word_layer=metric.hparams.word_layer,
            layer_norm=metric.layerwise_attention is not None and metric.hparams.layer_norm,
        )
        return self._describe(checkpoint)

    def encode(
        self, samples: Sequence[TranslationSample], options: XCometOptions
    ) -> list[Encoded | SampleError]:
        """Tokenise as upstream does. `tokens` counts the ids of all passes (one, or three)."""
        limit = min(options.max_input_length or self._limit, self._limit)
        texts = [(s.mt, s.src) if s.ref is None else (s.mt, s.src, s.ref) for s in samples]
        # Upstream first cuts each text alone, to limit - 2 with an <s> and </s> of its own.
        found = self._tokeniser.read(
            [text for fields in texts for text in fields],
            limit - 4,
            count=options.overlong == "error",
        )
        encoded: list[Encoded | SampleError] = []
        for fields in texts:
            parts: list[Read] = []
            failed = None
            for name, part in zip(("mt", "src", "ref")[: len(fields)], found, strict=False):
                if isinstance(part, Read):
                    parts.append(part)
                else:
                    message = f"{name}: the tokenizer cannot read this text"
                    failed = failed or SampleError("invalid_input", message)
            encoded.append(failed or self._assemble(fields[0], parts, limit, options))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Scores and spans of a batch, samples with and without reference mixed as they come."""
        inputs: list[_Input] = [encoded.payload for encoded in batch]
        with self._torch.inference_mode():
            sentence, confidence, labels = self._run(inputs)
        outcomes = []
        row = 0
        for i, one in enumerate(inputs):
            stop = row + len(one.rows)
            outcomes.append(self._outcome(one, sentence[row:stop], confidence[i], labels[i]))
            row = stop
        return outcomes

    def probe(self, words: int) -> TranslationSample:
        """A translation of about that many words on each side."""
        return translation_probe(words)

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Bytes that the model holds on its device now, and held at most; None on a CPU."""
        return device_memory_bytes(self._device)

    def _find(self) -> Checkpoint:
        folder = fetch_model(self._model_name, self._revision, XCOMET_FILES, "--model")
        file = find_file(folder)
        if looks_local(self._model_name):
            return inspect(file, self._encoder_name)
        # The hub's cache names a snapshot's folder after its commit.
        return inspect(file, self._encoder_name, name=self._model_name, revision=folder.name)

    def _describe(self, checkpoint: Checkpoint) -> ScoreDescription:
        tokenizer = self._tokenizer.backend_tokenizer.to_str().encode()
        local = checkpoint.encoder_is_local
        return ScoreDescription(
            model=checkpoint.name,
            revision=checkpoint.revision or digest_files(checkpoint.scoring_files()),
            tokenizer=checkpoint.encoder.rsplit("/", 1)[-1] if local else checkpoint.encoder,
            dtype=self._dtype_name,
            device=str(self._device),
            max_input_length=self._limit,
            score_range=ScoreRange(min=None, max=1.0),
            higher_is_better=True,
            versions={
                **installed_versions("torch", "transformers", "tokenizers"),
                "comet": installed_versions("unbabel-comet")["unbabel-comet"],
            },
            engine={
                "attention": str(self._transformer.config._attn_implementation),
                "layer_transformation": checkpoint.layer_transformation,
                "tokenizer_digest": hashlib.blake2b(tokenizer, digest_size=16).hexdigest(),
            },
        )

    def _assemble(
        self, mt: str, parts: list[Read], limit: int, options: XCometOptions
    ) -> Encoded | SampleError:
        """Build the rows of a sample from what was read of mt, src and, if given, ref."""
        pad = self._tokenizer.pad_token_id
        ids = [[i for i in part.ids if i != pad] for part in parts]
        pairs = [(0, 1)] if len(ids) == 2 else [(0, 1), (0, 2), (0, 1, 2)]
        whole = [self._join([ids[k] for k in pair]) for pair in pairs]
        # Beyond the limit a row loses its end: the last text first. Its own </s> is no loss.
        lost = [part.is_cut for part in parts]
        for pair, row in zip(pairs, whole, strict=True):
            excess = len(row) - 1 - limit
            for k in reversed(pair):
                lost[k] = lost[k] or (excess > 0 and bool(ids[k]))
                excess -= len(ids[k]) + 2
        if options.overlong == "error" and any(lost):
            longest = sum(part.total + 2 for part in parts)  # uncut, with its marks
            return SampleError("overlong", f"{longest} tokens, limit {limit}")
        rows = [row[:limit] for row in whole]
        edge = [(0, 0)]
        read = [o for o, i in zip(parts[0].own_offsets, parts[0].ids, strict=True) if i != pad]
        fields = {
            "tokens": sum(map(len, rows)),
            "truncated": dict(zip(("mt", "src", "ref"), [*lost, False][:3], strict=True)),
            "mt_covered": parts[0].covered,
        }
        offsets = np.array(edge + parts[0].offsets + edge)
        read_offsets = np.array(edge + read + edge)
        payload = _Input(rows, offsets, read_offsets, mt, options.span_offsets)
        return Encoded(max(map(len, rows)), fields, payload, rows=len(rows))

    def _join(self, texts: list[list[int]]) -> list[int]:
        """<s> a </s></s> b </s></s> c </s>, as XLM-R's `build_inputs_with_special_tokens` nests."""
        first, last = self._tokenizer.cls_token_id, self._tokenizer.sep_token_id
        row = [first, *texts[0], last]
        for text in texts[1:]:
            row += [last, *text, last]
        return row

    def _run(self, inputs: list[_Input]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sentence scores [R], and of each position the confidence and the label, both [S, M]."""
        torch = self._torch
        rows = [row for one in inputs for row in one.rows]
        lengths = np.array([len(row) for row in rows])
        table = np.full((len(rows), lengths.max()), self._tokenizer.pad_token_id)
        for k, row in enumerate(rows):
            table[k, : len(row)] = row
        ids = torch.from_numpy(table).to(self._device)  # [R, L]
        read = np.arange(table.shape[1]) < lengths[:, None]
        mask = torch.from_numpy(read.astype(np.int64)).to(self._device)  # [R, L]
        cls_states, words = self._taps.run(ids, mask)  # [N+1, R, H], [R, L, H]
        mixed = torch.einsum("n,nrh->rh", self._mix, cls_states)
        sentence = self._estimator(mixed).view(-1)  # [R]
        positions = min(max(len(one.offsets) for one in inputs), table.shape[1])
        logits = self._hidden2tag(words[:, :positions].float())  # [R, M, 4]
        probabilities = self._merge(logits.softmax(-1), inputs)  # [S, M, 4]
        confidence, labels = probabilities.max(-1)
        # One transfer for all of it: the device is waited for once a batch.
        flat = torch.cat((sentence, confidence.flatten(), labels.flatten().float())).cpu().numpy()
        by_word = flat[len(rows) :].reshape(2, len(inputs), positions)
        return flat[: len(rows)], by_word[0], by_word[1].astype(np.int64)

    def _merge(self, probabilities: torch.Tensor, inputs: list[_Input]) -> torch.Tensor:
        """Mean of the passes of a sample, by upstream's weights: [R, M, 4] -> [S, M, 4]."""
        if len(probabilities) == len(inputs):
            return probabilities
        torch = self._torch
        index, weight = [], []
        row = 0
        for one in inputs:
            three = len(one.rows) == 3
            index.append([row, row + 1, row + 2] if three else [row, row, row])
            weight.append(self._span_weights if three else [1.0, 0.0, 0.0])
            row += len(one.rows)
        picked = probabilities[torch.tensor(index, device=self._device)]  # [S, 3, M, 4]
        weights = torch.tensor(weight, device=self._device)  # [S, 3]
        return (picked * weights[:, :, None, None]).sum(1)

    def _outcome(
        self, one: _Input, heads: np.ndarray, confidence: np.ndarray, labels: np.ndarray
    ) -> Outcome:
        """The result of a sample: heads [1 or 3], confidence and labels [M]."""
        n = min(len(one.offsets), *map(len, one.rows))
        if not (np.isfinite(heads).all() and np.isfinite(confidence[:n]).all()):
            return SampleError("non_finite", "the model gave a number that is not finite")
        raw = upstream_spans(labels[:n], confidence[:n], one.offsets[:n])
        capped = np.minimum(heads, np.float32(1.0)).astype(np.float64)
        by_head = self._heads[:3] if len(heads) == 3 else [sum(self._heads[:3])]
        score = math.fsum(capped * by_head)
        score += mqm_score(span.severity for span in raw) * self._heads[3]
        if one.span_offsets == "exact":
            m = len(one.read_offsets)
            spans = exact_spans(labels[:m], confidence[:m], one.read_offsets, one.mt)
        else:
            spans = [
                {
                    "start": span.start,
                    "end": span.end,
                    "severity": span.severity,
                    "confidence": span.confidence,
                    "text": self._tokenizer.decode(one.rows[0][span.first : span.stop]),
                }
                for span in raw
            ]
        return {"score": score, "error_spans": spans}


class XCometXLScorer(LocalScorer):
    """xCOMET in this process: `score_batch(samples, cfg) -> RewardOutput`.

    max_batch_tokens: see `LocalScorer`. Raises UserError as the backend does.
    """

    def __init__(
        self,
        xcomet_model_name: str = "Unbabel/XCOMET-XL",
        encoder: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "float32",
        threads: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:
        super().__init__(
            XCometBackend(xcomet_model_name, encoder, device=device, dtype=dtype, threads=threads),
            max_batch_tokens=max_batch_tokens,
        )


def _load_metric(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """The checkpoint as unbabel-comet's `XCOMETMetric`, for inference: its encoder in `dtype`, the
    rest in float32, on the device. Not by upstream's own loading, which holds a large checkpoint
    twice in host memory, and in float32: here the file is mapped, and each weight of it goes to its
    place in its dtype.
    """
    import torch
    from comet.models import XCOMETMetric
    from transformers.modeling_utils import no_init_weights

    stored = read_checkpoint(checkpoint.file)
    known = signature(XCOMETMetric.__init__).parameters
    arguments = {name: v for name, v in stored["hyper_parameters"].items() if name in known}
    arguments |= {
        "load_pretrained_weights": False,
        "local_files_only": checkpoint.encoder_is_local,
        "pretrained_model": checkpoint.encoder,
        "layer_transformation": checkpoint.layer_transformation,
    }
    try:
        # Without numbers, the memory of billions of weights is never touched.
        with no_init_weights():
            metric = XCOMETMetric(**arguments)
        wanted = metric.state_dict().keys()
        weights = {
            name: tensor.to(  # a copy: the file may be replaced while the service runs
                device, dtype if name.startswith("encoder.") else torch.float32, copy=True
            )
            for name, tensor in stored["state_dict"].items()
            if name in wanted  # older checkpoints also hold position ids
        }
        metric.load_state_dict(weights, strict=False, assign=True)
        metric.to(device)  # what is no weight, such as positions
    except OSError:  # of transformers: offline, or no such repository
        raise UserError(
            f"encoder {checkpoint.encoder}: its config and tokenizer are neither here nor can they "
            "be fetched from the hub; give --encoder a local folder"
        ) from None
    except RuntimeError as error:  # load_state_dict: sizes differ
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{checkpoint.file}: does not fit its encoder's config: {reason}") from None
    used = ("encoder.", "estimator.", "hidden2tag.", "layerwise_attention.")
    wanted = {k for k in metric.state_dict() if k.startswith(used) and ".dropout_" not in k}
    missing = sorted(wanted - checkpoint.keys)
    if missing:
        raise UserError(
            f"{checkpoint.file}: {len(missing)} weights are missing, the first is {missing[0]}"
        )
    layers = metric.encoder.num_layers
    for name in ("word_layer", "sent_layer"):
        layer = metric.hparams[name]
        if layer != "mix" and layer not in range(layers):
            raise UserError(f"{checkpoint.file}: {name} is {layer!r}, of layers 0..{layers - 1}")
    metric.eval()
    return metric
