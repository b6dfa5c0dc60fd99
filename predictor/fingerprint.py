"""Fingerprints: do two artefacts speak of the same target?

``target_fingerprint`` is SHA-256 over

1. every router tensor, sorted by (decoder layer, role), as one JSON line ``[layer, role, shape]`` and then its
   little-endian float32 bytes in C order; role is ``weight``, ``bias`` or ``correction_bias``;
2. the canonical JSON (sorted keys, no spaces, ASCII) of the routing configuration
   ``{"E", "K", "scoring", "normalisation", "groups", "scaling"}``.

Expert width, dtype and quantisation are left out, so a predictor trained on the bf16 target serves its FP8 or
widened variant. It is computed from the checkpoint's *files*: a router stored in float32 and loaded in bf16 has
other values, so saving that model gives another fingerprint, unless the values are representable in bf16. A model
built in memory carries its source's spec (`carry_routing_spec`). Tensors of multi-token-prediction layers
(decoder layers from ``num_hidden_layers`` on) belong to a drafter and are left out.

``tokenizer_fingerprint`` is SHA-256 of the JSON list of the sorted (token, id) pairs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecospec.predictor.checkpoint_files import read_matching, resolve_checkpoint
from ecospec.predictor.family_notes import note_of, refusal, text_config
from ecospec.predictor.routing_spec import RoutingSpec

_SPEC_ATTRIBUTE = "ecospec_routing_spec"

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.(.+)$")
# Towers beside the text decoder, and drafters stored with it, whose layers are numbered from 0 again.
_OTHER_TOWERS = re.compile(r"(?:^|\.)(?:vision\w*|visual|audio\w*|talker|code2wav|mtp\w*|encoder|draft\w*)\.")
_ROUTER_MODULE = re.compile(r"(?:gate|router|\w+_router)")
_EXPERT_MODULE = re.compile(r"(?:experts?|shared_experts?|shared_mlp)")
_ROLES = {
    "weight": "weight",
    "bias": "bias",
    "e_score_correction_bias": "correction_bias",
    "score_correction_bias": "correction_bias",
    "correction_bias": "correction_bias",
    "expert_bias": "correction_bias",
    "router_bias": "correction_bias",
}

_NUM_EXPERTS_NAMES = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")

_VOCABULARY_FILES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")


@dataclasses.dataclass(frozen=True, slots=True)
class RouterTensor:
    """One router tensor of one decoder layer: its layer number, role and value."""

    layer: int
    role: str
    value: Tensor


def is_router_name(name: str) -> bool:
    """Whether a tensor's name reads like a router's; its shape decides in the end."""
    match = _LAYER.search(name)
    if match is None or _OTHER_TOWERS.search(name):
        return False
    *modules, leaf = match.group(2).split(".")
    if leaf not in _ROLES:
        return False
    if _ROLES[leaf] == "correction_bias":  # some families store it with the experts
        return True
    if any(_EXPERT_MODULE.fullmatch(module) for module in modules):
        return False
    return any(_ROUTER_MODULE.fullmatch(module) for module in modules)


def routing_config(config: Any, source: str = "config") -> dict[str, Any]:
    """The part of a target's configuration that decides routing.

    Args:
        config: A transformers configuration; one wrapped in ``text_config`` is unwrapped.
        source: File named in messages.

    Returns:
        ``{"E", "K", "scoring", "normalisation", "groups", "scaling"}``.

    Raises:
        ValueError: No MoE target, or a family that does not fit one (L, E, K).
    """
    text = text_config(config)
    if reason := refusal(config):
        raise ValueError(f"{source}: {reason}")
    groups = [getattr(text, "n_group", None), getattr(text, "topk_group", None)]
    return {
        "E": _count(text, _NUM_EXPERTS_NAMES, "experts", source),
        "K": _count(text, _TOP_K_NAMES, "experts per token", source),
        "scoring": getattr(text, "scoring_func", None) or note_of(getattr(text, "model_type", "")).scoring,
        "normalisation": getattr(text, "norm_topk_prob", None),
        "groups": None if groups == [None, None] else groups,
        "scaling": getattr(text, "routed_scaling_factor", None),
    }


def _count(config: Any, names: tuple[str, ...], what: str, source: str) -> int:
    """First of several spellings of a count in a configuration."""
    for place, name in ((place, name) for place in (config, getattr(config, "ffn_config", None)) for name in names):
        value = getattr(place, name, None)  # DBRX keeps its counts in ffn_config
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if isinstance(value, list | tuple):
            raise ValueError(f"{source}: {name} differs by layer ({value}); targets need one number of {what}")
    family = getattr(config, "model_type", "?")
    raise ValueError(f"{source}: no MoE target: family {family!r} states no number of {what} (looked for {names})")


def router_tensors(config: Any, tensors: Mapping[str, Tensor], source: str = "state") -> list[RouterTensor]:
    """Router tensors among named tensors, sorted by (layer, role).

    Args:
        config: The target's configuration.
        tensors: Named tensors; anything that is no router is passed over.
        source: File named in messages.

    Raises:
        ValueError: No MoE layer, two routers in one layer, or a quantised router.
    """
    num_experts = routing_config(config, source)["E"]
    text = text_config(config)
    note = note_of(getattr(text, "model_type", ""))
    num_layers = getattr(text, "num_hidden_layers", None)
    # Inkling's router scores its shared experts as well.
    rows = {"weight": {num_experts, num_experts + (getattr(text, "n_shared_experts", None) or 0)}}
    found: dict[tuple[int, str], tuple[str, Tensor]] = {}
    for name, value in tensors.items():
        match = _LAYER.search(name)
        if match is None or not is_router_name(name):
            continue
        layer, role = int(match.group(1)), _ROLES[name.rsplit(".", 1)[-1]]
        if role == "bias" and note.bias_is_correction:
            role = "correction_bias"
        value = _oriented(role, value, num_experts, getattr(text, "hidden_size", None))  # noqa: PLW2901
        dimensions = 2 if role == "weight" else 1
        allowed = rows.get(role, {num_experts})
        if value.ndim != dimensions or value.shape[0] not in allowed or (num_layers and layer >= num_layers):
            continue
        if not value.is_floating_point() or value.element_size() < 2:
            raise ValueError(
                f"{source}: router {name} is stored as {value.dtype}; use a checkpoint with float routers"
            )
        if (layer, role) in found:
            raise ValueError(f"{source}: layer {layer} has two routers, {found[layer, role][0]} and {name}")
        found[layer, role] = (name, value)
    if not any(role == "weight" for _, role in found):
        raise ValueError(
            f"{source}: no MoE layers: found no router of {num_experts} rows; give a mixture-of-experts target"
        )
    return [RouterTensor(layer, role, value) for (layer, role), (_, value) in sorted(found.items())]


def _oriented(role: str, value: Tensor, num_experts: int, hidden: int | None) -> Tensor:
    """A router tensor as the model holds it: ERNIE-4.5 stores matrices transposed, and a bias row per modality."""
    if role == "correction_bias" and value.ndim == 2 and value.shape[1] == num_experts:
        return value[0]
    if role == "weight" and value.shape == (hidden, num_experts) and hidden != num_experts:
        return value.T
    return value


def fingerprint_of_state(config: Any, tensors: Mapping[str, Tensor], source: str = "state") -> str:
    """Fingerprint of named tensors, as defined at the top of this file.

    Args:
        config: The target's transformers configuration.
        tensors: Named tensors, e.g. a state dict.
        source: File named in messages.

    Returns:
        64 hex digits.

    Raises:
        ValueError: See `router_tensors` and `routing_config`.
    """
    return _digest(routing_config(config, source), router_tensors(config, tensors, source))


def _digest(routing: Mapping[str, Any], routers: list[RouterTensor]) -> str:
    """Hash the routers, then the routing configuration."""
    digest = hashlib.sha256()
    for router in routers:
        digest.update(_canonical_json([router.layer, router.role, list(router.value.shape)]) + b"\n")
        values = router.value.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
        digest.update(values.astype("<f4", copy=False).tobytes())
    digest.update(_canonical_json(routing))
    return digest.hexdigest()


def _canonical_json(value: Any) -> bytes:
    """One byte form per value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 hex of the sorted (token, id) pairs.

    Args:
        tokenizer: Anything with ``get_vocab()``, or the mapping from token to id itself.
    """
    vocabulary = tokenizer if isinstance(tokenizer, Mapping) else tokenizer.get_vocab()
    pairs = sorted((str(token), int(index)) for token, index in vocabulary.items())
    return hashlib.sha256(_canonical_json(pairs)).hexdigest()


def _read_config(folder: Path) -> Any:
    """A checkpoint's configuration object."""
    from transformers import AutoConfig  # noqa: PLC0415 - hashing a state dict needs no transformers

    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the checkpoint folder that holds config.json")
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # a strict field, a missing package: transformers has no base class for them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: transformers cannot read it: {reason}") from error


