"""vLLM in this process: ``vllm.LLM(enable_return_routed_experts=True)``, for targets that need several GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ecospec.trace_collection.engines.replies import Reply, name_of, tokens_to_ask, trace_of_reply
from ecospec.trace_collection.engines.server import check_prompt_size
from ecospec.trace_collection.engines.target_files import TargetFiles
from ecospec.trace_collection.engines.vllm_server import PLAIN_SAMPLING
from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.records import RoutingTrace

# What this engine itself sets, or what makes its rows wrong.
_RESERVED = {
    "model": "name it with --target",
    "enable_return_routed_experts": "it is always on",
    "dtype": "use --dtype",
    "speculative_config": "collect without speculation",
    "pipeline_parallel_size": "vLLM returns no rows under pipeline parallelism; use tensor_parallel_size",
}


class VllmOffline:
    """Runs vLLM in this process.

    Args:
        model: Folder or hub id to load.
        target: The target's files.
        temperature: Sampling temperature, 0 for greedy.
        dtype: Arithmetic: ``auto`` (vLLM's choice), ``float32``, ``bfloat16``, ...
        options: Further arguments of ``vllm.LLM``, e.g. ``{"tensor_parallel_size": 8}``.

    Attributes:
        context: Positions vLLM was started with.
        description: What ran, for the provenance of a store.
        uses_host: False: vLLM's engine is a process of its own.

    Raises:
        ValueError: vLLM is not installed, cannot load the target, or an option is set by this engine.
    """

    uses_host = False

    def __init__(
        self,
        model: str,
        target: TargetFiles,
        *,
        temperature: float,
        dtype: str = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        options = dict(options or {})
        for name, advice in _RESERVED.items():
            if name in options:
                raise ValueError(f"--engine-options may not hold {name}: {advice}")
        self._vllm = _import_vllm()
        self._target = target
        self._temperature = temperature
        try:
            self._llm = self._vllm.LLM(model=model, dtype=dtype, enable_return_routed_experts=True, **options)
        except (RuntimeError, TypeError) as error:  # its engine process died, or an unknown option
            raise ValueError(
                f"vLLM cannot load {model}: {str(error).strip().splitlines()[0]} (its log above says more)"
            ) from error
        served: Any = self._llm.llm_engine.vllm_config.model_config
        self.context: int | None = served.max_model_len
        self.description: dict[str, Any] = {
            "engine": "vllm",
            "version": self._vllm.__version__,
            "model": model,
            "dtype": str(served.dtype).removeprefix("torch."),
        }

    def process(self, batch: Sequence[PlannedSequence]) -> list[RoutingTrace]:
        """Run one batch; see `Engine.process`.

        Raises:
            ValueError: vLLM gave up, or its rows are wrong.
        """
        prompts = [{"prompt_token_ids": sequence.ids.tolist()} for sequence in batch]
        sampling = [self._sampling(sequence) for sequence in batch]
        try:
            outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        except Exception as error:
            # vLLM's own class, which may not be importable; every other error keeps its traceback.
            if "BlockObjectStore" not in f"{type(error).__name__}: {error}":
                raise
            raise ValueError(
                f"vLLM evicted expert rows before they were read ({error}); lower --batch-size, then --resume"
            ) from error
        return [self._trace(sequence, output) for sequence, output in zip(batch, outputs, strict=True)]

    def _trace(self, sequence: PlannedSequence, output: Any) -> RoutingTrace:
        choice = output.outputs[0]
        check_prompt_size(sequence, len(output.prompt_token_ids))
        if choice.routed_experts is None:
            raise ValueError(f"{name_of(sequence)}: vLLM {self._vllm.__version__} returned no experts; use >= 0.30")
        stopped_at = choice.stop_reason
        reply = Reply(
            tokens=list(choice.token_ids),
            rows=choice.routed_experts,
            finish=str(choice.finish_reason),
            stopped_at=stopped_at if isinstance(stopped_at, int) else None,
        )
        return trace_of_reply(sequence, reply, self._target.layout, self._target.eos_ids)

    def _sampling(self, sequence: PlannedSequence) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=tokens_to_ask(sequence),
            temperature=self._temperature if sequence.max_new else 0.0,
            **PLAIN_SAMPLING,
            seed=sequence.seed,
            ignore_eos=True,  # the ends are the target's own, named next
            stop_token_ids=sorted(self._target.eos_ids),
            watermarking=False,
            detokenize=False,
        )


def _import_vllm() -> Any:
    try:
        import vllm  # noqa: PLC0415 - an optional package of several gigabytes
    except ImportError as error:
        raise ValueError(
            f"--engine vllm needs vLLM in this environment ({error}); install it, or give --server of a running one"
        ) from error
    return vllm
