"""The placement of a run on this machine, or on that of its hardware profile, with the files that it depends on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from deploy.config import RunConfig
from deploy.hardware.assign import NO_GPUS, Placement, needs, place
from deploy.hardware.gpus import built_for_cuda
from deploy.hardware.inventory import HARDWARE, VISIBLE, Host, this_machine
from protocol.errors import UserError
from protocol.runtime.number_format import read_facts
from retriever.corpus.manifest import MANIFEST, settings_of
from retriever.index.config import IndexSettings


def hosts_of(config: RunConfig, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return this machine with its GPUs, () without any. CUDA_VISIBLE_DEVICES in launch.env limits them, too."""
    given = config.launch.env.get(VISIBLE)
    gpus = this_machine(environ)
    if given is not None:
        gpus = tuple(gpu for gpu in gpus if gpu.id in [word.strip() for word in given.split(",")])
    return (Host(gpus),) if gpus else ()


def built_index(config: RunConfig) -> IndexSettings | None:
    """Return the settings of the retriever's built index if the configuration leaves them to it, else None."""
    directory = config.retriever.index_dir
    if not config.num_retrievers or directory is None or config.retriever.given_index is not None:
        return None
    if not (directory / MANIFEST).is_file():
        return None  # another check reports it
    try:
        return settings_of(directory)
    except UserError:
        return None


def placement_of(config: RunConfig, hosts: Sequence[Host], *, cuda: bool = True) -> Placement:
    """Return the placement of a run on `hosts`, from its model's config.json and its index. Raises UserError."""
    facts = read_facts(config.run.model)
    return place(config, hosts, needs(config, facts, index=built_index(config), cuda=cuda))


def on_this_machine(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Placement:
    """Return the placement of a run on this machine. Raises UserError."""
    hosts = hosts_of(config, environ)
    return placement_of(config, hosts, cuda=built_for_cuda()) if hosts else NO_GPUS


def planned(config: RunConfig, environ: Mapping[str, str] = os.environ) -> tuple[Placement, str]:
    """Return the placement to show, and a note: on a machine without GPUs that of the hardware profile."""
    name, local = config.launch.hardware, config.launch.backend == "local"
    if not local and not name:
        wanted = needs(config, read_facts(config.run.model), index=built_index(config))
        return replace(NO_GPUS, wanted=tuple(wanted), home=f"chosen by {config.launch.backend}"), ""
    hosts = hosts_of(config, environ) if local else ()
    if local and (hosts or not name):
        return on_this_machine(config, environ), ""
    placement = placement_of(config, HARDWARE[name])
    return placement, f"as on {name} (launch.hardware): no NVIDIA GPU was found on this machine"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
