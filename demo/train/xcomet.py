"""Train the xCOMET-form checkpoint: XCOMETMetric's networks over a tiny XLM-RoBERTa-XL.

    python -m demo.train.xcomet pretrain --steps 2500 --out runs/demo_train/xcomet_lm.pt
    python -m demo.train.xcomet train --start runs/demo_train/xcomet_lm.pt --steps 5000 \
        --out runs/demo_train/xcomet.pt --export demo/models/xcomet

The sentence head learns sentence chrF (0..1), the word head the severity tags, both in all three
inputs of xCOMET (mt+src, mt+ref, mt+src+ref). Upstream's score mixes the sentence head with the
MQM score of the spans; nothing here changes how.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path

import torch
import yaml
from transformers import XLMRobertaXLConfig

from demo.train import judge
from demo.train.common import WORK, fit, setup
from demo.train.examples import Example
from demo.train.tokenizer import BOS, EOS, PAD, VOCAB_SIZE
from scorekit.command import run_command
from services.xcomet.classes import hyper_parameters
from services.xcomet.networks import Metric
from services.xcomet.tokenizer import read_tokenizer

TOKENIZER = WORK / "tokenizer" / "xcomet"
LAYERS = 4
#: Arguments of XCOMETMetric, as unbabel-comet takes them, too.
ARGUMENTS = {
    "encoder_model": "XLM-RoBERTa-XL",
    "pretrained_model": "encoder",  # beside the checkpoint, which may then be moved
    "load_pretrained_weights": False,
    "sent_layer": "mix",
    "layer_transformation": "softmax",
    "layer_norm": False,
    "word_layer": LAYERS,
    "hidden_sizes": [256, 128],
    "cross_entropy_weights": None,
    "dropout": 0.1,
    "nr_frozen_epochs": 0,
    "keep_embeddings_frozen": False,
}


def encoder_config() -> XLMRobertaXLConfig:
    """Return the config of an encoder with four layers of width 256."""
    return XLMRobertaXLConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        max_position_embeddings=514,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
    )


def write_encoder(folder: Path) -> None:
    """Write the encoder's config and tokenizer, which a checkpoint needs beside its weights."""
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    encoder_config().save_pretrained(folder)


def new_model() -> Metric:
    """Return an untrained metric."""
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder))
        arguments = hyper_parameters("xcomet_metric", ARGUMENTS)
        return Metric("xcomet_metric", arguments | {"pretrained_model": folder}, local=True)


def sequence(example: Example, kind: str) -> list[int]:
    """Return input ids as COMET concatenates them: the candidate first."""
    segments = {"src": [example.src], "ref": [example.ref], "both": [example.src, example.ref]}
    ids = [BOS, *example.mt, EOS]
    for segment in segments[kind]:
        ids += [EOS, *segment, EOS]
    return ids


def lm_loss(model: Metric, examples: list[Example]) -> torch.Tensor:
    """Return prefix-LM loss of the candidate, seeing the source."""
    ids, mask = judge.padded_ids([sequence(e, "src") for e in examples])
    ends = torch.tensor([len(e.mt) + 2 for e in examples])
    causal = torch.arange(ids.shape[1])[None] < ends[:, None]
    encoder = model.encoder.model
    position_ids = mask.cumsum(1) * mask + PAD
    # Around the model's own reading of the mask: transformers 4 and 5 want such a mask in forms of
    # their own, and their blocks both want it added to the attention.
    seen = judge.prefix_mask(mask.bool(), causal)[:, None]
    hidden = encoder.encoder(
        encoder.embeddings(input_ids=ids, position_ids=position_ids),
        attention_mask=torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min),
    ).last_hidden_state
    nexts = judge.widen([judge.nexts_of(1, e.mt) for e in examples], ids.shape[1])
    return judge.token_loss(hidden, encoder.embeddings.word_embeddings.weight, nexts)


