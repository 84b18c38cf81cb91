"""Check that a word index is searched with the word settings that built it."""

from __future__ import annotations

import pytest

from scorekit.errors import UserError
from services.retriever.backends import words
from services.retriever.backends.bm25 import Bm25Builder, Bm25Searcher
from services.retriever.index.reader import IndexPaths
from testing.retriever_index import make_pages


@pytest.fixture
def built_index(tmp_path):
    pages = make_pages(3, [f"word{k} exports" for k in range(20)])
    paths = IndexPaths(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    return tmp_path, Bm25Builder("bigrams").build(pages, tmp_path, paths)


def test_an_index_of_other_words_is_refused(built_index, monkeypatch):
    folder, settings = built_index
    Bm25Searcher(folder, settings)
    before = words.Words.tokenize
    monkeypatch.setattr(words.Words, "tokenize", lambda self, text: before(self, text)[1:])
    with pytest.raises(UserError, match="made with another version of words: ingest it again"):
        Bm25Searcher(folder, settings)


def test_an_index_of_another_library_is_refused(built_index):
    folder, settings = built_index
    with pytest.raises(UserError, match="another version of bm25s"):
        Bm25Searcher(folder, settings | {"bm25s": "0.0.1"})
