"""Check that the service's vectors equal those of SentenceTransformer.encode."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from scorekit.client.embeddings import Embeddings
from scorekit.errors import UserError
from services.embedder.endpoint import EmbedOptions
from services.embedder.model import EmbedderBackend
from testing.checkpoints.embedder import make_folder, make_plain_folder
from testing.servers import running_service

#: float32: sums of a few hundred products, in another order for each shape of a batch.
CLOSE = 1e-5
MAX_LENGTH = 64
DEMO = Path(__file__).parents[4] / "demo/models/encoder"
TEXTS = [
    "Hello.",
    "a",
    " ",
    "\n\n",
    " leads and trails ",
    "안녕하세요. 오늘은 어디로 갈까요?",
    '그는 고개를 들었다.\n"민수야, 괜찮아?"',
    "😀 emoji and <s> </s> <mask> as words",
    "e\u0301 é ﬁ ２ full width, NFKC",
    *(f"number {k} " + "word " * k for k in range(0, 90, 9)),
    "가나다라 " * 200,
    "x" * 3000,
]
FORMS = {
    "cls": {"pooling": "cls"},
    "mean": {"pooling": "mean"},
    "dense": {"pooling": "mean", "dense": 16},
    "two ways, not normalised": {"pooling": ("cls", "max"), "normalize": False},
    "last token": {"pooling": "lasttoken", "normalize": False},
    "prompt": {"prompts": {"query": "query: ", "plain": ""}, "default_prompt": "query"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("embedders")
    return {
        form: make_folder(root / f"{k}", seed=k, max_length=MAX_LENGTH, **options)
        for k, (form, options) in enumerate(FORMS.items())
    }


def encoded_by_upstream(folder, texts, **options):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return model.encode(texts, normalize_embeddings=True, **options)


def embedded(backend, texts, options=None):
    encoded = backend.encode(
        texts, options or backend.endpoint.default_options(backend.description)
    )
    return np.stack([outcome["embedding"] for outcome in backend.forward(encoded)])


def loaded(folder, **options):
    backend = EmbedderBackend(str(folder), device="cpu", threads=1, **options)
    backend.description = backend.load()
    return backend


@pytest.mark.parametrize("matmul", ["torch", "onednn"])
@pytest.mark.parametrize("form", FORMS)
def test_vectors_are_upstreams_whatever_the_batch(folders, form, matmul):
    backend = loaded(folders[form], matmul=matmul)
    assert backend.description.matmul == matmul
    want = encoded_by_upstream(folders[form], TEXTS)
    assert np.abs(want[0] - want[5]).max() > 0.01  # texts differ by much more than the tolerance
    shuffled = list(range(len(TEXTS)))
    random.Random(3).shuffle(shuffled)
    batched = embedded(backend, [TEXTS[k] for k in shuffled])
    alone = np.concatenate([embedded(backend, [text]) for text in TEXTS])
    for k, index in enumerate(shuffled):
        assert np.abs(batched[k] - want[index]).max() < CLOSE
    assert np.abs(alone - want).max() < CLOSE
    assert backend.description.dimension == want.shape[1]


@pytest.mark.parametrize("matmul", ["torch", "onednn"])
def test_the_demos_encoder_is_read_as_upstream_reads_it(matmul):
    backend = loaded(DEMO, matmul=matmul)
    short_texts = [text for text in TEXTS if len(text) < 500]
    assert (
        np.abs(embedded(backend, short_texts) - encoded_by_upstream(DEMO, short_texts)).max()
        < CLOSE
    )


def test_a_plain_folder_is_pooled_as_it_is_said(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = make_plain_folder(tmp_path / "plain")
    with pytest.raises(UserError, match="--pooling"):
        EmbedderBackend(str(folder)).check()
    for pooling in ("cls", "mean"):
        reader = Transformer(str(folder))
        model = SentenceTransformer(modules=[reader, Pooling(32, pooling)], device="cpu")
        want = model.encode(TEXTS, normalize_embeddings=True)
        backend = loaded(folder, pooling=pooling)
        assert np.abs(embedded(backend, TEXTS) - want).max() < CLOSE
        assert backend.description.pooling == pooling


def test_a_prompt_stands_before_each_text(folders):
    backend = loaded(folders["prompt"])
    want = encoded_by_upstream(folders["prompt"], ["a b"], prompt_name="plain")
    assert np.abs(embedded(backend, ["a b"], EmbedOptions(True, "")) - want).max() < CLOSE
    assert np.abs(embedded(backend, ["a b"]) - want).max() > 10 * CLOSE  # the default prompt


def test_a_smaller_limit_cuts_as_upstream_would(folders):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folders["mean"]), device="cpu", local_files_only=True)
    model.max_seq_length = 16
    backend = loaded(folders["mean"], max_input_length=16)
    want = model.encode(TEXTS, normalize_embeddings=True)
    assert np.abs(embedded(backend, TEXTS) - want).max() < CLOSE


def test_bfloat16_is_near(folders):
    want = encoded_by_upstream(folders["cls"], TEXTS)
    got = embedded(loaded(folders["cls"], dtype="bfloat16"), TEXTS)
    assert got.dtype == np.float32
    assert np.allclose(np.linalg.norm(got, axis=1), 1.0, atol=1e-6)
    assert (want * got).sum(axis=1).min() > 0.99


def test_the_client_gets_upstreams_vectors_over_http(folders):
    backend = EmbedderBackend(str(folders["dense"]), device="cpu", threads=1)
    short_texts = [text for text in TEXTS if len(text) < 100]
    with running_service(backend) as url, Embeddings(url) as client:
        assert client.info().dimension == 16 and client.info().pooling == "mean"
        got = client.embed([*short_texts, *reversed(short_texts)])
    want = encoded_by_upstream(folders["dense"], short_texts)
    assert np.abs(np.array(got) - np.concatenate([want, want[::-1]])).max() < CLOSE