def forward(
    model: Metric, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what XCOMETMetric.forward does, and keep the last hidden states.

    Returns sentence scores, tag logits, hidden states.
    """
    assert model.layerwise_attention is not None and model.estimator is not None
    layers = model.encoder(ids, mask)
    mixed = model.layerwise_attention([layer[:, :1] for layer in layers], mask[:, :1])
    hidden = layers[LAYERS]
    return model.estimator(mixed[:, 0]).view(-1), model.hidden2tag(hidden), hidden


def qe_loss(
    model: Metric,
    fix: torch.nn.Linear,
    examples: list[Example],
    kind: str,
    within: float,
) -> torch.Tensor:
    """Return squared error of the sentence head, cross-entropy of the word head and of the
    fixes.
    """
    ids, mask = judge.padded_ids([sequence(e, kind) for e in examples])
    score, logits, hidden = forward(model, ids, mask)
    tags = judge.widen([[0, *e.tags, 0] for e in examples], ids.shape[1])
    fixes = judge.widen([[-1, *e.fixes] for e in examples], ids.shape[1])
    error = judge.score_loss(score.float(), examples, within)
    embeddings = model.encoder.model.embeddings.word_embeddings.weight
    fix_loss = judge.token_loss(fix(hidden), embeddings, fixes)
    return 10 * error + judge.tag_loss(logits, tags) + judge.FIX_WEIGHT * fix_loss


@torch.no_grad()
def predict(model: Metric, examples: list[Example]) -> list[float]:
    """Return the sentence head's QE score (without the MQM part); fp32."""
    model.eval()
    out = []
    for start in range(0, len(examples), 64):
        ids, mask = judge.padded_ids([sequence(e, "src") for e in examples[start : start + 64]])
        out += forward(model, ids, mask)[0].clamp(max=1).tolist()
    model.train()
    return out


def export(model: Metric, folder: Path) -> None:
    """Write the checkpoint, hparams.yaml and the encoder's folder.

    The checkpoint has bf16 weights and only primitive hyper-parameters.
    """
    hparams = {**ARGUMENTS, "error_labels": ["minor", "major", "critical"]}
    hparams |= {"train_data": [], "validation_data": [], "class_identifier": "xcomet_metric"}
    state = {
        k: v.to(torch.bfloat16) for k, v in model.state_dict().items() if v.is_floating_point()
    }
    checkpoint = {
        "state_dict": state,
        "hyper_parameters": hparams,
        "pytorch-lightning_version": "2.0.0",
        "epoch": 0,
        "global_step": 0,
    }
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "checkpoints").mkdir(parents=True)
    torch.save(checkpoint, folder / "checkpoints" / "model.ckpt")
    (folder / "hparams.yaml").write_text(yaml.safe_dump(hparams), encoding="utf-8")
    write_encoder(folder / "encoder")


def train(args: argparse.Namespace) -> None:
    """Run the pretraining or the training, as the command says."""
    tokenizer = read_tokenizer("XLM-RoBERTa-XL", str(TOKENIZER), local=True)
    model = new_model()
    if args.start:
        model.load_state_dict(torch.load(args.start, weights_only=True))
    fix = torch.nn.Linear(256, 256)  # helps the training only, not part of the checkpoint
    model.train()
    rng, with_reference = random.Random(args.seed), judge.chooser(args.reference_share, args.seed)
    pretraining = args.command == "pretrain"
    if pretraining:
        examples = judge.pretraining_pairs(tokenizer)
    else:
        examples = judge.training_examples(tokenizer, args)
    batches = judge.batches_of(examples, args, extra=5)

    def step_loss(step: int) -> torch.Tensor:
        batch = [examples[i] for i in next(batches)]
        if pretraining:
            return lm_loss(model, batch)
        kind = rng.choice(["ref", "both"]) if with_reference() else "src"
        return qe_loss(model, fix, batch, kind, args.within)

    def keep() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.out)
        if args.export:
            export(model, args.export)

    def print_stats() -> None:
        keep()
        print(
            "xcomet",
            judge.dev_figures(lambda e: predict(model, e), tokenizer, args.candidates),
            flush=True,
        )

    every = {} if pretraining else dict.fromkeys(range(500, args.steps + 1, 500), print_stats)
    parameters = [*model.parameters(), *fix.parameters()]
    fit(parameters, step_loss, args.steps, args.lr, every, f"xcomet {args.command}")
    keep()


def main() -> None:
    """Run the command line."""
    args = judge.arguments(__doc__.splitlines()[0]).parse_args()
    setup(args.seed)
    train(args)


if __name__ == "__main__":
    run_command(main, stdout="log")