def target_fingerprint(path: str | Path) -> str:
    """Fingerprint of a checkpoint, from its files; the model is never loaded.

    Args:
        path: Folder with ``config.json`` and safetensors files (single or sharded), or a hub id in the local cache.

    Returns:
        64 hex digits.

    Raises:
        FileNotFoundError: The folder, its configuration or its safetensors files are missing.
        ValueError: Not an MoE target of a supported kind.
    """
    folder = resolve_checkpoint(path)
    config = _read_config(folder)
    routing = routing_config(config, str(folder))
    return _digest(routing, router_tensors(config, read_matching(folder, is_router_name), str(folder)))


def routing_spec_of(path: str | Path) -> RoutingSpec:
    """Spec of a checkpoint, from its files; the model is never loaded.

    Args:
        path: Folder with configuration, safetensors files and tokenizer, or a hub id in the local cache.

    Raises:
        FileNotFoundError: Something is missing.
        ValueError: Not an MoE target of a supported kind, or no readable tokenizer.
    """
    folder = resolve_checkpoint(path)
    config = _read_config(folder)
    tensors = read_matching(folder, is_router_name)
    spec = _spec(config, tensors, "0" * 64, str(path), str(folder))  # refuse a wrong target before its tokenizer
    return dataclasses.replace(spec, tokenizer_fingerprint=checkpoint_tokenizer_fingerprint(folder))


