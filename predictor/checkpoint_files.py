"""Reading single tensors from a checkpoint folder's safetensors files, without loading the model.

A checkpoint folder, as transformers writes it::

    config.json
    model.safetensors                                   # one file, or
    model.safetensors.index.json                        # {"weight_map": {tensor name: file name}}
    model-00001-of-00007.safetensors ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_EMBEDDING_NAME = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|word_embeddings|wte)\.weight$")


def resolve_checkpoint(path: str | Path) -> Path:
    """Folder of a checkpoint: the path itself, or the local hub cache's snapshot of a hub id.

    Raises:
        FileNotFoundError: Neither exists.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{path} is a file; give the checkpoint folder that holds config.json")
    if _HUB_ID.fullmatch(str(path)):
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only hub ids need it
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

        try:
            return Path(snapshot_download(str(path), local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            pass
    raise FileNotFoundError(
        f"checkpoint {path} does not exist; give a folder with config.json and safetensors files, "
        "or a hub id that has been downloaded"
    )


def tensor_files(folder: Path) -> dict[str, Path]:
    """Where every tensor of a checkpoint lies.

    Args:
        folder: Checkpoint folder.

    Returns:
        Tensor name to safetensors file.

    Raises:
        FileNotFoundError: No safetensors files, or a shard named in the index is missing.
        ValueError: An index or a file that cannot be read.
    """
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): folder / str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index_path}: not a safetensors index (no weight_map); download it again") from error
        if missing := sorted({str(file) for file in files.values() if not file.is_file()}):
            raise FileNotFoundError(f"{index_path} names {missing[0]}, which is missing; complete the download")
        return files
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} has no safetensors files; convert the checkpoint with save_pretrained of transformers"
        )
    found: dict[str, Path] = {}
    for file in paths:
        try:
            with safe_open(str(file), framework="pt") as handle:
                found.update(dict.fromkeys(handle.keys(), file))
        except SafetensorError as error:
            raise ValueError(f"{file}: not a readable safetensors file ({error}); download it again") from error
    return found


def read_tensors(files: dict[str, Path], names: Iterable[str]) -> dict[str, Tensor]:
    """Read some tensors, each file opened once.

    Args:
        files: As returned by `tensor_files`.
        names: Tensors to read.

    Returns:
        Name to tensor, on the CPU, in the stored type.

    Raises:
        ValueError: A file is unreadable or lacks a tensor that the index promises.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, wanted in sorted(by_file.items()):
        try:
            with safe_open(str(file), framework="pt") as handle:
                for name in wanted:
                    tensors[name] = handle.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}; download it again") from error
    return tensors


def read_matching(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whose name satisfies ``wanted``; see `tensor_files` for errors."""
    files = tensor_files(folder)
    return read_tensors(files, [name for name in files if wanted(name)])


def load_target_embedding(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Tensor:
    """The target's token embedding table, read from its files without loading the model.

    Args:
        path: Checkpoint folder, or a hub id in the local cache.
        device: Where to put it.
        dtype: Type to convert to; by default the stored one.

    Returns:
        ``[V, H]``.

    Raises:
        FileNotFoundError: No such checkpoint.
        ValueError: Not exactly one embedding table, or its width is not the config's ``hidden_size``.
    """
    folder = resolve_checkpoint(path)
    files = tensor_files(folder)
    names = [name for name in files if _EMBEDDING_NAME.search(name) and ".layers." not in name]
    if len(names) != 1:
        raise ValueError(
            f"{folder}: expected one token embedding (a tensor named *embed_tokens.weight), found {names}; "
            "pass the loaded model's get_input_embeddings() instead"
        )
    table = read_tensors(files, names)[names[0]]
    width = _hidden_size(folder / "config.json")
    if width is not None and table.ndim == 2 and table.shape[1] != width:
        raise ValueError(
            f"{folder}: {names[0]} is stored as {list(table.shape)}, config.json says hidden_size {width}; "
            "config.json and weights do not belong together, fetch the checkpoint again"
        )
    return table.to(device=device, dtype=dtype)


def _hidden_size(path: Path) -> int | None:
    """``hidden_size`` of a config, or of its ``text_config``; None where neither names one."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config") or {}
        found = text.get("hidden_size", config.get("hidden_size"))
    except (OSError, ValueError, AttributeError):
        return None  # whoever reads the config itself says what is wrong with it
    return found if isinstance(found, int) else None
