"""The EAGLE-3 draft head, in SpecForge's tensor layout.

A head's folder holds::

    config.json          # eagle3_config.py draws it
    model.safetensors    # fc.weight [H, A * H_target], midlayer.*, norm.weight, lm_head.weight [V_draft, H],
                         # d2t int64 [V_draft], t2d bool [V], optionally embed_tokens.weight [V, H]
    README.md            # model card

Semantics: the input at position t is the pair (embedding of token t + 1, feature of position t) and the output is a
distribution over token t + 2. The feature of a position that the target has processed is ``fc`` of its auxiliary
hidden states; the feature of a drafted position is the head's own hidden state before the final norm. ``d2t`` is an
offset: draft id i is target token ``i + d2t[i]``; ``t2d`` marks the target tokens that have a draft id.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ecospec.decoding.drafters.eagle3_config import Eagle3Config
from ecospec.decoding.drafters.eagle3_layers import Eagle3Layer, RotaryTable
from ecospec.decoding.drafters.eagle3_layouts import layout_of

EMBEDDING = "embed_tokens.weight"


class Eagle3Head(nn.Module):
    """One decoder layer that predicts the token after next from the target's hidden states.

    Shapes: B batch, T positions, A auxiliary layers, H hidden size, Vd draft vocabulary.

    Args:
        config: Shape of the head.
        target_embedding: The target's embedding module, used by reference and never stored; None: an embedding of
            its own (``embed_tokens``), which is stored.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, target_embedding: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.aux_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        t2d = torch.arange(config.vocab_size) < config.draft_vocab_size
        self.register_buffer("t2d", t2d)
        self.rotary = RotaryTable(config)
        if target_embedding is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self._shared: tuple[nn.Module, ...] = (self.embed_tokens,)
        else:
            _require_embedding(target_embedding, config)
            self._shared = (target_embedding,)  # in a tuple, so that it does not become part of this module
        self._file: Path | None = None  # what `from_pretrained` read

    @property
    def shares_embedding(self) -> bool:
        """Whether the embedding is the target's, so that it is neither trained nor stored here."""
        return not hasattr(self, "embed_tokens")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    @functools.cached_property
    def state_fingerprint(self) -> str:
        """SHA-256 hex of what makes the hidden states: ``fc``, the decoder layer, and an embedding of its own.

        Of the values as stored, so that loading in another dtype changes nothing. What only proposes tokens
        (``norm``, ``lm_head``, the draft vocabulary) does not count. Read once, when first asked for.
        """
        stored = self.state_dict() if self._file is None else _stored_tensors(self._file)
        config = self.config
        shape = [config.aux_layers, config.rms_norm_eps, config.rope_theta, dict(config.rope_scaling or {})]
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
        for name in sorted(stored):
            if name.startswith(("fc.", "midlayer.", EMBEDDING)):
                values = stored[name].detach().to(device="cpu", dtype=torch.float32).contiguous()
                digest.update(f"{name} {list(values.shape)}".encode())
                digest.update(values.numpy().astype("<f4", copy=False).data)
        return digest.hexdigest()

    def set_draft_vocabulary(self, target_ids: Tensor) -> None:
        """Choose the tokens the head can propose.

        Args:
            target_ids: int64 ``[Vd]``, ascending and distinct target token ids.

        Raises:
            ValueError: Wrong number of ids, or ids not ascending or outside the vocabulary.
        """
        config = self.config
        ids = target_ids.to(device=self.d2t.device, dtype=torch.int64)
        if ids.shape != (config.draft_vocab_size,):
            raise ValueError(
                f"draft vocabulary has shape {list(ids.shape)}, draft_vocab_size is {config.draft_vocab_size}"
            )
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
            raise ValueError(f"draft vocabulary must be ascending, distinct ids from 0 to {config.vocab_size - 1}")
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def draft_vocabulary(self) -> Tensor:
        """Target token of every draft id, int64 ``[Vd]``."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed target tokens ``[...]`` (int64) as ``[..., H]`` in the head's type and place."""
        embeddings: Tensor = self._shared[0](ids)
        return embeddings.to(device=self.device, dtype=self.dtype)

    def features(self, aux_hidden: Tensor) -> Tensor:
        """Project auxiliary hidden states ``[..., A * H_target]`` to features ``[..., H]``."""
        projected: Tensor = self.fc(aux_hidden.to(device=self.device, dtype=self.dtype))
        return projected

    def logits(self, hidden: Tensor) -> Tensor:
        """Return draft-vocabulary logits ``[..., Vd]`` of the head's hidden states ``[..., H]``."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def unroll(self, ids: Tensor, aux_hidden: Tensor, steps: int = 3) -> list[Tensor]:
        """Draft-vocabulary logits of `unroll_hidden`: one ``[B, T - steps, Vd]`` per step; arguments as there."""
        return [self.logits(hidden) for hidden in self.unroll_hidden(ids, aux_hidden, steps)]

    def unroll_hidden(self, ids: Tensor, aux_hidden: Tensor, steps: int = 3) -> list[Tensor]:
        """Training-time test: feed the head its own hidden states, as in drafting, at every position at once.

        Step k of base t reads token t + 1 + k, sits at position t + k and predicts token t + 2 + k, so its target
        is the target model's distribution at position t + 1 + k.

        Args:
            ids: int64 ``[B, T]``, T greater than `steps`.
            aux_hidden: floating ``[B, T, A * H_target]``.
            steps: Number of draft forwards, at least 1.

        Returns:
            One ``[B, T - steps, H]`` of hidden states per step; memory grows with T squared.

        Raises:
            ValueError: The sequences are not longer than `steps`.
        """
        bases = ids.shape[1] - steps
        if bases < 1 or steps < 1:
            raise ValueError(
                f"unrolling {steps} steps needs steps >= 1 and more than that many tokens, got {ids.shape[1]}"
            )
        layer, attention = self.midlayer, self.midlayer.self_attn
        features = self.features(aux_hidden[:, :bases])
        embeddings = self.embed(ids)
        positions = torch.arange(bases + steps, device=self.device)
        cosine, sine = self.rotary(positions, features.dtype)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        hidden: list[Tensor] = []
        for step in range(steps):
            x = layer.attention_input(embeddings[:, step + 1 : step + 1 + bases], features)
            q, k, v = attention.project(x, cosine[step : step + bases], sine[step : step + bases])
            keys.append(k)
            values.append(v)
            features = layer.finish(features, attention.attend_unrolled(q, keys, values))
            hidden.append(features)
        return hidden

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write ``config.json`` and ``model.safetensors``.

        Args:
            path: Folder, made if needed.
            dtype: Storage type of the floating tensors.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
            for name, tensor in self.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors.tmp", metadata={"format": "pt"})
        (folder / "model.safetensors.tmp").replace(folder / "model.safetensors")
        text = json.dumps(self.config.to_dict(str(dtype).removeprefix("torch.")), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        target_embedding: nn.Module | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Eagle3Head:
        """Load a head, ready for inference.

        Args:
            path: Folder with ``config.json`` and ``model.safetensors``.
            target_embedding: The target's embedding (``model.get_input_embeddings()``), used where the file has
                none.
            device: Where to put the head; default: CPU.
            dtype: Type of the weights; default: as stored.

        Raises:
            FileNotFoundError: The folder or one of its files does not exist.
            ValueError: A file is damaged, of an unknown layout, made for another vocabulary or hidden size, or has
                missing, unexpected or wrongly shaped tensors; the message is one line.
        """
        folder = Path(path)
        raw = _read_config(folder)
        source = f"drafter {folder}"
        layout = layout_of(raw, source)
        config = layout.read_config(raw, str(folder / "config.json"))
        tensors = layout.rename(_read_tensors(folder / "model.safetensors"))
        has_own = EMBEDDING in tensors
        if not has_own and target_embedding is None:
            raise ValueError(f"{source} stores no embedding; pass the target's (model.get_input_embeddings())")
        if target_embedding is not None:
            _require_vocabulary(target_embedding, config, source)
        head = cls(config, None if has_own else target_embedding)
        _check_tensors(head.state_dict(), tensors, source)
        _check_draft_vocabulary(tensors["d2t"], tensors["t2d"], source)
        head.to(
            device=device, dtype=dtype or tensors["fc.weight"].dtype
        )  # before loading: float64 must not pass float32
        head.load_state_dict(tensors)
        head._file = folder / "model.safetensors"
        return head.eval().requires_grad_(requires_grad=False)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"drafter {folder} does not exist; give a folder with config.json and model.safetensors"
        )
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"drafter {folder} has no {name}; give a folder with config.json and model.safetensors"
            )
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder / 'config.json'}: not a JSON file ({error}); download or export it again"
        ) from error
    if not isinstance(raw, dict):
        raise ValueError(f"{folder / 'config.json'}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises a type of its own that derives from Exception only
        if isinstance(error, OSError):
            raise
        raise ValueError(f"{path}: not a safetensors file ({error}); download or export it again") from error


def _stored_tensors(path: Path) -> Mapping[str, Tensor]:
    """Tensors of a head's file under our names."""
    layout = layout_of(_read_config(path.parent), f"drafter {path.parent}")
    return layout.rename(_read_tensors(path))


