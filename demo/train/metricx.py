"""Train the MetricX-form checkpoint: an mT5 whose first decoder logit is the score (0 best).

    python -m demo.train.metricx pretrain --steps 2500 --out runs/demo_train/metricx_lm.pt
    python -m demo.train.metricx train --start runs/demo_train/metricx_lm.pt --steps 5000 \
        --out runs/demo_train/metricx.pt --export demo/models/metricx

`pretrain` teaches the encoder translation as a prefix LM (next candidate token, seeing the
source); `train` the score, with severity tags of the candidate tokens as a denser task whose head
is thrown away.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, MT5Config, MT5ForConditionalGeneration

from demo.train import judge
from demo.train.common import WORK, fit, parameter_groups, setup
from demo.train.examples import Example
from demo.train.tokenizer import EOS, PAD, SCORE, VOCAB_SIZE
from scorekit.command import run_command
from scorekit.files import allow_readers

TOKENIZER = WORK / "tokenizer" / "metricx"
SCALE = 8.0  # the score row is learned as 8 x a row, so that 0..25 is within easy reach


def new_config() -> MT5Config:
    """Return the config of a model with four encoder layers of width 192 and one decoder layer."""
    config = MT5Config(
        vocab_size=VOCAB_SIZE,
        d_model=192,
        d_kv=32,
        d_ff=512,
        num_layers=4,
        num_decoder_layers=1,
        num_heads=6,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        dropout_rate=0.1,
    )
    config.score_token_id = SCORE
    config.tie_word_embeddings = False  # transformers 5 looks at no argument of that name
    return config


class Scorer(torch.nn.Module):  # type: ignore[misc]
    """The mT5 body with a score row and a tag head."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.body = MT5ForConditionalGeneration(new_config())
        # transformers 5 gives each half embeddings of its own where the output has its own.
        self.body.set_input_embeddings(self.body.shared)
        with torch.no_grad():  # T5's default of 1 is far too wide for tied prefix-LM logits
            self.body.shared.weight.normal_(0, 0.3)
        self.row = torch.nn.Linear(192, 1, bias=False)
        self.tags = torch.nn.Linear(192, 4)

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids

        self.parts = [encode(part) for part in ("source:", "candidate:", "reference:")]
        self.blank = encode("a ")[1:]  # what an empty candidate leaves behind

    def sequence(self, example: Example, reference: bool) -> tuple[list[int], int]:
        """Return input ids as MetricX-24 builds them (EOS dropped) and where the candidate
        starts.
        """
        source, candidate, ref = self.parts
        prefix = source + (example.src or self.blank) + candidate
        ids = prefix + (example.mt or self.blank)
        return (ids + ref + example.ref if reference else ids), len(prefix)

    def encode(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run the encoder under a [B, S] or [B, S, S] mask."""
        encoder = self.body.encoder
        mask = mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
        bias = (1.0 - mask.float()) * torch.finfo(torch.float32).min
        hidden = encoder.dropout(encoder.embed_tokens(ids))
        positions, offset = torch.arange(ids.shape[1]), None
        for block in encoder.block:
            hidden, offset = block(hidden, bias, offset, cache_position=positions)[:2]
        return encoder.dropout(encoder.final_layer_norm(hidden))

    def score(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run one decoder step from id 0."""
        start = torch.zeros(hidden.shape[0], 1, dtype=torch.long)
        output = self.body.decoder(
            input_ids=start,
            encoder_hidden_states=hidden,
            encoder_attention_mask=mask,
            use_cache=False,
        ).last_hidden_state
        return SCALE * self.row(output[:, 0]).squeeze(-1).float()

    def lm_loss(self, examples: list[Example]) -> torch.Tensor:
        """Return prefix-LM loss of the candidate."""
        rows = [self.sequence(e, False) for e in examples]
        ids, mask = judge.padded_ids([row for row, _ in rows])
        starts = torch.tensor([start for _, start in rows])
        causal = torch.arange(ids.shape[1])[None] >= starts[:, None]
        hidden = self.encode(ids, judge.prefix_mask(mask.bool(), causal))
        nexts = [judge.nexts_of(s, e.mt) for (_, s), e in zip(rows, examples, strict=True)]
        nexts = judge.widen(nexts, ids.shape[1])
        return judge.token_loss(0.25 * hidden, self.body.shared.weight, nexts)

    def qe_loss(self, examples: list[Example], reference: bool, within: float) -> torch.Tensor:
        """Return squared error of the score plus cross-entropy of the tags."""
        rows = [self.sequence(e, reference) for e in examples]
        ids, mask = judge.padded_ids([row for row, _ in rows])
        hidden = self.encode(ids, mask)
        tag_rows, width = [[-1] * start for _, start in rows], ids.shape[1]
        tags = [p + e.tags for p, e in zip(tag_rows, examples, strict=True)]
        error = judge.score_loss(1 - self.score(hidden, mask) / 25, examples, within)
        tag_loss = judge.tag_loss(self.tags(hidden), judge.widen(tags, width))
        return 10 * error + tag_loss

    @torch.no_grad()
    def predict(self, examples: list[Example], reference: bool = False) -> list[float]:
        """Return scores, clamped to 0..25; fp32."""
        self.eval()
        out = []
        for start in range(0, len(examples), 64):
            rows = [self.sequence(e, reference)[0] for e in examples[start : start + 64]]
            ids, mask = judge.padded_ids(rows)
            out += self.score(self.encode(ids, mask), mask).clamp(0, 25).tolist()
        self.train()
        return out


def export(model: Scorer, tokenizer: Any, folder: Path) -> None:
    """Save as a plain mT5 checkpoint in bf16; only one row of lm_head is not zero."""
    body = copy.deepcopy(model.body)
    with torch.no_grad():
        body.lm_head.weight.zero_()
        body.lm_head.weight[SCORE] = SCALE * model.row.weight[0]
    body.config.architectures = ["MT5ForRegression"]
    body.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    allow_readers(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # it scores, it does not generate


def train(args: argparse.Namespace) -> None:
    """Run the pretraining or the training, as the command says."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = Scorer(tokenizer)
    if args.start:
        model.load_state_dict(torch.load(args.start, weights_only=True), strict=False)
    model.train()
    with_reference = judge.chooser(args.reference_share, args.seed)
    pretraining = args.command == "pretrain"
    if pretraining:
        examples = judge.pretraining_pairs(tokenizer)
    else:
        examples = judge.training_examples(tokenizer, args)
    batches = judge.batches_of(examples, args, extra=6)

    def step_loss(step: int) -> torch.Tensor:
        batch = [examples[i] for i in next(batches)]
        return (
            model.lm_loss(batch)
            if pretraining
            else model.qe_loss(batch, with_reference(), args.within)
        )

    def keep() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.out)
        if args.export:
            export(model, tokenizer, args.export)

    def print_stats() -> None:
        keep()
        print(
            "metricx",
            judge.dev_figures(lambda e: [-s for s in model.predict(e)], tokenizer, args.candidates),
            flush=True,
        )

    every = {} if pretraining else dict.fromkeys(range(500, args.steps + 1, 500), print_stats)
    groups = parameter_groups(model, args.lr)
    fit(groups, step_loss, args.steps, args.lr, every, f"metricx {args.command}")
    keep()


def main() -> None:
    """Run the command line."""
    args = judge.arguments(__doc__.splitlines()[0]).parse_args()
    setup(args.seed)
    train(args)


if __name__ == "__main__":
    run_command(main, stdout="log")
