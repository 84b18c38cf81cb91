"""Candidate translations for the metrics to learn from: policy samples, labelled.

    python -m demo.train.candidates --policy runs/demo_train/policy_a/noisy \
        --data rl_prompts --temperatures 0.8 0.8 1.0 --out runs/demo_train/candidates/a_noisy.jsonl

Each policy samples sources that it was not trained on (policy_a the RL prompts, policy_b, which
was trained on the RL prompts, the sources of policy_a), so that the errors are those of new
text. The labels come later (`demo.train.examples`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from demo.train.common import setup
from demo.train.data import DATA, read_jsonl, write_jsonl
from demo.train.policy import load, sample
from scorekit.command import run_command


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--data", default="rl_prompts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    setup(args.seed)
    rows = read_jsonl(DATA / f"{args.data}.jsonl")
    model, tokenizer = load(args.policy)
    out, start = [], time.time()
    for temperature in args.temperatures:
        outputs = sample(model, tokenizer, [row["src_text"] for row in rows], temperature)
        for row, text in zip(rows, outputs, strict=True):
            out.append({"src": row["src_text"], "ref": row["ref_text"], "mt": text})
        print(f"{args.policy} T={temperature}: {len(out)} in {time.time() - start:.0f}s")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out, out)


if __name__ == "__main__":
    run_command(main, stdout="log")
