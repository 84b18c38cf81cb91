#!/usr/bin/env bash
# Make .venv: find a fitting Python, take the CPU build of torch where there is no NVIDIA driver,
# install the rest under constraints.txt, import every dependency.
#   PYTHON=...        the interpreter to use
#   TORCH=cpu|cuda    which build of torch; default: by the driver
set -euo pipefail
me=setup
. tools/lib.sh

has_nvidia() { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; }

install_torch() {
  local version build=${TORCH:-}
  version=$(sed -n 's/^torch==//p' constraints.txt)
  if [ -z "$build" ]; then if has_nvidia; then build=cuda; else build=cpu; fi; fi
  case $build in
    cuda) install -c constraints.txt "torch==$version" ;;
    cpu) install_cpu_torch "$version" ;;
    *) say "TORCH=$build: give cpu or cuda"; exit 2 ;;
  esac
}

make_venv .venv
install() { install_into .venv "$@"; }
say "installing torch"
install_torch
say "installing the rest (half a minute with a fast line)"
install -c constraints.txt -e ".[all,dev]"
.venv/bin/python tools/check_imports.py
