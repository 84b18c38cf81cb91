"""Test `python -m services.embedder` as a user starts it, with OpenAI's own client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from scorekit.client.embeddings import Embeddings
from testing.checkpoints.embedder import make_folder, make_plain_folder
from testing.servers import PATIENCE_S, free_port, wait_ready
from tests.kits import forked

ROOT = Path(__file__).parents[4]


def start(*flags, torch=False, **environment):
    return forked.Popen(
        [sys.executable, "-m", "services.embedder", "--cache", "memory", *map(str, flags)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        torch=torch,
    )


def test_openais_client_gets_upstreams_vectors_from_the_process(tmp_path):
    import openai
    from sentence_transformers import SentenceTransformer

    folder = make_folder(tmp_path / "bge-ko")
    texts = ["안녕하세요.", "Hello.", "길고 " * 20]
    want = SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True)
    port = free_port()
    flags = ("--model", folder, "--port", port, "--threads", 1)
    process = start(*flags, torch=True, EMBEDDER_DEVICE="cpu")
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            for form in ({}, {"encoding_format": "float"}):  # without a format it requests base64
                answer = client.embeddings.create(model="bge-ko", input=texts, **form)
                got = np.array([row.embedding for row in answer.data])
                assert np.abs(got - want).max() < 1e-5
            for bad, message in (
                ("", "at least 1 character"),
                ("word " * 99, "overlong"),
                ([1, 2], "token ids are not taken"),
                (["a"] * 2049, "more than 2048 texts"),
                ("a\0b", "NUL character"),
            ):
                with pytest.raises(openai.APIStatusError, match=message) as error_info:
                    client.embeddings.create(model="bge-ko", input=bad)
                assert error_info.value.status_code in (413, 422)
        with Embeddings(url, batch_size=2048) as client:
            many = client.embed([f"text {k}" for k in range(2048)])
            assert len(many) == 2048 and all(len(vector) == 32 for vector in many)
        assert httpx.get(f"{url}/v1/info").json()["max_samples"] == 2048
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0 and "안녕" not in stderr
    finally:
        process.kill()


def test_mistakes_are_one_line_and_exit_code_2(tmp_path):
    plain = make_plain_folder(tmp_path / "plain")
    for flags, words in [
        (["--model", tmp_path / "none"], "no such folder"),
        (["--model", plain], "--pooling"),
        (["--model", plain, "--dtype", "float16"], "--dtype"),
        (["--model", plain, "--max-samples", "2049"], "--max-samples"),
        (["--model", plain, "--pooling", "sum"], "--pooling"),
    ]:
        process = start(*flags)
        _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2 and stderr.startswith("error: "), stderr
        assert stderr.count("\n") == 1 and words in stderr
