"""Read the capabilities of an engine from the engine, for its registration."""

from __future__ import annotations

import logging
from typing import Any

from protocol.errors import UserError
from protocol.messages import Transport
from protocol.weights import DIGESTS
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError

log = logging.getLogger(__name__)

EVERY_TRANSPORT: tuple[Transport, ...] = ("disk", "distributed", "adapter")
CPU_ENGINE = "foray-cpu"
"""Name of the CPU engine in /server_info."""
NO_OVERLAP = "--disable-overlap-schedule"


async def read_capabilities(client: EngineAdmin, *, pause_mode: str) -> dict[str, Any]:
    """Return the fields of EngineInfo that the engine reports; empty if it reports none. Raises EngineError.

    Raises UserError for an SGLang that samples deterministically, or does not support in-place swaps. With overlap
    scheduling it launches a step before it has recorded the previous one, so at a pause some tokens are sampled but not
    recorded. For some requests they are later reported with the new version, and a client cannot detect which.
    """
    try:
        info = await client.server_info()
    except EngineError as error:
        if error.cause not in ("refused", "bad_output"):
            raise
        log.warning("the engine does not report its capabilities: %s", error)
        return {}
    loads = await client.loads()
    real = info.get("engine") != CPU_ENGINE
    if real and pause_mode == "in_place" and not info.get("disable_overlap_schedule"):
        raise UserError(
            "this SGLang does not support engine.pause_mode=in_place",
            why="with overlap scheduling it reports a wrong version for one token of some requests",
            todo=f"start it with {NO_OVERLAP}, or set engine.pause_mode=retract",
        )
    if real and info.get("enable_deterministic_inference"):
        raise UserError(
            "this SGLang runs with --enable-deterministic-inference",
            why="all requests have one seed: the trajectories of a group would be equal, their advantages 0",
            todo="start it without that flag (engine.kind.args)",
        )
    quantized = real and bool(info.get("quantization"))
    out: dict[str, Any] = {
        "kind": "sglang" if real else "cpu",
        "dtype": "" if real else str(info.get("dtype") or ""),
        "transports": _transports(info) if real else EVERY_TRANSPORT,
        "ranks": _size(info, "tp_size"),
        "layout": _layout(info) if real else "",
        # opening a session unpacks quantised weights, which a bucket of one tensor would leave incomplete
        "proves": not quantized,
        # SGLang hashes in its own way; a view may name any
        "checksums": tuple(DIGESTS) if real else tuple(map(str, info.get("checksums") or ("sha256",))),
        "max_tokens": int(loads["max_tokens"]) or _number(info, "max_total_num_tokens", 0),
    }
    if loads["max_running"]:
        out["max_running"] = int(loads["max_running"])
    if real and info.get("version"):
        out["versions"] = {"engine": f"sglang {info['version']}"[:256]}
    return out


def _transports(info: dict[str, Any]) -> tuple[Transport, ...]:
    """Return the transports that this SGLang supports.

    Its rank in an update group is the offset plus its tensor-parallel rank (`model_runner_components/weight_updater`):
    two pipeline stages would claim one rank. It refuses groups and adapters for several data-parallel copies, except
    with dp attention, whose ranks are the tensor-parallel ones (`managers/tokenizer_control_mixin`).
    """
    copies = _size(info, "dp_size") > 1 and not info.get("enable_dp_attention")
    out: list[Transport] = ["disk"]
    if not copies and _size(info, "pp_size") == 1:
        out.append("distributed")
    if not copies and info.get("enable_lora"):
        out.append("adapter")
    return tuple(out)


def _layout(info: dict[str, Any]) -> str:
    """Return `EngineInfo.layout` of an SGLang: each rank hashes its part of the fused parameters.

    SGLang 0.5.23 reports `--dp-size N --enable-dp-attention` as dp_size 1 and attn_dp_size N.
    """
    sizes = [f"{name}{_size(info, name + '_size')}" for name in ("tp", "pp", "dp", "ep", "attn_dp")]
    return "/".join(["sglang", *sizes, str(info.get("dtype") or "auto"), str(info.get("quantization") or "none")])[:256]


def _size(info: dict[str, Any], name: str) -> int:
    return max(1, _number(info, name, 1))


def _number(info: dict[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default
