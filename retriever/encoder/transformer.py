"""Vectors from a transformer: e5, bge, contriever, DPR, gte, any sentence-transformers or AutoModel folder.

    texts --> prefix --> tokens (cut to a length) --> length buckets --> model --> pooling --> Dense? --> length 1?

The `recipe` defines each step; passages and queries differ in prefix and length, and for DPR in the model.

A vector depends only on its text, up to float noise. A text is padded to its own length rounded up to a multiple of 8
(for tensor cores), at least 16 (smaller matrices use another multiplication), and only texts with the same padded
length share a batch. So padding depends only on the text (`batches`), and in float32 with one CPU thread vectors are
identical bit for bit in any batch. With several threads or on a GPU the last bits can change with the number of rows
(measured with 2 threads: at most 2e-7 per coordinate). Passages with scores that close may then swap ranks between a
fresh and a cached answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from protocol.errors import UserError
from protocol.runtime.torch_safety import refuse_pickled
from retriever.encoder.base import HALF, Vectors, check_finite
from retriever.encoder.config import ComputeSettings, TransformerEncoderSettings
from retriever.encoder.families import Pooling
from retriever.encoder.folder import ModelFolder, Recipe, resolve

log = logging.getLogger(__name__)
MULTIPLE, LEAST = 8, 16
BATCH_TOKENS = 16384
"""Maximum tokens per forward pass, including padding: a GPU is busy with it, and it takes a CPU about a second."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_WIDE = ("t5", "mt5", "umt5")
"""Models trained in bfloat16, with activations beyond float16's range."""


class TransformerEncoder:
    """See the module's docstring. Created and used by one thread."""

    def __init__(self, settings: TransformerEncoderSettings) -> None:
        self.recipe, passages, queries = resolve(settings)
        self.normalized = self.recipe.normalize
        self._passages = _Tower(passages, self.recipe, settings)
        self._queries = self._passages if queries is passages else _Tower(queries, self.recipe, settings)
        self.dim = self._passages.dim
        if self._queries.dim != self.dim:
            raise UserError(
                f"{settings.query_model} and {settings.model} do not match",
                why=f"their vectors have dimensions {self._queries.dim} and {self.dim}",
            )

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return float32 [len(texts), dim]. Raises NotFinite if the model overflows."""
        return self._passages.encode([self.recipe.passage_prefix + text for text in texts], self.recipe.max_passage)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return float32 [len(texts), dim]. Raises NotFinite if the model overflows."""
        return self._queries.encode([self.recipe.query_prefix + text for text in texts], self.recipe.max_query)


class _Tower:
    """One model with its tokenizer."""

    def __init__(self, folder: ModelFolder, recipe: Recipe, settings: TransformerEncoderSettings) -> None:
        self._pooling, self._normalize, self._budget = recipe.pooling, recipe.normalize, BATCH_TOKENS
        self._lower_case = folder.lower_case
        self._tokenizer = load_tokenizer(folder.path)
        # models trained without a pooler are often saved without one; only pooling `pooler` uses it
        unused = () if recipe.pooling == "pooler" else ("pooler.",)
        self._model = load_model(folder.path, settings, unused=unused)
        self._dense = [_dense(path).to(self._model.device) for path in folder.dense]
        self._name = folder.path.name
        self.dim = self._probe()

    def encode(self, texts: list[str], limit: int) -> Vectors:
        """Return float32 [n, dim] of texts with their prefix, cut to `limit` tokens. Texts without tokens get zeros."""
        vectors: Vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        if not texts:
            return vectors
        tokens = self._tokenizer(
            [text.lower() for text in texts] if self._lower_case else texts, truncation=True, max_length=limit
        )
        with torch.inference_mode():
            for rows, output, mask in forward(self._model, tokens, self._tokenizer.pad_token_id, limit, self._budget):
                vectors[rows] = self._finish(pool(self._pooling, output, mask)).cpu().numpy()
        check_finite(vectors, texts, f"the encoder {self._name}", HALF)
        return vectors

    def _finish(self, pooled: torch.Tensor) -> torch.Tensor:
        for step in self._dense:
            pooled = step(pooled)
        return torch.nn.functional.normalize(pooled, dim=1) if self._normalize else pooled

    def _probe(self) -> int:
        """Return the dimension of a vector by encoding a text. Raises UserError if the model does not support the
        pooling."""
        tokens: Any = self._tokenizer(["a"])
        with torch.inference_mode():
            for _, output, mask in forward(self._model, tokens, self._tokenizer.pad_token_id, 8, 8):
                try:
                    return int(self._finish(pool(self._pooling, output, mask)).shape[1])
                except (ValueError, AttributeError, RuntimeError) as error:
                    raise UserError(
                        f"the model in {self._name} does not support pooling `{self._pooling}`",
                        why=str(error).splitlines()[0],
                        todo="set encoder.pooling or encoder.family as in the model's training",
                    ) from error
        raise UserError(f"the tokenizer in {self._name} returns no token for the text 'a'")


