#!/usr/bin/env bash
# Make .venv-docs: what builds the documentation site, in an environment of its own.
#   PYTHON=...   the interpreter to use
set -euo pipefail
me=env-docs
. tools/lib.sh

make_venv .venv-docs
say "installing zensical and mkdocstrings"
install_into .venv-docs --no-deps -r tools/docs-requirements.txt
.venv-docs/bin/python -W ignore -c 'import mkdocstrings_handlers.python, zensical'
