"""What the EAGLE-3 head learns from: text and the target's own continuations, with the target's states cached.

The scratch folder holds::

    tokens.npy      int32 [S, T]           sequences: windows of training text, then prompts continued by the target
    aux.npy         float16 [S, T, A * H]  outputs of the auxiliary layers, side by side
    final.npy       float16 [S, T, H]      the target's last hidden state, after its final norm
    greedy.npy      int32 [S, T]           the token the target finds most probable next
    progress.json   {"done": rows of the three arrays above that are filled}
    seconds.json    wall clock spent so far, of stretches that came to an end

The target's forward costs several times the head's, so it is paid once and the head is trained over several epochs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DataConfig:
    """Numbers of the head's training data; the defaults are those of the committed head.

    Attributes:
        length: Tokens per sequence, T.
        text_windows: Windows of training text, at random places of the joined documents.
        continued: Prompts continued by the target up to `length`.
        prompt_lengths: Tokens per prompt, used in equal parts.
        opening_share: Share of prompts that are the beginning of a document; the others are windows.
        sampled_share: Share of prompts continued by sampling; the others greedily.
        temperature: Of sampling.
        batch: Sequences per forward of the target.
    """

    length: int = 192
    text_windows: int = 5500
    continued: int = 5500
    prompt_lengths: tuple[int, ...] = (64, 96, 128)
    opening_share: float = 0.4
    sampled_share: float = 0.3
    temperature: float = 0.8
    batch: int = 100


def random_windows(texts: Sequence[NDArray[np.int32]], length: int, count: int, seed: int) -> NDArray[np.int32]:
    """Return `count` windows [count, length] of the joined documents, each at a random place."""
    stream = np.concatenate(texts)
    starts = np.random.default_rng(seed).integers(0, len(stream) - length, size=count)
    windows: NDArray[np.int32] = stream[starts[:, None] + np.arange(length)]
    return windows


def prompts_of(
    texts: Sequence[NDArray[np.int32]], length: int, count: int, config: DataConfig, seed: int
) -> NDArray[np.int32]:
    """Return `count` prompts [count, length]: beginnings of documents and random windows."""
    openings = [text[:length] for text in texts if len(text) >= length]
    wanted = min(int(count * config.opening_share), len(openings))
    chosen = np.random.default_rng([seed, 1]).permutation(len(openings))[:wanted]
    windows = random_windows(texts, length, count - wanted, seed)
    return np.concatenate([np.stack([openings[index] for index in chosen]), windows]) if wanted else windows


@contextmanager
def observed_layers(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of decoder layers during forwards: layer number to ``[B, T, H]`` of the last forward."""
    outputs: dict[int, Tensor] = {}

    def hook(index: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return keep

    handles = [model.model.layers[index].register_forward_hook(hook(index)) for index in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def continue_prompts(
    model: Any, prompts: Tensor, new_tokens: int, *, temperature: Tensor | None = None, seed: int = 0
) -> Tensor:
    """Let the target continue prompts of one length; end-of-text does not stop a row.

    Args:
        model: ``Qwen3MoeForCausalLM`` in evaluation mode.
        prompts: int64 ``[B, P]``.
        new_tokens: Tokens to add, at least 1.
        temperature: float ``[B]``, 0 for greedy rows; default: all greedy.
        seed: Of the sampled rows.

    Returns:
        int64 ``[B, P + new_tokens]``.
    """
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    cache = DynamicCache()
    ids, step = prompts, prompts
    for _ in range(new_tokens):
        logits = model(step, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if temperature is not None and bool((temperature > 0).any()):
            uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(min=1e-20)
            logits = logits - temperature[:, None] * (-uniform.log()).log()  # Gumbel noise
        step = logits.argmax(-1, keepdim=True)
        ids = torch.cat((ids, step), dim=1)
    return ids


def continued_prompts(
    model: Any, texts: Sequence[NDArray[np.int32]], config: DataConfig, seed: int, progress: Progress
) -> NDArray[np.int32]:
    """Return prompts of several lengths continued to ``config.length``, int32 ``[config.continued, length]``."""
    rows: list[NDArray[np.int32]] = []
    kinds = len(config.prompt_lengths)
    done = 0
    for kind, prompt_length in enumerate(config.prompt_lengths):
        count = config.continued // kinds + (kind < config.continued % kinds)
        prompts = torch.from_numpy(prompts_of(texts, prompt_length, count, config, seed + kind).astype(np.int64))
        sampled = np.random.default_rng([seed, 2, kind]).random(count) < config.sampled_share
        temperature = torch.from_numpy(sampled.astype(np.float32)) * config.temperature
        parts = zip(torch.split(prompts, config.batch), torch.split(temperature, config.batch), strict=True)
        for number, (part, warmth) in enumerate(parts):
            new_tokens = config.length - prompt_length
            part_seed = seed + 1000 * kind + number
            full = continue_prompts(model, part, new_tokens, temperature=warmth, seed=part_seed)
            rows.append(full.numpy().astype(np.int32))
            done += len(part)
            progress("continuing prompts", done, config.continued)
    return np.concatenate(rows)


class FeatureCache:
    """The target's states of fixed sequences, in the arrays drawn at the top of this file.

    Args:
        folder: Where the arrays are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens: NDArray[np.int32] = np.load(folder / "tokens.npy", mmap_mode="r")
        self.aux: NDArray[np.float16] = np.load(folder / "aux.npy", mmap_mode="r")
        self.final: NDArray[np.float16] = np.load(folder / "final.npy", mmap_mode="r")
        self.greedy: NDArray[np.int32] = np.load(folder / "greedy.npy", mmap_mode="r")
        self.seconds = _seconds_of(folder)

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return a batch of sequences: ``tokens`` and ``greedy`` int64, ``aux`` and ``final`` float32."""
        return {
            "tokens": torch.from_numpy(self.tokens[index].astype(np.int64)),
            "aux": torch.from_numpy(self.aux[index].astype(np.float32)),
            "final": torch.from_numpy(self.final[index].astype(np.float32)),
            "greedy": torch.from_numpy(self.greedy[index].astype(np.int64)),
        }


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write an array under a temporary name, then rename it."""
    temporary = path.with_name(path.name + ".tmp.npy")
    np.save(temporary, array)
    temporary.replace(path)


@torch.inference_mode()
def build_cache(
    model: Any,
    tokens: NDArray[np.int32],
    layers: Sequence[int],
    folder: Path,
    progress: Progress,
    *,
    batch: int = 16,
) -> FeatureCache:
    """Run the target over all sequences, continuing after the rows that an interrupted run has done.

    Args:
        model: ``Qwen3MoeForCausalLM`` in evaluation mode.
        tokens: int32 ``[S, T]``; ignored where the folder already has its own.
        layers: Auxiliary layers, outputs.
        folder: Scratch folder of this cache.
        progress: Told the rows done.
        batch: Sequences per forward.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokens.npy").is_file():
        save_array(folder / "tokens.npy", tokens)
    tokens = np.load(folder / "tokens.npy")
    count, length = tokens.shape
    width = model.config.hidden_size
    shapes: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
        "aux": (np.float16, (count, length, width * len(layers))),
        "final": (np.float16, (count, length, width)),
        "greedy": (np.int32, (count, length)),
    }
    done, start_time = _progress_of(folder), time.perf_counter()
    arrays = {
        name: np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="r+" if done else "w+", dtype=kind, shape=shape
        )
        for name, (kind, shape) in shapes.items()
    }
    with observed_layers(model, layers) as outputs:
        for start in range(done, count, batch):
            ids = torch.from_numpy(tokens[start : start + batch].astype(np.int64))
            final = model.model(ids, use_cache=False).last_hidden_state
            part = slice(start, start + len(ids))
            arrays["aux"][part] = torch.cat([outputs[index] for index in layers], dim=-1).numpy()
            arrays["final"][part] = final.numpy()
            arrays["greedy"][part] = model.lm_head(final).argmax(-1).numpy()
            if start // batch % 20 == 19 or part.stop == count:
                _save_progress(folder, arrays, part.stop)
                progress("target states", part.stop, count)
    if done < count:
        add_seconds(folder, time.perf_counter() - start_time)
    sample = arrays["aux"][:: max(1, count // 100)]
    if not np.isfinite(sample).all():
        raise ValueError(f"{folder}: the target's hidden states do not fit float16; this recipe cannot cache them")
    return FeatureCache(folder)


def _seconds_of(folder: Path) -> float:
    path = folder / "seconds.json"
    return float(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else 0.0


def add_seconds(folder: Path, seconds: float) -> None:
    """Add to the wall clock recorded for a cache."""
    (folder / "seconds.json").write_text(json.dumps(_seconds_of(folder) + seconds), encoding="utf-8")


def _progress_of(folder: Path) -> int:
    path = folder / "progress.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["done"]) if path.is_file() else 0


def _save_progress(folder: Path, arrays: dict[str, Any], done: int) -> None:
    for array in arrays.values():
        array.flush()
    temporary = folder / "progress.json.tmp"
    with temporary.open("w", encoding="utf-8") as handle:
        json.dump({"done": done}, handle)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(folder / "progress.json")


def draft_vocabulary(tokens: NDArray[np.int32], vocab_size: int, size: int) -> NDArray[np.int64]:
    """Return the `size` most frequent tokens, ascending; equal counts go to the lower id.

    Args:
        tokens: Token ids of any shape.
        vocab_size: V.
        size: Number of tokens wanted, at most V.
    """
    counts = np.bincount(tokens.reshape(-1), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size])
