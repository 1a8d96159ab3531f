"""Load the policy from a Hugging Face directory, and map its weights to that layout's names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from learner.config.model import CriticSettings, ModelSettings
from learner.engine.accelerator import without_gpu
from learner.model.architecture import refuse_settings, without_dropout
from learner.model.lora import add_adapters
from learner.model.parity_check import first_layers, settle_attention
from learner.model.policy import PolicyModel
from learner.model.stored_weights import StoredWeights, empty_model, stored_elements
from protocol.errors import UserError
from protocol.runtime.torch_safety import refuse_pickled

log = logging.getLogger(__name__)


def load_policy(
    directory: Path,
    settings: ModelSettings,
    *,
    packed: bool = True,
    shared: bool = False,
    critic: CriticSettings | None = None,
    sharded: bool = False,
) -> PolicyModel:
    """Return the model in `directory` (Hugging Face layout), on the CPU.

    packed   whether rows will contain several trajectories
    shared   whether these may share a prompt
    critic   set if the model gets a value head (critic.backbone policy)
    sharded  as `load_settled`
    Raises UserError if the model is missing, or would be scored wrongly.
    """
    causal = load_settled(directory, settings, packed=packed, shared=shared, sharded=sharded)
    policy = PolicyModel(causal, settings, critic)
    if settings.lora.rank:
        add_adapters(causal, settings.lora)
    return policy


def load_settled(
    directory: Path, settings: ModelSettings, *, packed: bool, shared: bool = False, sharded: bool = False
) -> Any:
    """Return transformers' model with the attention that `settle_attention` chooses.

    sharded  leave the weights in their files, to be read rank by rank (`causal.stored`), where they are stored as the
             model has them; otherwise the model is loaded whole. The attention is then settled on its first layers.
    """
    causal = load_causal(directory, settings, packed=packed, sharded=sharded)
    _refuse_float32(directory, causal)
    whole = causal
    if causal.stored is not None:
        try:
            whole = _first_layers(directory, settings, causal.config, packed=packed)
        except UserError:
            raise
        except Exception as error:  # other layers depend on their number, or a part of the configuration does
            _log_whole(directory, f"its first layers are no model by themselves ({type(error).__name__}: {error})")
            causal = whole = load_causal(directory, settings, packed=packed)
    _refuse_other_dtypes(directory, causal, whole)
    settle_attention(PolicyModel(whole, settings), directory, packed=packed, shared=shared)
    if whole is not causal:
        causal.set_attn_implementation(whole.config._attn_implementation)
    return causal


def _refuse_float32(directory: Path, causal: Any) -> None:
    """Raise UserError if transformers keeps parameters of a bfloat16 model in float32, which DeepSpeed would round."""
    kept = [name for name, parameter in causal.named_parameters() if parameter.dtype != causal.dtype]
    if kept:
        raise needs_float32(directory, causal, kept, "learner.model.dtype")


def needs_float32(directory: Path, causal: Any, names: Sequence[str], setting: str) -> UserError:
    """Return the error for a model whose parameters `names` a training in bfloat16 would round."""
    return UserError(
        f"{directory} contains a {causal.config.model_type} model, which needs some weights in float32: "
        f"{names[0]} and {len(names) - 1} others",
        why="training would round them to bfloat16: log-probs would differ from those of transformers and engines",
        todo=f"set {setting} to float32",
    )


def refuse_rounding(directory: Path, causal: Any, setting: str) -> None:
    """Raise UserError if transformers keeps parameters of `causal`, loaded in float32, so also in a bfloat16 model."""
    try:
        rounded = empty_model(causal.config, dtype=torch.bfloat16)
    except Exception as error:  # it cannot be built without its weights
        log.warning("cannot find out which weights of %s need float32 (%s: %s)", directory, type(error).__name__, error)
        return
    if kept := [name for name, parameter in rounded.named_parameters() if parameter.dtype != torch.bfloat16]:
        raise needs_float32(directory, causal, kept, setting)


def _refuse_other_dtypes(directory: Path, causal: Any, loaded: Any) -> None:
    """Raise UserError if a tensor of `causal` has another dtype than in `loaded`, which transformers has loaded: all of
    the model, or its first layers."""
    own = {name: tensor.dtype for name, tensor in [*causal.named_parameters(), *causal.named_buffers()]}
    for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
        if own.get(name) != tensor.dtype:
            raise UserError(
                f"{directory} contains a {causal.config.model_type} model, whose {name} would be {own.get(name)}",
                why=f"transformers keeps it in {tensor.dtype}: log-probs would differ",
                todo="set learner.engine.zero_stage to 2 or less, or use a model of another type",
            )


def _first_layers(directory: Path, settings: ModelSettings, config: Any, *, packed: bool) -> Any:
    """Return the model cut to its first two layers, or to as many as have every kind of attention."""
    reports = logging.getLogger("transformers.modeling_utils")
    level = reports.level
    reports.setLevel(logging.ERROR)  # without the table of the other layers
    try:
        count = min(first_layers(config), config.num_hidden_layers)
        return load_causal(directory, settings, packed=packed, layers=count)
    finally:
        reports.setLevel(level)


def load_causal(
    directory: Path, settings: ModelSettings, *, packed: bool = False, sharded: bool = False, layers: int = 0
) -> Any:
    """Return transformers' model without dropout. Raises UserError if it is missing, not a text model, or does not
    support `packed` rows.

    sharded  as `load_settled`: `stored` of the result is the StoredWeights, or None if it is loaded whole
    layers   only the first so many layers; 0: all
    """
    if not (directory / "config.json").is_file():
        raise UserError(
            f"no model found in {directory}",
            why="run.model must be a directory with config.json, weights and tokenizer",
            todo="set run.model=DIR",
        )
    refuse_pickled(directory)
    without_gpu()
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # progress bars clutter log files
    config = read_config(directory)
    refuse_settings(directory, config, settings.attention, packed=packed)
    without_dropout(config)
    if layers:
        for name, value in list(vars(config).items()):  # what is listed layer by layer
            if isinstance(value, list) and len(value) == config.num_hidden_layers:
                setattr(config, name, value[:layers])
        config.num_hidden_layers = layers
    options = {
        "dtype": getattr(torch, settings.fixed_dtype),
        "trust_remote_code": False,
        "attn_implementation": settings.attention,
    }
    causal = stored = None
    try:
        if sharded:
            causal, stored = _stored(directory, config, options)
        if causal is None or stored is None:
            _refuse_larger(directory, config, options)
            options |= {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
            causal, report = AutoModelForCausalLM.from_pretrained(directory, config=config, **options)
            refuse_missing(directory, report["missing_keys"])
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:  # no such attention, broken weights, shapes
        if layers and isinstance(error, RuntimeError):
            raise  # the whole model may fit its files
        raise UserError(
            f"transformers cannot load {directory} ({config.model_type})",
            why=" ".join(str(error).split())[:400],
            todo="copy the files again, try learner.model.attention=eager, or use another model",
        ) from None
    causal.stored = stored
    if settings.gradient_checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    return causal


def read_config(directory: Path) -> Any:
    """Return transformers' configuration of the model in `directory`. Raises UserError if it knows no such type."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, TypeError, LookupError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"transformers does not know the model in {directory}",
            why=f"its config.json: {str(error).splitlines()[0][:300]}" if str(error) else type(error).__name__,
            todo="use a model of a type that transformers contains (docs/models.md); code of models is never run",
        ) from None


