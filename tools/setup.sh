#!/usr/bin/env bash
# Make .venv: find a fitting Python, take the CPU build of torch where there is no NVIDIA driver,
# install the rest under constraints.txt, import every dependency.
#   PYTHON=...        the interpreter to use
#   TORCH=cpu|cuda    which build of torch; default: by the driver
#   setup.sh venv-only  stop after the empty environment (for `make lock`)
set -euo pipefail
say() { printf 'setup: %s\n' "$*" >&2; }
fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
  for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then command -v "$candidate"; return; fi
  done
  say "no Python 3.11 or 3.12 with venv and pip found${PYTHON:+ under PYTHON=$PYTHON}." \
    "Install one (Debian 12: apt-get install python3-venv; Ubuntu 24.04: python3.12-venv; or uv python install 3.11)" \
    "or name it: make setup PYTHON=/path/to/python3.11"
  exit 2
}

has_nvidia() { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; }

install_torch() {
  local version build=${TORCH:-}
  version=$(sed -n 's/^torch==//p' constraints.txt)
  if [ -z "$build" ]; then if has_nvidia; then build=cuda; else build=cpu; fi; fi
  case $build in
    cuda) pip install -c constraints.txt "torch==$version" ;;
    cpu)
      # On macOS and on ARM the plain wheel is the CPU build already.
      if [ "$(uname -sm)" != "Linux x86_64" ]; then pip install "torch==$version"; return; fi
      if pip install "torch==$version+cpu" 2>/dev/null; then return; fi
      if pip install "torch==$version+cpu" --extra-index-url https://download.pytorch.org/whl/cpu; then return; fi
      say "no CPU build of torch $version within reach of pip; taking the default build (several GB)"
      pip install "torch==$version" ;;
    *) say "TORCH=$build: give cpu or cuda"; exit 2 ;;
  esac
}

if [ ! -x .venv/bin/python ] || ! fits .venv/bin/python; then
  python=$(find_python)
  say "making .venv with $("$python" --version) ($python)"
  rm -rf .venv
  "$python" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }
[ "${1:-}" = venv-only ] && exit 0
say "installing torch"
install_torch
say "installing the rest (about a minute with a fast line)"
pip install -c constraints.txt -e ".[all,dev]"
.venv/bin/python tools/check_imports.py
