#!/usr/bin/env bash
# Make .venv-verifiers: verifiers, and what our tasks for it depend on, in an environment of its own
# (its mcp excludes the one that OpenEnv needs). It runs the tests of the marker `verifiers`.
#   PYTHON=...   the interpreter to use
set -euo pipefail
me=env-verifiers
. tools/lib.sh

make_venv .venv-verifiers
install() { install_into .venv-verifiers "$@"; }
say "installing verifiers"
install --no-deps -r tools/verifiers-requirements.txt
# The modules that verifiers finds our tasks by; scorekit itself is imported from this checkout.
install --no-deps -e examples/verifiers
.venv-verifiers/bin/python -W ignore -c 'import verifiers.v1'
