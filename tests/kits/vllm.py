"""A real vLLM on the CPU (`make env-vllm`) with the demo's policy as its model.

The policy translates English user-interface strings and ends its texts, so greedy and sampled
output can pass for translations. If JSON is requested, it writes random text that fits the grammar,
until it is cut.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from scorekit.processes import end_with_parent
from testing.servers import free_port

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
KEY, NAME, CONTEXT = "key-of-the-test", "tiny-teacher", 1024
#: Seconds to the first answer. It took 15 to 140 on 2 cores, by what else ran.
READY_S = 600.0


def make_model(folder: Path, *, template: bool = True) -> Path:
    """Write the demo's policy with more positions for long prompts; without its chat template
    on demand.
    """
    shutil.copytree(ROOT / "demo/models/policy", folder)
    config = folder / "config.json"
    config_values = json.loads(config.read_text())
    config.write_text(json.dumps({**config_values, "max_position_embeddings": CONTEXT}))
    # transformers 5 makes a BPE tokenizer of every Llama one, and this is a unigram model.
    config = folder / "tokenizer_config.json"
    config_values = json.loads(config.read_text())
    config.write_text(json.dumps({**config_values, "tokenizer_class": "PreTrainedTokenizerFast"}))
    if not template:
        (folder / "chat_template.jinja").unlink()
    return folder


def untie(folder: Path) -> Path:
    """Give the model a head of its own: vLLM on a CPU packs the head when it starts, and reloading
    weights would leave one that is tied to the embeddings as it was."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def running_vllm(
    model: Path, log: Path, *flags: str, port: int | None = None, **variables: str
) -> Iterator[str]:
    """Serve until the block ends, and yield the URL as an SDK takes it.

    flags, variables: additions to the command line and to the environment.
    port: None: a free one.
    """
    port = port or free_port()
    command = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        NAME,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--api-key",
        KEY,
        "--max-model-len",
        str(CONTEXT),
        "--dtype",
        "float32",
        "--generation-config",
        "vllm",
        "--enforce-eager",
        # A seeded prompt that is read in two parts ends vLLM 0.32 on a CPU: "CPU Generator does
        # not use offset".
        "--no-enable-chunked-prefill",
        *flags,
    ]
    environment = os.environ | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):  # its engine is a process of its own
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_vllm(url: str) -> None:
    """End the server of `running_vllm` at this URL, and its engine, with SIGKILL."""
    port = str(httpx.URL(url).port)
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        options = itertools.pairwise(command)
        if str(PYTHON) in command and ("--port", port) in options:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"vLLM did not get ready:\n{log.read_text(errors='replace')[-4000:]}")
