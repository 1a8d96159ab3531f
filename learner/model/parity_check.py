"""Check at load that a model is scored as transformers scores each sequence alone, in the rows of the run.

Every model is checked, with its own weights: in training mode (so that remaining dropout or noise shows), its gradient,
rows of padding, packed rows and a shared prompt if the run has them. Sliding windows and chunks are set to a few tokens
meanwhile, so that texts of 23 and 8 tokens cross them; the code is the same. A model of many parameters is computed
with its first layers only, every kind of layer included.

The same check decides whether a model can be computed span by span (`attention.py`) or needs a mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from learner.model.architecture import FULL, SLIDING, layer_kinds, no_packing, no_sharing, refuse_packing
from learner.model.attention import use_spans
from learner.model.policy import PolicyModel, backbone
from protocol.errors import UserError

LENGTHS, PROMPT, PADDING = (23, 8), 4, 3
SHORT = 5
"""Windows and chunks during the check."""
WINDOWS, CHUNKS = ("sliding_window", "attention_chunk_size"), ("chunk_size", "mamba_chunk_size", "block_size")
"""Names of lengths in configurations and layers: those that scores depend on, and those that only divide the work."""
LARGE, IDS = 100_000_000, 4096
"""Parameters above which only the first layers are computed, and number of ids of the output layer meanwhile."""
TOLERANCE, COARSE = 1e-3, 0.25
"""Bound on a difference, in standard deviations of the log-probs. In float32 it applies to the largest difference.
bfloat16 rounds so much that single tokens may differ by as much as the log-probs themselves (another expert is chosen),
so there it applies to the median of each text. Mixing of texts and noise are checked separately, and exactly."""
CANNOT_RUN = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What the layers of an unsuitable model raise."""


def settle_attention(policy: PolicyModel, directory: Path, *, packed: bool, shared: bool = False) -> None:
    """Make `policy` compute span by span if that is correct. Raises UserError if neither way agrees with transformers,
    or the trajectories of `packed` rows, or those behind `shared` prompts, would mix.
    """
    config = policy.causal.config
    with _shortened(policy.causal):
        if layer_kinds(config) == {FULL} and config._attn_implementation == "sdpa":
            if use_spans(policy.causal) and _right_by_spans(policy, packed=packed, shared=shared):
                return
            policy.causal.set_attn_implementation("sdpa")
        _refuse_differences(policy, directory, packed=packed, shared=shared)


def _right_by_spans(policy: PolicyModel, *, packed: bool, shared: bool) -> bool:
    try:
        found = differences(policy, packed=packed, shared=shared)
    except CANNOT_RUN:  # spans do not reach the layers, or a mask interferes
        return False
    return not _excess(policy, found)


def _refuse_differences(policy: PolicyModel, directory: Path, *, packed: bool, shared: bool) -> None:
    config = policy.causal.config
    kind = config.model_type
    if packed:
        refuse_packing(directory, config)
    try:
        found = differences(policy, packed=packed, shared=shared)
    except CANNOT_RUN as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        if packed:  # some models have no place for a mask of packed rows
            _refuse_differences(policy, directory, packed=False, shared=False)
            raise no_packing(directory, kind, why) from error
        raise UserError(
            f"{directory} contains a {kind} model, which the learner cannot run",
            why=why,
            todo="use a model of another type",
        ) from error
    excess = _excess(policy, found)
    if "eager" in excess:
        raise UserError(
            f"{directory} contains a {kind} model, which attention {config._attn_implementation} computes wrongly",
            why=f"log-probs differ from those of eager attention by {found['eager']:.2g} standard deviations",
            todo="set learner.model.attention to eager",
        )
    for name, why in WRONG.items():
        if name in excess:
            raise UserError(
                f"{directory} contains a {kind} model, which would be scored wrongly",
                why=why.format(found[name]),
                todo="use a model of another type",
            )
    change = "a trajectory's log-probs change by {:.2g} standard deviations "
    if excess & {"packed", "mixed"}:
        raise no_packing(directory, kind, change.format(max(found["packed"], found["mixed"])) + "beside another one")
    if excess:
        raise no_sharing(directory, kind, change.format(found["shared"]) + "behind a shared prompt")


