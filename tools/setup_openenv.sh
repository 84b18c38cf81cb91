#!/usr/bin/env bash
# Make .venv-openenv: openenv, and what a search environment of scorekit needs, in an environment of its
# own (openenv wants a pillow below 13). It runs the server of trainer/search/environment/openenv_server.py.
#   PYTHON=...   the interpreter to use
set -euo pipefail
me=env-openenv
. tools/lib.sh

make_venv .venv-openenv
say "installing openenv"
install_into .venv-openenv --no-deps -r tools/openenv-requirements.txt
.venv-openenv/bin/python -W ignore -c 'import openenv.core.env_server'
