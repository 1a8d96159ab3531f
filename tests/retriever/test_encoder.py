"""The hashed encoder: the same everywhere, of length one, lexical."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from retriever.encoder import build_encoder
from retriever.encoder.config import HashedEncoderSettings

ENCODER = build_encoder(HashedEncoderSettings())
GOLDEN = [0.0, -0.57735, -0.288675, -0.288675, 0.0, 0.0, -0.707107, 0.0]


def test_vectors_have_length_one_and_blank_text_has_the_zero_vector() -> None:
    vectors = ENCODER.encode_passages(["Marie Curie", "東京", "", " ?! "])
    assert vectors.shape == (4, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 0, 0], atol=1e-6)


def test_another_process_with_another_hash_seed_gives_the_same_bits() -> None:
    code = (
        "import sys; from retriever.encoder import build_encoder; "
        "from retriever.encoder.config import HashedEncoderSettings as S;"
        "sys.stdout.buffer.write(build_encoder(S()).encode_passages(['Marie Curie discovered radium']).tobytes())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60, env={"PYTHONHASHSEED": "77"}
    )
    assert other.stdout == ENCODER.encode_passages(["Marie Curie discovered radium"]).tobytes()


def test_vectors_are_those_of_the_format_that_built_indexes_hold() -> None:
    # a change here means that indexes built before are wrong: raise retriever.corpus.manifest.FORMAT with it
    vector = build_encoder(HashedEncoderSettings(dim=8, ngram=3)).encode_queries(["radium"])[0]
    np.testing.assert_allclose(vector, GOLDEN, atol=1e-6)


def test_a_text_does_not_depend_on_its_batch() -> None:
    texts = [f"text number {i} of many" for i in range(50)]
    together = ENCODER.encode_passages(texts)
    assert all((ENCODER.encode_passages([text])[0] == row).all() for text, row in zip(texts, together, strict=True))


def test_inflected_and_misspelt_words_are_nearer_than_other_words() -> None:
    query, inflected, misspelt, other = ENCODER.encode_queries(["discover", "discovered", "discver", "elephant"])
    assert query @ inflected > 0.3
    assert query @ misspelt > query @ other + 0.1