WRONG = {
    "chunk": "transformers' log-probs change by {:.2g} standard deviations from the second chunk of a text on",
    "noise": "log-probs of two equal calls in training mode differ by {:.2g} standard deviations",
    "alone": "log-probs differ from those of transformers by {:.2g} standard deviations",
    "gradient": "the gradient differs from that of transformers by a factor of {:.2g}",
}


def _excess(policy: PolicyModel, found: dict[str, float]) -> set[str]:
    """Return the differences that are too large or NaN."""
    limit = COARSE if policy.causal.dtype == torch.bfloat16 else TOLERANCE
    exact = {"alone": limit / 5, "mixed": limit / 10, "noise": limit / 10, "gradient": 10 * limit}
    return {name for name, difference in found.items() if not difference <= exact.get(name, limit)}


@contextmanager
def _shortened(causal: Any, names: tuple[str, ...] = WINDOWS, length: int = SHORT) -> Iterator[None]:
    """Limit the lengths called `names` of a model and its layers to `length`; with WINDOWS also a large model to its
    first layers, and the output layer to IDS.
    """
    config, head = causal.config, causal.get_output_embeddings()
    changed: list[tuple[Any, str, Any, Any]] = []
    for owner in (config, *causal.modules()):
        for name in names:
            if type(value := vars(owner).get(name)) is int and value > length:
                changed.append((owner, name, value, length))
    simple = layer_kinds(config) <= {FULL, SLIDING} and not getattr(config, "num_kv_shared_layers", 0)
    if names is WINDOWS and simple and sum(p.numel() for p in causal.parameters()) > LARGE:
        count = config.num_hidden_layers
        changed.append((config, "num_hidden_layers", count, min(count, first_layers(config))))
    if names is WINDOWS:
        for name, whole in list(head.named_parameters(recurse=False)):
            changed.append((head, name, whole, torch.nn.Parameter(whole[:IDS], requires_grad=whole.requires_grad)))
    for owner, name, _, new in changed:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old, _ in changed:
            setattr(owner, name, old)


def first_layers(config: Any) -> int:
    """Return the number of first layers that have every kind of attention, at least two."""
    kinds = list(getattr(config, "layer_types", None) or ())
    return max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])


def differences(policy: PolicyModel, *, packed: bool, shared: bool = False) -> dict[str, float]:
    """Return the differences of log-probs from those of transformers, in standard deviations of the latter: the largest
    in float32, the larger of both texts' medians in bfloat16.

    eager     of transformers with the attention of the settings, from transformers with eager attention
    chunk     of transformers, when a text has several chunks; only of models that have them
    alone     of our path, each text in its own row
    noise     of our path, when it is repeated: the largest in any dtype
    gradient  of norms and biases, relative to its largest element; in bfloat16 only whether it is finite
    packed    of our path, both texts in one row
    mixed     of a text in a row, when the text beside it changes: the largest in any dtype
    shared    of our path, both texts behind one copy of their common beginning
    """
    causal, was_training = policy.causal, policy.training
    generator = torch.Generator().manual_seed(0)
    ids = min(policy.vocabulary, IDS)
    texts = [torch.randint(0, ids, (n + 1,), generator=generator) for n in LENGTHS]
    others = [torch.randint(0, ids, (n + 1,), generator=generator) for n in LENGTHS]
    texts[1][:PROMPT] = texts[0][:PROMPT]
    differ = _typical if causal.dtype == torch.bfloat16 else _largest
    implementation = causal.config._attn_implementation
    policy.eval()
    own, own_gradient = _with_gradient(policy, lambda: _by_transformers(causal, texts))
    scale = float(own.std()) or 1.0
    found = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if implementation == "eager":
            found["eager"] = 0.0
        else:
            causal.set_attn_implementation("eager")
            eager = _by_transformers(causal, texts)
            if eager.equal(own):  # the type may choose its attention when it is built
                eager = _by_transformers(_built_eager(causal), texts)
            scale = float(eager.std()) or 1.0
            found["eager"] = differ(own, eager) / scale
            causal.set_attn_implementation(implementation)
        with _shortened(causal, CHUNKS):
            found["chunk"] = differ(_by_transformers(causal, texts), own) / scale
        policy.train()
        alone = _in_rows(policy, texts)
        found["alone"] = differ(alone, own) / scale
        found["noise"] = _largest(_in_rows(policy, texts), alone) / scale
    gradient = _with_gradient(policy, lambda: _in_rows(policy, texts))[1]
    if causal.dtype == torch.bfloat16:
        found["gradient"] = 0.0 if bool(gradient.isfinite().all()) else float("inf")
    else:
        found["gradient"] = _largest(gradient, own_gradient) / (float(own_gradient.abs().max()) or 1.0)
    with torch.no_grad():
        if packed:
            together = _in_one_row(policy, texts)
            left = _in_one_row(policy, [texts[0], others[1]])[: LENGTHS[0]]
            right = _in_one_row(policy, [others[0], texts[1]])[LENGTHS[0] :]
            found["packed"] = differ(together, own) / scale
            found["mixed"] = _largest(torch.cat([left, right]), together) / scale
        if shared:
            found["shared"] = differ(_behind_one_prompt(policy, texts), own) / scale
    policy.train(was_training)
    return found


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _typical(a: torch.Tensor, b: torch.Tensor) -> float:
    return max(float(part.median()) for part in torch.split((a - b).abs(), list(LENGTHS)))