def refuse_missing(directory: Path, names: Iterable[str]) -> None:
    """Raise UserError if there are `names` of parameters without a tensor in the files: they would be random."""
    if missing := sorted(names):
        raise UserError(
            f"the files in {directory} lack {len(missing)} tensors of the model, for example {missing[0]}",
            why="transformers would give them random values",
            todo="download the complete model directory again, or use another model",
        )


def _refuse_larger(directory: Path, config: Any, options: dict[str, Any]) -> None:
    """Raise UserError if config.json describes a larger model than the files hold: random weights could fill the
    memory before anything is noticed."""
    try:
        described = sum(p.numel() for p in empty_model(config, **options).parameters())
        there = stored_elements(directory)
    except Exception as error:  # from_pretrained will report it, or can build it
        log.debug("the weights of %s cannot be counted: %s", directory, error)
        return
    if described > 1.25 * there > 0:
        raise UserError(
            f"config.json in {directory} describes {described:,} weights, its files have {there:,}",
            why="transformers would give the rest random values",
            todo="download the complete model directory again, or use another model",
        )


def _stored(directory: Path, config: Any, options: dict[str, Any]) -> tuple[Any, StoredWeights | None]:
    """Return the model without its weights, and its files; None for the files if it must be loaded whole."""
    try:
        causal = empty_model(config, **options)
        stored = StoredWeights.of(directory, causal)
    except UserError:
        raise
    except Exception as error:  # code of the architecture that writes to its parameters, or a conversion that fails
        causal, stored = None, None
        _log_whole(directory, f"it cannot be built without its weights ({type(error).__name__}: {error})")
    else:
        if stored is None:
            _log_whole(directory, "its files do not have the model's tensors")
    return causal, stored


def _log_whole(directory: Path, why: str) -> None:
    log.warning("%s is loaded whole on every rank: %s", directory, why)


def as_saved(causal: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` of `causal` with the names and shapes of `save_pretrained`, which engines read.

    transformers stacks the weights of experts, which a checkpoint keeps separate: one tensor may become several, not
    copied if contiguous. For most models nothing changes.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        for saved, part in revert_weight_conversion(causal, {name: tensor}).items():
            yield saved, part.contiguous()
