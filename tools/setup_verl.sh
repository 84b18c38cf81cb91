#!/usr/bin/env bash
# Make .venv-verl: verl on a CPU, and what scorekit without its extras depends on, in an environment
# of its own (verl wants a transformers below 5.11). It runs the tests of scorekit/adapters/verl, and
# OpenRLHF's code from its executor to its advantages (tests/kits/trainer/openrlhf_probe.py).
#   PYTHON=...   the interpreter to use
set -euo pipefail
me=env-verl
. tools/lib.sh

# verl has no later ones.
PYTHON=${PYTHON:-python3.11 python3.12}
make_venv .venv-verl
install() { install_into .venv-verl "$@"; }
say "installing torch and verl"
install_cpu_torch "$(sed -n 's/^torch==//p' tools/verl-requirements.txt)"
install --no-deps -r tools/verl-requirements.txt
.venv-verl/bin/python -W ignore -c 'import verl.trainer.ppo.v1.agent_loop_tq, openrlhf.utils.agent'