def _require_embedding(embedding: nn.Module, config: Eagle3Config) -> None:
    _require_vocabulary(embedding, config, "drafter")
    width = _weight_of(embedding).shape[1]
    if width != config.hidden_size:
        raise ValueError(
            f"drafter reads an embedding of width {config.hidden_size}, the target's has {width}; "
            "use the drafter that belongs to the target"
        )


def _require_vocabulary(embedding: nn.Module, config: Eagle3Config, source: str) -> None:
    rows = _weight_of(embedding).shape[0]
    if rows != config.vocab_size:
        raise ValueError(
            f"{source} was made for a target of vocabulary {config.vocab_size}, this target has {rows}; "
            "use the drafter that belongs to the target"
        )


def _weight_of(embedding: nn.Module) -> Tensor:
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    return weight


def _check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    if missing := sorted(set(expected) - set(found)):
        raise ValueError(
            f"{source}: tensor {missing[0]} is missing ({len(missing)} in all); it is no complete EAGLE-3 head"
        )
    if extra := sorted(set(found) - set(expected)):
        raise ValueError(
            f"{source}: unexpected tensor {extra[0]} ({len(extra)} in all); allowed: {', '.join(sorted(expected))}"
        )
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise ValueError(
                f"{source}: tensor {name} has shape {list(found[name].shape)}, "
                f"config.json asks for {list(tensor.shape)}"
            )
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
        if found[name].dtype != dtype:
            raise ValueError(f"{source}: tensor {name} is {found[name].dtype}, allowed: {dtype}")


def _check_draft_vocabulary(d2t: Tensor, t2d: Tensor, source: str) -> None:
    ids = d2t + torch.arange(len(d2t))
    listed = t2d.nonzero().flatten()
    if not torch.equal(ids, listed):
        raise ValueError(
            f"{source}: d2t (offsets: target id = i + d2t[i]) and t2d name different tokens; "
            "the file is damaged or of another layout"
        )
