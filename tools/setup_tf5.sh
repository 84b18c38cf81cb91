#!/usr/bin/env bash
# Make .venv-tf5: the trainer's dependencies with transformers 5, which unbabel-comet refuses, and
# so in an environment of its own beside .venv.
#   PYTHON=...   the interpreter to use
set -euo pipefail
me=env-tf5
. tools/lib.sh

if [ ! -x .venv-tf5/bin/python ] || ! fits .venv-tf5/bin/python; then
  python=$(find_python)
  say "making .venv-tf5 with $("$python" --version) ($python)"
  rm -rf .venv-tf5
  "$python" -m venv .venv-tf5
fi
pip() { .venv-tf5/bin/python -m pip --disable-pip-version-check -q "$@"; }
say "installing torch and transformers 5"
install_cpu_torch "$(sed -n 's/^torch==//p' tools/tf5-requirements.txt)"
pip install --no-deps -r tools/tf5-requirements.txt
.venv-tf5/bin/python -c 'import accelerate, bitsandbytes, datasets, kiwipiepy, peft, reportlab, torch, transformers, trl'
