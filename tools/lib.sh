# What the set-up scripts share. `say` wants $me, install_torch a function `pip`.
say() { printf '%s: %s\n' "$me" "$*" >&2; }
fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
  for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then command -v "$candidate"; return; fi
  done
  say "no Python 3.11 or 3.12 with venv and pip found${PYTHON:+ under PYTHON=$PYTHON}." \
    "Install one (Debian 12: apt-get install python3-venv; Ubuntu 24.04: python3.12-venv; or uv python install 3.11)" \
    "or name it: make ${me} PYTHON=/path/to/python3.11"
  exit 2
}

# install_cpu_torch VERSION: the CPU build where there is one, else whatever there is.
install_cpu_torch() {
  # On macOS and on ARM the plain wheel is the CPU build already.
  if [ "$(uname -sm)" != "Linux x86_64" ]; then pip install "torch==$1"; return; fi
  if pip install "torch==$1+cpu" 2>/dev/null; then return; fi
  if pip install "torch==$1+cpu" --extra-index-url https://download.pytorch.org/whl/cpu; then return; fi
  say "no CPU build of torch $1 within reach of pip; taking the default build (several GB)"
  pip install "torch==$1"
}
