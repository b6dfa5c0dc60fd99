"""What a collection needs to know about a target that runs elsewhere, read from its files without its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ecospec.predictor.checkpoint_files import resolve_checkpoint
from ecospec.predictor.family_notes import text_config
from ecospec.predictor.fingerprint import routing_spec_of
from ecospec.trace_collection.collect import context_of, eos_ids_of
from ecospec.trace_collection.engines.rows import RowLayout


@dataclasses.dataclass(frozen=True, slots=True)
class TargetFiles:
    """A target according to its checkpoint folder.

    Attributes:
        path: Where it was read from, as given.
        layout: RoutingSpec and number of decoder layers.
        tokenizer: The transformers tokenizer.
        context: Positions the target was made for; None where its configuration names none.
        eos_ids: Tokens that end a generation.
    """

    path: Path
    layout: RowLayout
    tokenizer: Any
    context: int | None
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, path: Path) -> TargetFiles:
        """Read configuration, tokenizer and routers of a checkpoint.

        Args:
            path: Folder, or a hub id in the local cache.

        Raises:
            FileNotFoundError: No such checkpoint.
            ValueError: Not an MoE target of a supported kind.
        """
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # noqa: PLC0415 - seconds to import

        spec = routing_spec_of(path)
        folder = str(resolve_checkpoint(path))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        try:
            generation: Any = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except OSError:  # a checkpoint need not have one
            generation = None
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model: Any = SimpleNamespace(config=config, generation_config=generation)
        return cls(
            path=path,
            layout=RowLayout(spec, int(text_config(config).num_hidden_layers)),
            tokenizer=tokenizer,
            context=context_of(model),
            eos_ids=frozenset(eos_ids_of(model, tokenizer)),
        )

    def room(self, *, reading: bool, server_context: int | None = None) -> int | None:
        """Tokens a sequence may have.

        Args:
            reading: Whether texts are read: each takes one sampled token more than it has (see `replies`).
            server_context: Positions the server was started with, where it says so.

        Returns:
            The smaller of the target's and the server's context, less one when reading; None: unlimited.
        """
        known = [length for length in (self.context, server_context) if length is not None]
        return min(known) - reading if known else None
