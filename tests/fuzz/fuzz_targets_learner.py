"""Decoders of the learner: stream entries, messages between ranks, journal, checkpoint, questions."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fuzz_targets import Decoder, scratch
from fuzz_targets_protocol import entries, resealed

from deploy.config import load_config
from deploy.doctor import data as doctor_data
from deploy.doctor import engine as doctor_engine
from foray.data.catalogue import recorded
from learner.checkpoint.checkpoint import MANIFEST, Checkpoints
from learner.checkpoint.journal import (
    FRAME,
    BatchConditions,
    GroupJournal,
    data_files,
    index_of,
    locations,
    read_journal,
)
from learner.data.questions import load_questions
from learner.delivery.entry import BadEntry, read_entry
from learner.trainer.distributed import channel as share_codec
from protocol.codec import encode, unpack
from protocol.errors import ProtocolError, UserError
from protocol.header import seal
from protocol.messages import Task
from protocol.versions import PolicyVersion
from tests.support.format_samples import QUESTIONS
from tests.support.messages import make_group

LLAMA = {
    **{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 4096},
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
}
QWEN = {"model_type": "qwen3_next", "sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"]}
MODEL_CONFIGS = (json.dumps(LLAMA).encode(), json.dumps(QWEN | {"text_config": LLAMA}).encode())


@dataclass(frozen=True)
class Piece:
    """Something of every kind that ranks share."""

    ids: npt.NDArray[np.int32]
    weights: tuple[float, ...]
    names: dict[str, int]
    step: int
    last: bool


def _entry(raw: bytes) -> object:
    fields = unpack(raw)  # how Redis would hand them over: a map of bytes
    given = (
        {k.encode(): v for k, v in fields.items() if isinstance(k, str) and isinstance(v, bytes)}
        if isinstance(fields, dict)
        else {}
    )
    return read_entry(b"1-0", given, "test")


def _journal(folder: Path) -> tuple[bytes, Any, bytes, Any]:
    """(data of a journal, its decoder, its index, the index's decoder)."""
    folder = folder / "journal"
    journal = GroupJournal(folder)
    conditions = BatchConditions(3, (PolicyVersion(1, 0),), 1.0, 2)
    journal.append(4, 1, [seal(make_group(seq)) for seq in (1, 2)], conditions)
    journal.close()
    (path,) = data_files(folder)
    data, index = path.read_bytes(), index_of(path).read_bytes()

    def read_data(raw: bytes) -> object:
        path.write_bytes(raw)
        index_of(path).unlink(missing_ok=True)
        return list(read_journal(folder))

    def read_index(raw: bytes) -> object:
        path.write_bytes(data)
        index_of(path).write_bytes(raw)
        found = locations(path)
        assert [location.seq for location in found][:2] == [1, 2] or len(raw) >= 40, "the data alone is the truth"
        return list(read_journal(folder))

    return data, read_data, index, read_index


def reframed(raw: bytes) -> bytes:
    """The same content as one frame with the right length and checksum."""
    content = raw[FRAME.size :]
    return FRAME.pack(len(content), zlib.crc32(content)) + content


def _made_checkpoint(folder: Path) -> tuple[Path, bytes]:
    """A checkpoint in force in `folder`: its directory, and its manifest, which is not written yet."""
    path = folder / "step_4.e1"
    (path / "state").mkdir(parents=True)
    (path / "state" / "a.bin").write_bytes(b"weights")
    (folder / "CURRENT").write_text("step_4.e1\n")
    listed = {"state/a.bin": {"bytes": 7, "sha256": sha256(b"weights").hexdigest()}}
    facts = {"format": 1, "step": 4, "epoch": 1, "lineage": [[1, 0]], "ledger": {"watermark": 4}, "files": listed}
    return path, json.dumps(facts).encode()


def _checkpoint(folder: Path) -> tuple[bytes, Any]:
    path, manifest = _made_checkpoint(folder / "checkpoints")
    checkpoints = Checkpoints(path.parent, keep=2)

    def read(raw: bytes) -> object:
        (path / MANIFEST).write_bytes(raw)
        return checkpoints.load()

    return manifest, read


def _current(folder: Path) -> Any:
    folder = folder / "current"
    path, manifest = _made_checkpoint(folder)
    (path / MANIFEST).write_bytes(manifest)
    checkpoints = Checkpoints(folder, keep=2)

    def read(raw: bytes) -> object:
        (folder / "CURRENT").write_bytes(raw)
        return checkpoints.current_epoch()

    return read


def _questions(folder: Path) -> Any:
    path = folder / "questions.jsonl"

    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        found = load_questions(path)
        # what was taken as a question must be able to travel
        return [encode(Task(seq=1, question=question, group_size=1)) for question in found.questions]

    return read


DOWNLOADS = b'{"files": {"nq/train.jsonl": {"url": "https://x/y", "sha256": "ab"}}}'


def _downloads(folder: Path) -> Any:
    def read(raw: bytes) -> object:
        (folder / "downloads.json").write_bytes(raw)
        return [row["sha256"] + row["url"] for row in recorded(folder).values()]

    return read


def _model_config(folder: Path) -> Any:
    """The config.json of a foreign model, as read by doctor and `foray up`: any text yields findings."""
    model = folder / "model"
    model.mkdir()
    config = load_config(None, [f"run.model={model}", "learner.batch.row_tokens=64"])

    def read(raw: bytes) -> object:
        (model / "config.json").write_bytes(raw)
        return [*doctor_engine.engine(config), *doctor_engine.learner(config), doctor_data.model(config)]

    return read


def decoders() -> tuple[Decoder, ...]:
    folder = scratch()
    data, read_data, index, read_index = _journal(folder)
    manifest, read_manifest = _checkpoint(folder)
    piece = share_codec.encode(Piece(np.arange(6, dtype=np.int32).reshape(2, 3), (0.5, 1.0), {"a": 1}, 3, True))
    asked = (
        b'{"id": "q1", "question": "who ?", "answers": ["a"], "hops": 2, "type": "bridge"}\n'
        b'{"_id": 3, "question": "what ?", "answer": "b"}\n',
        '{"id": "q1", "question": "who\u2028 was ?", "golden_answers": ["a", "é"]}\n'.encode(),
    )
    samples = [json.dumps(record).encode() for rows in QUESTIONS.values() for record, _ in rows]
    return (
        Decoder("entry.read_entry", _entry, (BadEntry, ProtocolError), entries(), "msgpack", resealed, share=4),
        Decoder(
            "share_codec.decode",
            lambda raw: share_codec.decode(raw, Piece),
            (TypeError, ValueError),
            (piece,),
            "msgpack",
            share=3,
        ),
        Decoder("journal.frames", read_data, (ProtocolError,), (data,), "bytes", reframed, share=0.5),
        Decoder("journal.index", read_index, (ProtocolError,), (index,), "bytes", share=0.5),
        Decoder("checkpoint.manifest", read_manifest, (UserError,), (manifest,), "json", share=0.5),
        Decoder("checkpoint.current", _current(folder), (UserError,), (b"step_4.e1\n",), "text", share=0.5),
        Decoder("doctor.model_config", _model_config(folder), (), MODEL_CONFIGS, "json", share=0.5),
        Decoder("questions.load", _questions(folder), (UserError,), asked, "text", share=0.5),
        Decoder("questions.formats", _questions(folder), (UserError,), samples, "json"),
        Decoder("data.downloads", _downloads(folder), (UserError,), (DOWNLOADS,), "json", share=0.3),
        Decoder("questions.record", _questions(folder), (UserError,), (asked[0].splitlines()[0],), "json", share=0.5),
    )
