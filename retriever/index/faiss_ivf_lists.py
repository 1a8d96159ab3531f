"""An inverted file written without ever being in memory: lists are filled in place, in the file.

FAISS can hold all lists in memory, or keep them in a second file whose path it stores and about which it talks on
standard output. Here the trained, empty index is written by FAISS, and its empty lists are replaced by full ones in
FAISS's own format for them (`write_InvertedLists` in faiss/impl/index_write.cpp): "ilar", number of lists, bytes a
code, "full", the sizes as a vector, then every list's codes and int64 ids. `faiss.read_index` reads and maps it.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from retriever.index import store
from retriever.index.dense import Stored

log = logging.getLogger(__name__)

_BLOCK_BYTES = 512 << 20


def write_filled(index: faiss.IndexIVF, rotation: faiss.LinearTransform | None, vectors: Stored, path: Path) -> None:
    """Write the trained, empty `index` to `path`, filled with `vectors`, each turned by `rotation` first.

    Two passes over the vectors: one finds the lists, the other writes. Memory: one block and 12 bytes a passage.
    """
    lists = np.empty(len(vectors), dtype=np.int64)
    for first, block in _turned(vectors, rotation):
        lists[first : first + len(block)] = index.quantizer.search(block, 1)[1][:, 0]
        log.info("%d of %d passages have a list", first + len(block), len(vectors))
    sizes = np.bincount(lists, minlength=index.nlist)
    starts = _lay_out(index, rotation, sizes, path)
    file = np.memmap(path, dtype=np.uint8, mode="r+")
    filled = np.zeros(index.nlist, dtype=np.int64)
    for first, block in _turned(vectors, rotation):
        chosen = lists[first : first + len(block)]
        codes = np.empty((len(block), index.code_size), dtype=np.uint8)
        index.encode_vectors(len(block), faiss.swig_ptr(block), faiss.swig_ptr(chosen), faiss.swig_ptr(codes), False)
        order = np.argsort(chosen, kind="stable")
        ids = (order + first).astype("<i8").view(np.uint8).reshape(-1, 8)
        found, places, counts = np.unique(chosen[order], return_index=True, return_counts=True)
        for number, place, count in zip(found.tolist(), places.tolist(), counts.tolist(), strict=True):
            part, before = slice(place, place + count), int(filled[number])
            _put(file, starts[number] + before * index.code_size, codes[order[part]])
            _put(file, starts[number] + sizes[number] * index.code_size + before * 8, ids[part])
            filled[number] += count
        log.info("%d of %d passages are in their lists", first + len(block), len(vectors))
    file.flush()


def _turned(vectors: Stored, rotation: faiss.LinearTransform | None) -> Any:
    for first, block in store.blocks(vectors, block_bytes=_BLOCK_BYTES):
        yield first, block if rotation is None else rotation.apply(block)


def _lay_out(
    index: faiss.IndexIVF, rotation: faiss.LinearTransform | None, sizes: npt.NDArray[np.int64], path: Path
) -> npt.NDArray[np.int64]:
    """Write all but the lists, make room for them, and return where each begins."""
    index.ntotal = int(sizes.sum())
    whole: npt.NDArray[np.uint8] = faiss.serialize_index(
        index if rotation is None else faiss.IndexPreTransform(rotation, index)
    )
    nothing = struct.pack("<4sQQ4sQ", b"ilar", index.nlist, index.code_size, b"sprs", 0)
    head = whole.tobytes()
    if not head.endswith(nothing):
        raise RuntimeError(f"FAISS {faiss.__version__} writes empty inverted lists in a format that is not known here")
    lengths = sizes.astype("<u8").tobytes()
    head = head.removesuffix(nothing)
    head += struct.pack("<4sQQ4sQ", b"ilar", index.nlist, index.code_size, b"full", index.nlist) + lengths
    bytes_of = sizes * (index.code_size + 8)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + int(bytes_of.sum()))
    starts: npt.NDArray[np.int64] = len(head) + np.concatenate([[0], np.cumsum(bytes_of)[:-1]])
    return starts


def _put(file: Any, start: int, content: npt.NDArray[np.uint8]) -> None:
    file[start : start + content.size] = content.reshape(-1)
