"""Check that a word index is searched with the word settings that built it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from scorekit.errors import UserError
from services.retriever.backends import bm25
from services.retriever.backends.bm25 import Bm25Builder, Bm25Searcher
from services.retriever.index.reader import IndexPaths
from testing.retriever_index import make_pages


@pytest.fixture
def built_index(tmp_path):
    pages = make_pages(3, [f"word{k} exports" for k in range(20)])
    paths = IndexPaths(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    return tmp_path, Bm25Builder("bigrams").build(pages, tmp_path, paths)


@pytest.mark.parametrize("method", ["of_page", "of_query", "of_divided"])
def test_an_index_of_other_words_is_refused(built_index, monkeypatch, method):
    folder, settings = built_index
    Bm25Searcher(folder, settings)
    before = getattr(bm25.Words, method)
    monkeypatch.setattr(bm25.Words, method, lambda self, *text: before(self, *text)[1:])
    with pytest.raises(UserError, match="made with another version of words: ingest it again"):
        Bm25Searcher(folder, settings)


def test_an_index_of_another_library_is_refused(built_index):
    folder, settings = built_index
    with pytest.raises(UserError, match="another version of bm25s"):
        Bm25Searcher(folder, settings | {"bm25s": "0.0.1"})


@pytest.mark.parametrize(
    ("query", "pages"),
    [("水", [0, 1]), ("价格", [1]), ("水价", []), ("물", [2]), ("값", [3]), ("선물", [4])],
)
def test_single_characters_are_found_and_longer_queries_still_need_pairs(tmp_path, query, pages):
    texts = ["海水淡化", "水的价格", "찬 물을 마신다", "값", "선물", "word"]
    records = [
        page.model_copy(update={"boxes": [page.boxes[0].model_copy(update={"text": text})]})
        for page, text in zip(make_pages(6, [f"w{k}" for k in range(20)]), texts, strict=True)
    ]
    settings = Bm25Builder("bigrams").build(records, tmp_path, IndexPaths(*[tmp_path] * 3))
    searcher = Bm25Searcher(tmp_path, settings)
    (scores,) = searcher.scores([searcher.read(query)], [10])
    assert np.flatnonzero(scores > -np.inf).tolist() == pages


def test_jax_is_kept_off_a_gpu(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("import os; print(os.environ['JAX_PLATFORMS'])")
    (tmp_path / "jax/lax.py").write_text("raise ImportError")
    code = (
        "from services.retriever.backends.bm25 import Bm25Builder\n"
        "Bm25Builder('bigrams').build([], None, None)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "cpu\n"
    assert "no page has any text" in done.stderr