def checkpoint_tokenizer_fingerprint(path: str | Path) -> str:
    """`tokenizer_fingerprint` of the tokenizer saved with a checkpoint.

    Args:
        path: Folder, or hub id.

    Raises:
        ValueError: No readable tokenizer there.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - see _read_config

    folder = Path(path)
    local = folder.is_dir()
    # Without a vocabulary transformers builds the family's tokenizer empty instead of failing.
    if local and not any(file for pattern in _VOCABULARY_FILES for file in folder.glob(pattern)):
        raise ValueError(f"{path}: no tokenizer ({', '.join(_VOCABULARY_FILES)}); save the checkpoint's there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=local)
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: no readable tokenizer ({reason}); save the checkpoint's there") from error
    return tokenizer_fingerprint(tokenizer)


def _spec(config: Any, tensors: Mapping[str, Tensor], tokenizer: str, target_id: str, source: str) -> RoutingSpec:
    """Assemble a spec from a configuration and named tensors."""
    routing = routing_config(config, source)
    routers = router_tensors(config, tensors, source)
    layers = tuple(sorted({router.layer for router in routers if router.role == "weight"}))
    return RoutingSpec(
        num_layers=len(layers),
        layer_indices=layers,
        num_experts=routing["E"],
        top_k=routing["K"],
        vocab_size=text_config(config).vocab_size,
        tokenizer_fingerprint=tokenizer,
        target_id=target_id,
        target_fingerprint=_digest(routing, routers),
    )


def carry_routing_spec(model: nn.Module, spec: RoutingSpec) -> None:
    """Attach its source's spec to a model built in memory (widened, ballasted, converted).

    The spec survives ``copy.deepcopy`` and dtype casts, not saving: a saved model is described by its files.

    Args:
        model: The model.
        spec: Spec of the checkpoint it was made from.
    """
    setattr(model, _SPEC_ATTRIBUTE, spec)


def routing_spec_of_model(model: nn.Module, tokenizer: Any = None) -> RoutingSpec:
    """Spec of a loaded model: the one it carries, else that of the files it was loaded from, else its own state.

    The files come before the state because casting a router on load changes its values (see the top of this file).

    Args:
        model: A transformers model.
        tokenizer: Needed only for a model that neither carries a spec nor was loaded from files.

    Raises:
        ValueError: Not an MoE target of a supported kind, or a tokenizer is needed and was not given.
    """
    carried = getattr(model, _SPEC_ATTRIBUTE, None)
    if isinstance(carried, RoutingSpec):
        return carried
    config: Any = model.config
    name = getattr(config, "_name_or_path", "") or ""
    if name:
        try:
            return routing_spec_of(name)
        except FileNotFoundError:
            if tokenizer is None:
                raise
    if tokenizer is None:
        raise ValueError(
            "this model was built in memory; attach its source's spec (carry_routing_spec) or pass its tokenizer"
        )
    fingerprint = tokenizer_fingerprint(tokenizer)
    return _spec(config, model.state_dict(), fingerprint, name or type(model).__name__, type(model).__name__)
