"""Predictor bundles, on disk.

The tree::

    <bundle>/
        config.json          # PredictorConfig
        model.safetensors    # the predictor's tensors; target_embedding.weight only when asked for
        README.md            # model card, generated from the config

A bundle is written to a hidden folder beside its destination, fsynced, and renamed into place, so a destination
never holds half a bundle. When one is replaced, the old one steps aside under a hidden name first: killed between
these two renames, the destination is absent and both bundles lie whole beside it.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict

import torch
from huggingface_hub import ModelHubMixin
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ecospec.predictor.model_card import model_card
from ecospec.predictor.predictor_config import CONFIG_NAME, PredictorConfig
from ecospec.predictor.routing_spec import RoutingSpec
from ecospec.predictor.session import PredictorSession

WEIGHTS_NAME = "model.safetensors"
CARD_NAME = "README.md"
BUNDLE_FILES = (CONFIG_NAME, WEIGHTS_NAME, CARD_NAME)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class LoadOptions(TypedDict, total=False):
    """Options of `PredictorBundle.from_pretrained`, which says what they mean."""

    target_embedding: nn.Module | Tensor | None
    require_spec: RoutingSpec | None
    device: torch.device | str
    dtype: torch.dtype | None
    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


#: Those that say how a hub id is downloaded.
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


@dataclasses.dataclass(frozen=True)
class StoredBundle:
    """What the files of a bundle hold.

    Attributes:
        config: Its config.
        tensors: Its tensors.
        source: File of the tensors, named in messages.
    """

    config: PredictorConfig
    tensors: Mapping[str, Tensor]
    source: str = WEIGHTS_NAME


class PredictorBundle(nn.Module, ModelHubMixin, abc.ABC, library_name="ecospec", tags=["ecospec"]):
    """A predictor that can be saved, loaded and pushed; base of all kinds.

    Args:
        config: Its config.

    Raises:
        ValueError: The config is of another kind.
    """

    kind: ClassVar[str]
    #: Whether ``prefill`` and ``commit`` must be given the experts the target used.
    needs_experts: ClassVar[bool] = False
    #: Whether scores only order the K best experts of a layer: no probabilities, nothing beyond rank K.
    ranks_only: ClassVar[bool] = False
    #: Whether it has weights that may be stored in another floating-point type.
    has_network: ClassVar[bool] = False

    temperature: Tensor

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        if config.kind != self.kind:
            raise ValueError(f"{type(self).__name__} needs a config of kind {self.kind!r}, got {config.kind!r}")
        self.config = config
        self.register_buffer("temperature", torch.tensor(config.temperature).view(-1, 1), persistent=False)

    @property
    def spec(self) -> RoutingSpec:
        """The target this predictor was made for."""
        return self.config.spec

    @property
    def device(self) -> torch.device:
        """Where the predictor computes."""
        return self.temperature.device

    @abc.abstractmethod
    def session(self) -> PredictorSession:
        """Open a session for one sequence."""

    @abc.abstractmethod
    def score_sequence(self, ids: Tensor, experts: Tensor | None = None) -> Tensor:
        """Scores of every token of one sequence, for offline reports.

        Args:
            ids: int64 ``[T]`` target token ids.
            experts: int64 ``[T, L, K]`` true experts; only predictors with ``needs_experts`` look at them, row t
                at the experts of tokens before t.

        Returns:
            float32 ``[T, L, E]`` calibrated logits; row t uses tokens up to and including t.
        """

    def calibrated(self, scores: Tensor) -> Tensor:
        """Divide ``[..., L, E]`` logits by the temperature of their layer, in float32 at least."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return scores / self.temperature.to(scores.dtype)

    def bundle_tensors(self, *, store_embedding: bool = False) -> dict[str, Tensor]:
        """Tensors of ``model.safetensors``."""
        if store_embedding:
            raise ValueError(f"a predictor of kind {self.kind!r} has no target embedding to store")
        return {name: value.detach() for name, value in self.state_dict().items()}

    @classmethod
    @abc.abstractmethod
    def from_stored(
        cls, stored: StoredBundle, embedding: nn.Module | Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Rebuild the predictor from what `bundle_tensors` gave.

        Args:
            stored: Config and tensors.
            embedding: The target's; for predictors that read it.
            dtype: Parameter type of a network; by default the stored one.
        """

    def save_pretrained(  # type: ignore[override]  # explicit options instead of the mixin's keyword bag
        self,
        save_directory: str | Path,
        *,
        overwrite: bool = False,
        store_embedding: bool = False,
        dtype: torch.dtype | None = None,
        config: None = None,
        model_card_kwargs: None = None,
    ) -> None:
        """Write the bundle, whole or not at all.

        Args:
            save_directory: Destination; its parents are created.
            overwrite: Replace a bundle that is already there.
            store_embedding: Also store the target's embedding, so that the bundle works without the target.
            dtype: Type of the floating-point weights of a predictor with a network; by default as they are.
            config: Not used; `push_to_hub` of the mixin passes it.
            model_card_kwargs: Not used; as ``config``.

        Raises:
            FileExistsError: The destination is not empty, or not a bundle.
            ValueError: ``store_embedding`` without an embedding.
        """
        del config, model_card_kwargs
        tensors = self.bundle_tensors(store_embedding=store_embedding)
        if dtype is not None and self.has_network:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        written = self._stored_config(store_embedding=store_embedding)
        write_bundle(Path(save_directory), written, tensors, overwrite=overwrite)

    def _stored_config(self, *, store_embedding: bool) -> PredictorConfig:
        """The config as written."""
        del store_embedding
        return self.config

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        target_embedding: nn.Module | Tensor | None = None,
        require_spec: RoutingSpec | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        **hub_options: Any,
    ) -> Self:
        """Load a bundle.

        Args:
            pretrained_model_name_or_path: Folder, or hub id.
            target_embedding: The target's embedding module, or its table ``[V, H]``, shared by reference; for
                predictors that read it.
            require_spec: Spec of the target it will serve.
            device: Where to compute.
            dtype: Parameter type of a network; by default the stored one.
            hub_options: ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``force_download``.

        Raises:
            FileNotFoundError: No bundle there.
            ValueError: Not a valid bundle, another kind, or made for another target than ``require_spec``.
        """
        folder = bundle_folder(pretrained_model_name_or_path, **hub_options)
        config = PredictorConfig.read(folder)
        if config.kind != cls.kind:
            raise ValueError(
                f"{folder} holds a predictor of kind {config.kind!r}, not {cls.kind!r}; open it with load_predictor"
            )
        if require_spec is not None:
            require_spec.require_same(
                config.spec,
                mine=f"target {require_spec.target_id}",
                theirs=f"predictor {pretrained_model_name_or_path}",
            )
        path = folder / WEIGHTS_NAME
        stored = StoredBundle(config, read_weights(path), str(path))
        predictor = cls.from_stored(stored, target_embedding, dtype).to(device)
        return predictor.eval().requires_grad_(requires_grad=False)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a bundle's tensors onto the CPU.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is not a safetensors file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; export the predictor again")
    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a readable safetensors file ({error}); export the predictor again"
        ) from error


def require_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse missing, unknown and misshapen tensors.

    Args:
        tensors: What was read.
        shapes: Expected shapes; -1 accepts any size.
        source: File named in messages.

    Raises:
        ValueError: Something differs; the message names the file and the tensor.
    """
    if missing := sorted(set(shapes) - set(tensors)):
        raise ValueError(f"{source}: tensor {missing[0]!r} is missing; export the predictor again")
    if unknown := sorted(set(tensors) - set(shapes)):
        raise ValueError(f"{source}: unknown tensor {unknown[0]!r}; export the predictor again")
    for name, expected in shapes.items():
        found = tuple(tensors[name].shape)
        if len(found) != len(expected) or any(e not in {-1, f} for e, f in zip(expected, found, strict=True)):
            raise ValueError(f"{source}: tensor {name!r} is {found}, config.json says {expected}; export it again")


def bundle_folder(path: str | Path, **hub_options: Any) -> Path:
    """Folder of a bundle, downloaded first when ``path`` is a hub id.

    Raises:
        FileNotFoundError: Neither a folder nor a downloadable hub id.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    # "runs/predictor" also reads like a hub id: where "runs" is a folder, it is a wrong path.
    if folder.exists() or not _HUB_ID.fullmatch(str(path)) or folder.parent.is_dir():
        raise FileNotFoundError(f"predictor {path} does not exist; give an exported bundle folder or a hub id")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only hub ids need it

    try:
        return Path(snapshot_download(str(path), allow_patterns=list(BUNDLE_FILES), **hub_options))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"predictor {path} is no folder and cannot be read from the hub ({reason}); "
            "give an exported bundle folder or a hub id"
        ) from error


def write_bundle(
    folder: Path, config: PredictorConfig, tensors: Mapping[str, Tensor], *, overwrite: bool = False
) -> None:
    """Write a bundle atomically.

    Args:
        folder: Destination.
        config: Its config.
        tensors: Its tensors.
        overwrite: Replace a bundle that is already there.

    Raises:
        FileExistsError: The destination is not empty, or holds more than a bundle.
    """
    _require_free(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        staging.chmod(0o755)
        (staging / CONFIG_NAME).write_text(config.to_json(), encoding="utf-8")
        (staging / CARD_NAME).write_text(model_card(config), encoding="utf-8")
        contiguous = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        save_file(contiguous, str(staging / WEIGHTS_NAME), metadata={"format": "pt"})
        (staging / WEIGHTS_NAME).chmod(0o644)  # safetensors makes it the owner's alone
        for name in BUNDLE_FILES:
            _fsync(staging / name)
        _fsync(staging)
        _swap(staging, folder)
        _fsync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require_free(folder: Path, *, overwrite: bool) -> None:
    """Refuse to touch what is no bundle, and a bundle unless told."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give another folder for the predictor")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if names and not overwrite:
        raise FileExistsError(f"{folder} is not empty; give another folder or allow overwriting")
    if foreign := [name for name in names if name not in BUNDLE_FILES]:
        raise FileExistsError(f"{folder} holds {foreign[0]}, which is no part of a bundle; give another folder")


def _swap(staging: Path, folder: Path) -> None:
    """Rename the staged folder into place; a folder cannot replace a full one, so that one steps aside first."""
    if not folder.exists() or not any(folder.iterdir()):
        staging.replace(folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.replace(aside)
    try:
        staging.replace(folder)
    except OSError:
        aside.replace(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
