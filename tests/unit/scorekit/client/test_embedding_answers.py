"""Check which vectors of an answer are read."""

from __future__ import annotations

import pytest

from scorekit.client.embeddings import vectors_in_order


def test_vectors_come_in_the_order_of_their_index():
    rows = [{"index": 1, "embedding": [3, 4.5]}, {"index": 0, "embedding": "AACAPwAAAEA="}]
    assert vectors_in_order(rows, 2) == [[1.0, 2.0], [3.0, 4.5]]


@pytest.mark.parametrize("embedding", [[], [10**400], "not base64"])
def test_a_vector_that_cannot_be_read_is_a_value_error(embedding):
    with pytest.raises(ValueError):
        vectors_in_order([{"index": 0, "embedding": embedding}], 1)
