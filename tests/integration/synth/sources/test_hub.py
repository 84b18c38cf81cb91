"""Check that the corpus is read from a hub as the documentation says, with a small local hub."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from synth.config import DataConfig
from synth.sources.madlad import DATASET, hub_pattern
from tests.kits import forked
from tests.kits.hub_server import Hub, Repo

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/how-to/synthesis.md").read_text(encoding="utf-8")
TEXTS = [
    "\ubb38\uc11c 1\\\\n\ub458\uc9f8 \uc904",
    "\ubb38\uc11c 2",
    "\ubb38\uc11c 3",
    "\ubb38\uc11c 4",
]


def shard(*texts: str) -> bytes:
    return gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


@pytest.fixture(scope="module")
def hub() -> Any:
    """Yield a hub with files as MADLAD-400 has them, those of other languages and halves too."""
    hub = Hub()
    hub.repos[DATASET] = Repo(
        private=False,
        files={
            "MADLAD-400.py": b"import datasets\n",
            "README.md": b"---\nlicense: odc-by\n---\n",
            "data/ko/ko_clean_0000.jsonl.gz": shard(*TEXTS[:2]),
            "data/ko/ko_clean_0001.jsonl.gz": shard(*TEXTS[2:]),
            "data/ko/ko_noisy_0000.jsonl.gz": shard("noise"),
            "data/kos/kos_clean_0000.jsonl.gz": shard("Kosraean"),
        },
    )
    with hub.running():
        yield hub


def run(hub: Hub, code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose hub is the local one, with a cache of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": f"{home}", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return forked.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def example() -> str:
    """Return the example of the page."""
    (block,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        if "hf://" in block
    ]
    return block


def test_the_example_of_the_page_reads_the_documents(hub: Hub, tmp_path: Path) -> None:
    result = run(hub, example(), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == TEXTS[:3]


def test_the_example_reads_the_files_that_a_run_reads(hub: Hub, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"^[A-Z]+ = .*", example(), re.MULTILINE)), names)
    assert names["FILES"] == hub_pattern(DataConfig(src_lang="kor", tgt_lang="eng"))
    code = (
        "import sys\n"
        "from synth.config import DataConfig\n"
        "from synth.sources.madlad import read_documents, source_files\n"
        "files = source_files(DataConfig(src_lang=sys.argv[1], tgt_lang='eng'))\n"
        "for file in files:\n"
        "    for document in read_documents(file, print):\n"
        "        print(file.name, document.line, document.text)\n"
    )
    result = run(hub, code.replace("sys.argv[1]", "'kor'"), tmp_path)
    assert result.returncode == 0, result.stderr
    positions = [("0000", 1), ("0000", 2), ("0001", 1), ("0001", 2)]
    assert result.stdout.splitlines() == [
        f"ko_clean_{number}.jsonl.gz {line} {text}"
        for (number, line), text in zip(positions, TEXTS, strict=True)
    ]


def test_the_script_is_not_run(hub: Hub, tmp_path: Path) -> None:
    """Check what the page says of the form that older versions took."""
    code = f"from datasets import load_dataset; load_dataset({DATASET!r}, 'ko', split='clean')"
    result = run(hub, code, tmp_path)
    assert "Dataset scripts are no longer supported" in PAGE
    assert "Dataset scripts are no longer supported, but found MADLAD-400.py" in result.stderr