def pool(mode: Pooling, output: Any, mask: torch.Tensor) -> torch.Tensor:
    """Return pooled token vectors, float32 [n, hidden], from a model's output and the mask [n, length] of its tokens.

    Texts start at position 0 (padding is on the right) and have at least one token. Raises ValueError if the model has
    no `pooler_output` but it is needed.
    """
    if mode == "pooler":
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            raise ValueError("the model returns no pooler_output")
        return torch.as_tensor(pooled).float()
    states: torch.Tensor = output.last_hidden_state.float()
    if mode == "cls":
        return states[:, 0]
    if mode == "last":
        return states[torch.arange(len(states), device=states.device), mask.sum(dim=1) - 1]
    inside = mask.unsqueeze(-1).bool()
    if mode == "max":
        return states.masked_fill(~inside, float("-inf")).amax(dim=1)
    return states.masked_fill(~inside, 0.0).sum(dim=1) / mask.sum(dim=1, keepdim=True)


class Dense(torch.nn.Module):
    """One Dense step of sentence-transformers: linear, then an activation from torch.nn."""

    def __init__(self, linear: torch.nn.Linear, activation: torch.nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Map float32 [n, in] to [n, out]."""
        result: torch.Tensor = self.activation(self.linear(vectors))
        return result


def _dense(folder: Path) -> Dense:
    """Load a Dense step of sentence-transformers: config.json and model.safetensors."""
    refuse_pickled(folder)
    try:
        said = json.loads((folder / "config.json").read_bytes())
        state = load_file(folder / "model.safetensors")
        name = str(said.get("activation_function", "torch.nn.Tanh"))
        activation = getattr(torch.nn, name.rpartition(".")[2]) if name.startswith("torch.nn.") else None
        linear = torch.nn.Linear(said["in_features"], said["out_features"], bias="linear.bias" in state)
        if (
            activation is None
            or said.get("use_residual")
            or said.get("module_input_name", "sentence_embedding") != ("sentence_embedding")
        ):
            raise ValueError(f"its configuration is not supported: {said}")
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in state.items()})
        return Dense(linear, activation()).eval()
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"cannot load the Dense step in {folder}", why=str(error).splitlines()[0]) from error


def forward(
    model: Any, tokens: Mapping[str, Sequence[Sequence[int]]], pad_id: int | None, limit: int, budget: int
) -> Iterator[tuple[list[int], Any, torch.Tensor]]:
    """Yield (positions, the model's output, mask int64 [n, length]) of every batch; use it under `inference_mode`.

    tokens  a tokenizer's unpadded output: input_ids and possibly token_type_ids. A text without a token
            is in no batch.
    limit   maximum tokens of a text;  budget  maximum padded tokens in a batch
    """
    ids = tokens["input_ids"]
    full = [position for position, row in enumerate(ids) if len(row)]
    for chosen, length in batches([len(ids[position]) for position in full], limit, budget):
        positions = [full[i] for i in chosen]
        mask = torch.zeros((len(positions), length), dtype=torch.int64)
        for row, position in enumerate(positions):
            mask[row, : len(ids[position])] = 1
        mask = mask.to(model.device)
        inputs = {"input_ids": _padded(ids, positions, length, pad_id or 0), "attention_mask": mask}
        if "token_type_ids" in tokens:
            inputs["token_type_ids"] = _padded(tokens["token_type_ids"], positions, length, 0)
        output = model(**{name: value.to(model.device) for name, value in inputs.items()})
        yield positions, output, mask


def _padded(rows: Sequence[Sequence[int]], positions: list[int], length: int, value: int) -> torch.Tensor:
    """Return int64 [len(positions), length], padded on the right."""
    return torch.tensor([[*rows[i], *[value] * (length - len(rows[i]))] for i in positions], dtype=torch.int64)


def batches(lengths: Sequence[int], limit: int, budget: int) -> Iterator[tuple[list[int], int]]:
    """Yield (positions in `lengths`, padded length) of every batch, longest first, so that memory runs out early or
    never.

    limit   maximum input in tokens
    budget  maximum padded tokens in a batch; a single text may exceed it
    """
    buckets: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        buckets.setdefault(padded_length(length, limit), []).append(position)
    for padded in sorted(buckets, reverse=True):
        rows = max(1, budget // padded)
        members = buckets[padded]
        for start in range(0, len(members), rows):
            yield members[start : start + rows], padded


def padded_length(length: int, limit: int) -> int:
    """Return the next multiple of MULTIPLE, at least LEAST, at most `limit` (the model may have no more positions)."""
    return min(max(-(-length // MULTIPLE) * MULTIPLE, LEAST), max(limit, length))


def load_model(folder: Path, compute: ComputeSettings, kind: str | None = None, unused: tuple[str, ...] = ()) -> Any:
    """Load the folder's model in evaluation mode onto its device. Nothing is downloaded, and no code from the folder is
    run.

    transformers only warns about missing weights and initialises them randomly: a DPR context encoder loaded as a
    question encoder "works", with random vectors. Here that is a UserError.

    kind    class of transformers, e.g. AutoModelForSequenceClassification; None: as defined in the folder
    unused  parts of parameter names that may be missing because they are not used
    """
    device = choose_device(compute.device)
    with _as_user_error(folder, "model"), quiet():
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
        chosen = getattr(transformers, kind or _class_of(config))
        dtype = choose_dtype(compute.dtype, device, config)
        refuse_pickled(folder)
        model, loading_info = chosen.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, use_safetensors=True, **_LOCAL
        )
    missing = [name for name in loading_info["missing_keys"] if not any(part in name for part in unused)]
    missing += [str(entry[0]) for entry in loading_info["mismatched_keys"]]
    if missing:
        raise UserError(
            f"the weights in {folder} do not belong to a {type(model).__name__}",
            why=f"{len(missing)} tensors are missing or have another shape, e.g. {sorted(missing)[0]}",
            todo="set the folder of the right model",
        )
    log.info("%s from %s on %s in %s", type(model).__name__, folder.name, device, str(dtype).removeprefix("torch."))
    # decoders would keep unused keys and values
    model.config.use_cache = False
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    """Load the folder's tokenizer."""
    with _as_user_error(folder, "tokenizer"), quiet():
        return transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)


def choose_device(requested: str) -> torch.device:
    """Return the device; `auto` is a GPU if there is one. Raises UserError for a device that is not available."""
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {requested!r} is not available",
            why=str(error).splitlines()[0],
            todo="set device to auto, cpu or cuda:0",
        ) from None
    return device


def choose_dtype(requested: str, device: torch.device, config: Any) -> torch.dtype:
    """Return the dtype. `auto` is float32 on a CPU. On a GPU it is float16, whose vectors are eight times finer than
    bfloat16's, except for models trained in bfloat16, which may overflow in float16."""
    if requested != "auto":
        return DTYPES[requested]
    if device.type != "cuda":
        return torch.float32
    wide = config.model_type in _WIDE or getattr(config, "dtype", None) in (torch.bfloat16, "bfloat16")
    return torch.bfloat16 if wide else torch.float16


def _class_of(config: Any) -> str:
    """Return AutoModel, except for DPR's encoders and T5, where it would load the wrong part."""
    named = (config.architectures or [""])[0]
    if named.startswith("DPR") and named.endswith("Encoder"):
        return str(named)
    return "AutoModelForTextEncoding" if config.model_type in _WIDE else "AutoModel"


@contextmanager
def _as_user_error(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"cannot load the {what} in {folder}",
            why=" ".join(str(error).split())[:300] or type(error).__name__,
            todo="the folder must contain config.json, a tokenizer and weights that this version of transformers "
            "supports",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and load reports inside the block; missing weights are checked separately."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
