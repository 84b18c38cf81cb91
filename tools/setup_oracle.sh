#!/usr/bin/env bash
# Make .venv-oracle: unbabel-comet and what its pins allow, and so in an environment of its own
# beside .venv. It runs `services.xcomet --implementation unbabel-comet`.
#   PYTHON=...   the interpreter to use
#   TORCH=cuda   a build of torch for GPUs (bench.gpu_scoring); default: for CPUs
set -euo pipefail
me=env-oracle
. tools/lib.sh

# numpy 1 has no wheels for later ones.
PYTHON=${PYTHON:-python3.11 python3.12}
make_venv .venv-oracle
install() { install_into .venv-oracle "$@"; }
say "installing torch and unbabel-comet"
if [ "${TORCH:-cpu}" = cuda ]; then
  install "$(grep '^torch==' tools/oracle-requirements.txt)"
else
  install_cpu_torch "$(sed -n 's/^torch==//p' tools/oracle-requirements.txt)"
fi
install --no-deps -r tools/oracle-requirements.txt
.venv-oracle/bin/python -W ignore -c 'import comet, fastapi, redis, structlog, uvicorn'
