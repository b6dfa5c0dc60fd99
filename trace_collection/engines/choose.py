"""Which engine a command asks for, and opening it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from ecospec.trace_collection.engine_protocol import Engine
from ecospec.trace_collection.engines.json_client import JsonClient

if TYPE_CHECKING:
    from ecospec.trace_collection.engines.target_files import TargetFiles

EngineName = Literal["hooks", "vllm", "sglang"]
#: Seconds to wait for one answer of a server, by default.
SERVER_TIMEOUT = 600.0
ENGINES: tuple[EngineName, ...] = get_args(EngineName)


class ServingEngine(Engine, Protocol):
    """An engine that runs the target elsewhere.

    Attributes:
        context: Positions it was started with; None where it does not say.
        description: What is known about it, for the provenance of a store.
    """

    context: int | None
    description: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine as flags name it.

    Attributes:
        engine: ``hooks`` (transformers in this process), ``vllm`` or ``sglang``.
        target: Folder or hub id to load; with a server, the name it offers the target under, or None.
        target_path: Folder (or hub id) with the target's files; None: ``target``.
        server: Address of a running server, or None.
        server_timeout: Seconds to wait for one answer of it.
        options: Further arguments of ``vllm.LLM``.
        weights: Whether router weights are asked for.

    Raises:
        ValueError: The flags do not fit together; the message names them.
    """

    engine: EngineName = "hooks"
    target: Path | None = None
    target_path: Path | None = None
    server: str | None = None
    server_timeout: float = SERVER_TIMEOUT
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: bool = False

    def __post_init__(self) -> None:
        """Validate the flags; nothing is opened."""
        if self.engine not in ENGINES:
            raise ValueError(f"--engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.server is None and self.server_timeout != SERVER_TIMEOUT:
            raise ValueError("--server-timeout needs --server; nothing else is waited for")
        if self.engine == "hooks":
            self._check_hooks()
            return
        if self.weights:
            raise ValueError(f"--weights needs --engine hooks: {self.engine} returns expert ids only")
        if self.server is None:
            self._check_offline()
            return
        if self.target_path is None:
            raise ValueError(
                "--server needs --target-path, a folder with the target's config, tokenizer and safetensors files: "
                "a server cannot tell the fingerprint of its routers"
            )
        if self.options:
            raise ValueError(
                "--engine-options are for vLLM in this process; give them to the server when starting it"
            )
        self._client()

    def _check_hooks(self) -> None:
        for name, value in (("server", self.server), ("target-path", self.target_path)):
            if value is not None:
                raise ValueError(f"--{name} needs --engine vllm or sglang; hooks run --target in this process")
        if self.options:
            raise ValueError("--engine-options needs --engine vllm")
        self._require_target()

    def _check_offline(self) -> None:
        if self.engine == "sglang":
            raise ValueError("--engine sglang asks a running server; give --server http://host:port")
        self._require_target()

    def _require_target(self) -> None:
        if self.target is None:
            raise ValueError("--target is missing; name the target's folder (or hub id)")

    def files(self) -> TargetFiles:
        """Read the target's files; see `TargetFiles.read`."""
        from ecospec.trace_collection.engines.target_files import TargetFiles  # noqa: PLC0415 - imports torch

        path = self.target_path or self.target
        assert path is not None  # checked above
        return TargetFiles.read(path)

    def open(self, files: TargetFiles, *, temperature: float, dtype: str = "auto") -> ServingEngine:
        """Open the engine, which for vLLM in this process loads the target.

        Args:
            files: The target's files.
            temperature: Sampling temperature, 0 for greedy.
            dtype: Arithmetic of vLLM in this process; a server has chosen its own.

        Raises:
            ConnectionError: The server cannot be reached.
            ValueError: It cannot be used; see the engines. Also for ``hooks``, which are opened by `collect`.
        """
        from ecospec.trace_collection.engines.sglang_server import SglangServer  # noqa: PLC0415 - only one is needed
        from ecospec.trace_collection.engines.vllm_offline import VllmOffline  # noqa: PLC0415
        from ecospec.trace_collection.engines.vllm_server import VllmServer  # noqa: PLC0415

        if self.engine == "hooks":
            raise ValueError("--engine hooks runs in `collect`, not through a serving engine")
        name = None if self.target is None else str(self.target)
        if self.server is None:
            assert name is not None  # checked above
            return VllmOffline(name, files, temperature=temperature, dtype=dtype, options=self.options)
        if self.engine == "vllm":
            return VllmServer(self._client(), files, temperature=temperature, model=name)
        return SglangServer(self._client(), files, temperature=temperature)

    def _client(self) -> JsonClient:
        assert self.server is not None  # checked above
        return JsonClient(self.server.rstrip("/"), timeout=self.server_timeout)
