#!/usr/bin/env bash
# Make .venv: find a fitting Python, take the CPU build of torch where there is no NVIDIA driver,
# install the rest under constraints.txt, import every dependency.
#   PYTHON=...        the interpreter to use
#   TORCH=cpu|cuda    which build of torch; default: by the driver
#   setup.sh venv-only  stop after the empty environment (for `make lock`)
set -euo pipefail
me=setup
. tools/lib.sh

has_nvidia() { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; }

install_torch() {
  local version build=${TORCH:-}
  version=$(sed -n 's/^torch==//p' constraints.txt)
  if [ -z "$build" ]; then if has_nvidia; then build=cuda; else build=cpu; fi; fi
  case $build in
    cuda) pip install -c constraints.txt "torch==$version" ;;
    cpu) install_cpu_torch "$version" ;;
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