@torch.enable_grad()
def _with_gradient(policy: PolicyModel, score: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores, and the gradient of their sum for all vectors (norms, biases): the backward pass goes through the
    first layer, but keeps no gradient of a matrix."""
    parameters = list(backbone(policy.causal).parameters())
    vectors = [p for p in parameters if p.ndim == 1] or parameters[:1]
    scores = score()
    gradients = torch.autograd.grad(scores.sum(), vectors, materialize_grads=True)
    return scores.detach(), torch.cat([gradient.flatten().float() for gradient in gradients])


def _built_eager(causal: Any) -> Any:
    """Return a model that was built with eager attention, with the tensors of `causal`."""
    config = copy.deepcopy(causal.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        built = type(causal)(config).eval()
    for name, module in built.named_modules():
        own = causal.get_submodule(name)
        module._parameters, module._buffers = own._parameters, own._buffers
    return built


def _by_transformers(causal: Any, texts: list[torch.Tensor]) -> torch.Tensor:
    scores = []
    for text in texts:
        logits = causal(input_ids=text[None, :-1], use_cache=False).logits[0].double()
        scores.append(torch.log_softmax(logits, -1).gather(-1, text[1:, None]).squeeze(-1))
    return torch.cat(scores)


def _in_rows(policy: PolicyModel, texts: list[torch.Tensor]) -> torch.Tensor:
    width = max(LENGTHS) + PADDING
    ids = torch.stack([torch.nn.functional.pad(t[:-1], (0, width - len(t) + 1)) for t in texts])
    positions = torch.stack([torch.nn.functional.pad(torch.arange(n), (0, width - n)) for n in LENGTHS])
    index = torch.cat([row * width + torch.arange(n) for row, n in enumerate(LENGTHS)])
    return _scored(policy, ids, positions, None, index, texts)


def _in_one_row(policy: PolicyModel, texts: list[torch.Tensor]) -> torch.Tensor:
    filling = torch.zeros(PADDING, dtype=torch.long)
    ids = torch.cat([*(t[:-1] for t in texts), filling])[None]
    positions = torch.cat([*(torch.arange(n) for n in LENGTHS), filling])[None]
    document_ids = torch.cat([*(torch.full((n,), number) for number, n in enumerate(LENGTHS)), filling - 1])[None]
    return _scored(policy, ids, positions, document_ids, torch.arange(sum(LENGTHS)), texts)


def _behind_one_prompt(policy: PolicyModel, texts: list[torch.Tensor]) -> torch.Tensor:
    first, second = LENGTHS
    filling = torch.zeros(PADDING, dtype=torch.long)
    ids = torch.cat([texts[0][:-1], texts[1][PROMPT:-1], filling])[None]
    positions = torch.cat([torch.arange(first), torch.arange(PROMPT, second), filling])[None]
    document_ids = torch.cat([torch.zeros(first + second - PROMPT, dtype=torch.long), filling - 1])[None]
    index = torch.cat([torch.arange(first), torch.arange(PROMPT), torch.arange(first, first + second - PROMPT)])
    return _scored(policy, ids, positions, document_ids, index, texts)


def _scored(
    policy: PolicyModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    document_ids: torch.Tensor | None,
    index: torch.Tensor,
    texts: list[torch.Tensor],
) -> torch.Tensor:
    targets = torch.cat([t[1:] for t in texts])
    return policy(ids, positions, document_ids, index, targets, 1.0, False).logprobs.double()  # type: ignore[no-any-return]
