"""The target of a collection as flags name it: a model loaded here, or an engine that runs it elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecospec.cli.collect_traces import CollectTracesConfig
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.trace_collection.engine_protocol import Engine


@dataclasses.dataclass(frozen=True)
class OpenedTarget:
    """A target that runs.

    Attributes:
        engine: What runs it.
        options: How it is run, as far as it shapes the rows; stored, and compared on resume.
        about: What else is known about it, for the provenance.
    """

    engine: Engine
    options: dict[str, Any]
    about: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PreparedTarget:
    """What planning needs to know about a target, before it is loaded.

    Attributes:
        spec: Its RoutingSpec.
        tokenizer: Its tokenizer.
        context: Tokens a sequence may have, or None.
        open: Loads it; a context manager.
    """

    spec: RoutingSpec
    tokenizer: Any
    context: int | None
    open: Callable[[], AbstractContextManager[OpenedTarget]]


def prepare_target(config: CollectTracesConfig) -> PreparedTarget:
    """Read the target's files, and reach the server where one runs it.

    Args:
        config: Options of ``collect-traces``.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ConnectionError: The server cannot be reached.
        ValueError: The checkpoint or the server cannot be used; the message says why.
    """
    return _hooked(config) if config.engine == "hooks" else _serving(config)


def _hooked(config: CollectTracesConfig) -> PreparedTarget:
    """A transformers model in this process, recorded by hooks."""
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415
    from ecospec.trace_collection.collect import context_of_config, open_engine  # noqa: PLC0415

    assert config.target is not None  # EngineChoice requires it
    spec = routing_spec_of(config.target)
    tokenizer = AutoTokenizer.from_pretrained(config.target)

    @contextlib.contextmanager
    def opened() -> Iterator[OpenedTarget]:
        model = _load_model(config)
        options = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "experts_implementation": config.experts_implementation,
        }
        with open_engine(model, tokenizer, config, spec=spec) as engine:
            yield OpenedTarget(engine, options, {})

    return PreparedTarget(spec, tokenizer, context_of_config(AutoConfig.from_pretrained(config.target)), opened)


def _load_model(config: CollectTracesConfig) -> Any:
    """The target in eval mode on its device."""
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.cli.loading import load_target  # noqa: PLC0415

    assert config.target is not None  # EngineChoice requires it
    disable_progress_bar()  # ours shows the work
    dtype = "float32" if config.dtype == "auto" and config.device == "cpu" else config.dtype
    model = load_target(config.target, dtype, config.device)
    if config.experts_implementation is not None:
        model.set_experts_implementation(config.experts_implementation)
    return model


def _serving(config: CollectTracesConfig) -> PreparedTarget:
    """A target that vLLM or SGLang runs; a server is reached now, vLLM in this process loads when opened."""
    choice = config.engine_choice()
    files = choice.files()

    def start() -> Any:
        return choice.open(files, temperature=config.temperature, dtype=config.dtype)

    reached = None if choice.server is None else start()
    context = config.engine_options.get("max_model_len") if reached is None else reached.context

    @contextlib.contextmanager
    def opened() -> Iterator[OpenedTarget]:
        engine = reached or start()
        dtype = engine.description.get("dtype", "chosen by the server")
        yield OpenedTarget(engine, {"engine": config.engine, "dtype": dtype}, {"engine": engine.description})

    room = files.room(reading=config.mode != "generate", server_context=context)
    return PreparedTarget(files.layout.spec, files.tokenizer, room, opened)
