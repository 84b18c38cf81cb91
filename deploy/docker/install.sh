#!/usr/bin/env bash
# In the build stage of an image: install.sh torch cpu|cuda|none, install.sh extras EXTRA..., install.sh vllm
set -euo pipefail
me=install
. ./lib.sh
install() { /venv/bin/python -m pip --disable-pip-version-check --no-cache-dir -q install "$@"; }
# install_hashed EXTRA...: the files of hashes.txt alone. pip refuses one with another hash.
install_hashed() {
  /venv/bin/python requirements.py "$@" > requirements.txt
  install --no-deps --require-hashes -r requirements.txt
}
what=$1; shift
case $what in
  torch)
    version=$(sed -n 's/^torch==//p' constraints.txt)
    case $1 in
      # The CPU build itself comes from an index of its own, without a hash.
      cpu) install_hashed torch; install_cpu_torch "$version" ;;
      cuda) install_hashed torch-cuda ;;
      none) ;;
      *) say "TORCH=$1: give cpu, cuda or none"; exit 2 ;;
    esac ;;
  extras)
    install_hashed "$@"
    /venv/bin/python -m pip check
    # Nothing is installed later, but by Ray, where a job asks for packages.
    case " $* " in *" ray "*) ;; *) /venv/bin/python -m pip uninstall -qy pip ;; esac ;;
  vllm)
    install_cpu_vllm /venv/bin/python vllm-requirements.txt
    /venv/bin/python -m pip uninstall -qy pip ;;
  *) say "install.sh torch|extras|vllm"; exit 2 ;;
esac
