"""The contract of encoders, for every member of the settings' union, with tiny models made here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from retriever.encoder import build_encoder, encoder_identity
from retriever.encoder.base import Encoder
from retriever.encoder.config import (
    EncoderSettings,
    HashedEncoderSettings,
    OpenAIEncoderSettings,
    TransformerEncoderSettings,
)
from tests.support.encoders import sentence_transformers_layout, tiny_model

MEAN = {"pooling_mode_mean_tokens": True}
TEXTS = [
    '"Marie Curie"\nMarie Curie discovered radium in Paris.',
    "Paris",
    "a",
    "Warsaw is the capital of Poland; Marie Curie was born there, and there is more to say than fits into the window.",
    "東京 は日本の首都 である。 Émile ß 🙂",
    "Paris is the capital of France.",
    "the capital of France is Paris.",
]
NOISE = {"hashed": 0.0, "e5": 1e-6, "contriever": 1e-5, "dpr": 1e-5, "layout": 1e-6, "openai": 0.0}
"""Most that a coordinate may differ between batches: rows have length 1, or about 6 for contriever and DPR here."""

Make = Callable[[str], EncoderSettings]


class _Embeddings(BaseHTTPRequestHandler):
    """An honest `/v1/embeddings` over the hashed encoder."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    encoder = build_encoder(HashedEncoderSettings(dim=64))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rows = self.encoder.encode_queries(asked["input"]).tolist()
        # last one first: `index` gives the order
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)][::-1]
        body = json.dumps({"object": "list", "data": data, "model": asked["model"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EncoderSettings]]:
    """One of every kind. The names of the models contain their families."""
    root = tmp_path_factory.mktemp("models")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Embeddings)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    bert = tiny_model(root / "e5-tiny")
    (root / "contriever-tiny").symlink_to(bert)
    try:
        yield {
            "hashed": HashedEncoderSettings(),
            "e5": _model(bert),
            "contriever": _model(root / "contriever-tiny"),
            "dpr": _model(
                tiny_model(root / "dpr-ctx-tiny", "DPRContextEncoder", seed=1),
                query_model=tiny_model(root / "dpr-question-tiny", "DPRQuestionEncoder", seed=2),
            ),
            "layout": _model(
                sentence_transformers_layout(
                    tiny_model(root / "anything"), MEAN, dense=16, prompts={"query": "ask: ", "document": "tell: "}
                )
            ),
            "openai": OpenAIEncoderSettings(
                url=f"http://127.0.0.1:{server.server_port}/v1", dim=64, retries=0, query_prefix="query: "
            ),
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _model(folder: Path, **fields: Any) -> TransformerEncoderSettings:
    return TransformerEncoderSettings(model=folder, device="cpu", **fields)


@pytest.fixture(scope="module")
def built(settings: dict[str, EncoderSettings]) -> dict[str, Encoder]:
    return {kind: build_encoder(chosen) for kind, chosen in settings.items()}


@pytest.fixture(params=NOISE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoder(kind: str, built: dict[str, Encoder]) -> Encoder:
    return built[kind]


def test_every_member_of_the_union_is_here(settings: dict[str, EncoderSettings]) -> None:
    assert {type(chosen) for chosen in settings.values()} == set(get_args(get_args(EncoderSettings)[0]))


def test_vectors_have_the_promised_shape_type_and_length(encoder: Encoder) -> None:
    for vectors in (encoder.encode_passages(TEXTS), encoder.encode_queries(TEXTS)):
        assert vectors.shape == (len(TEXTS), encoder.dim)
        assert vectors.dtype == np.float32
        assert np.isfinite(vectors).all()
        lengths = np.linalg.norm(vectors, axis=1)
        assert np.allclose(lengths, 1, atol=1e-6) == encoder.normalized
        assert (lengths > 0.1).all()


def test_no_texts_give_no_rows(encoder: Encoder) -> None:
    assert encoder.encode_passages([]).shape == encoder.encode_queries([]).shape == (0, encoder.dim)


def test_an_empty_text_has_a_finite_vector_and_affects_no_other(encoder: Encoder, kind: str) -> None:
    vectors = encoder.encode_passages([TEXTS[0], "", " ", TEXTS[1]])
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[[0, 3]], encoder.encode_passages(TEXTS[:2]), rtol=0, atol=NOISE[kind])


def test_other_texts_have_other_vectors(encoder: Encoder) -> None:
    for vectors in (encoder.encode_passages(TEXTS[:6]), encoder.encode_queries(TEXTS[:6])):
        apart = np.abs(vectors[:, None] - vectors[None]).max(axis=2)
        assert (apart + np.eye(6) > 1e-3).all()


def test_a_vector_does_not_depend_on_its_batch_or_place(encoder: Encoder, kind: str) -> None:
    rng = np.random.default_rng(0)
    words = ["radium", "paris", "curie", "capital", "warsaw", "of", "in", "the"]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 9, 40)] + TEXTS
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    for order in (np.arange(len(texts)), rng.permutation(len(texts)), rng.permutation(len(texts))[:11]):
        together = encoder.encode_queries([texts[i] for i in order])
        np.testing.assert_allclose(together, alone[order], rtol=0, atol=NOISE[kind])


def test_equal_settings_build_equal_encoders(settings: dict[str, EncoderSettings], encoder: Encoder, kind: str) -> None:
    again = build_encoder(settings[kind])
    assert again.encode_queries(TEXTS).tobytes() == encoder.encode_queries(TEXTS).tobytes()
    assert again.encode_passages(TEXTS).tobytes() == encoder.encode_passages(TEXTS).tobytes()


def test_queries_and_passages_differ_where_the_family_distinguishes_them(encoder: Encoder, kind: str) -> None:
    apart = float(np.abs(encoder.encode_queries(TEXTS) - encoder.encode_passages(TEXTS)).max())
    # e5, the layout's prompts and the client's prefix differ by a prefix, DPR by the model
    assert apart > 1e-2 if kind in ("e5", "dpr", "layout", "openai") else apart <= NOISE[kind]


def test_identity_is_plain_json_and_names_no_location(settings: dict[str, EncoderSettings], kind: str) -> None:
    identity = encoder_identity(settings[kind])
    text = json.dumps(identity)
    assert json.loads(text) == identity
    assert identity["type"] == settings[kind].type
    assert "/" not in text


def test_every_kind_has_its_own_identity(settings: dict[str, EncoderSettings]) -> None:
    assert len({json.dumps(encoder_identity(chosen), sort_keys=True) for chosen in settings.values()}) == len(settings)
