"""``ecospec collect-trees``: record draft trees, with the true experts of every candidate."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ecospec.cli.checks import require_at_least, require_drafter, require_known, require_predictor, require_threads
from ecospec.cli.device import require_device
from ecospec.cli.errors import terminable
from ecospec.cli.output import check_output
from ecospec.trace_collection.manifest import TOKENS_PER_SHARD

if TYPE_CHECKING:
    from rich.console import Console

    from ecospec.decoding.drafters.base import Drafter
    from ecospec.decoding.target import TargetModel
    from ecospec.decoding.tree_recording import RecordedTree
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.trace_collection.records import RoutingTrace
    from ecospec.trace_collection.store import TraceStore
    from ecospec.trace_collection.tree_plan import At, TreePlan
    from ecospec.trace_collection.tree_records import TreeTrace
    from ecospec.trace_collection.tree_store import TreeStoreWriter

__all__ = ["CollectTreesConfig", "run"]

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
#: Nodes of a tree at most: the store keeps parents in int16.
MAX_NODES = 2**15 - 1
#: Records the trees of one sequence.
Recorder = Callable[["RoutingTrace"], "list[RecordedTree]"]


@dataclass(frozen=True, kw_only=True)
class CollectTreesConfig:
    """Options of ``collect-trees``."""

    target: Path
    """Folder (or hub id) of the target."""
    drafter: Path
    """Folder of the EAGLE-3 head."""
    traces: Path
    """Routing trace store of the same target; its texts are where the trees grow."""
    out: Path
    """Folder of the draft-tree store."""
    at: str = "positions"
    """positions: a tree below every token of each text; steps: the trees of a decoding run from each prompt."""
    policy: str | None = None
    """At steps: which policy decodes, one that needs no cost table; None: probability."""
    budget: int | None = None
    """At steps: nodes verified per step at most, root included; None: 4."""
    predictor: Path | None = None
    """At steps: predictor bundle, for policies that need one."""
    depth: int = 3
    """Draft forwards per tree."""
    top_k: int = 2
    """Candidates per expanded node."""
    beam: int = 2
    """Nodes expanded per level of the tree."""
    limit: int | None = None
    """Sequences at most, chosen by hash; None: all."""
    allow_teacher_forced: bool = False
    """At positions: accept text that the target did not write; such trees serve training, never replay."""
    trees_per_forward: int = 16
    """At positions: trees that one forward of the target takes together; more need more memory."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..., or auto (spread over all GPUs)."""
    dtype: str = "auto"
    """Arithmetic of target and drafter: auto (float32 on a CPU, else as stored), float32, bfloat16, float16 or
    float64."""
    experts_implementation: str | None = None
    """How transformers runs the experts: eager, grouped_mm or batched_mm; None leaves its choice."""
    nodes_per_shard: int = TOKENS_PER_SHARD
    """Tree nodes of a shard. A killed run loses the shards not yet written: one; two on a GPU."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    resume: bool = False
    """Go on with the store in --out."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range or has no meaning here; the message names the flag.
        """
        from ecospec.trace_collection.tree_plan import PLACES  # noqa: PLC0415 - keeps `--help` fast

        require_known("at", [self.at], PLACES)
        require_known("dtype", [self.dtype], DTYPES)
        require_at_least(self, 1, "budget", "depth", "top_k", "beam", "limit", "trees_per_forward")
        require_at_least(self, 1, "nodes_per_shard")
        self._require_small_trees()
        require_threads(self.threads)
        if self.at == "steps":
            require_known("policy", [self.policy_name], _policies())
            return
        for name in ("policy", "budget", "predictor"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"--{name} has no meaning at positions, where no policy decides anything; leave it out or use "
                    "--at steps"
                )

    def _require_small_trees(self) -> None:
        """Refuse trees with more nodes than a store's int16 parents can point to."""
        if self.beam > MAX_NODES:
            raise ValueError(f"--beam must be at most {MAX_NODES:,}, got {self.beam}")
        nodes, level = 1, 1
        for _ in range(self.depth):
            level = min(self.beam, level) * self.top_k
            nodes += level
            if nodes > MAX_NODES:
                raise ValueError(
                    f"--depth {self.depth}, --top-k {self.top_k} and --beam {self.beam} give trees of more than "
                    f"{MAX_NODES:,} nodes; choose smaller ones"
                )

    @property
    def policy_name(self) -> str:
        """The policy that decodes at steps."""
        return self.policy or "probability"


def _policies() -> list[str]:
    """Policies that draft and can be built without a cost table."""
    from ecospec.decoding.policies import POLICIES  # noqa: PLC0415 - keeps `--help` fast

    def plain(name: str) -> bool:
        options = inspect.signature(POLICIES[name]).parameters.values()
        return name != "autoregressive" and all(option.default is not option.empty for option in options)

    return [name for name in POLICIES if plain(name)]


def run(config: CollectTreesConfig) -> None:
    """Collect trees, showing a progress bar, and say what the store holds."""
    require_device(config.device, auto=True)
    check_output(config.out, resume=config.resume)
    require_drafter(config.drafter)
    import torch  # noqa: PLC0415 - keeps `--help` fast
    from rich.console import Console  # noqa: PLC0415

    from ecospec.predictor.fingerprint import routing_spec_of  # noqa: PLC0415
    from ecospec.trace_collection.store import TraceStore  # noqa: PLC0415
    from ecospec.trace_collection.tree_plan import make_tree_plan  # noqa: PLC0415

    spec = routing_spec_of(config.target)
    if config.predictor is not None:
        require_predictor(config.predictor, spec, config.target)
    traces = TraceStore(config.traces)
    spec.require_same(traces.spec, mine=f"target {config.target}", theirs=f"traces {config.traces}")
    traces.require_complete()
    traces.verify()
    at = cast("At", config.at)
    plan = make_tree_plan(traces, at=at, limit=config.limit, allow_teacher_forced=config.allow_teacher_forced)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target, drafter = _load(config, spec)
    _require_room(target, plan, config.depth)
    recorder = _at_steps(config, target, drafter) if at == "steps" else _at_positions(config, target, drafter)
    with terminable(), _writer(config, target, traces, plan) as writer:
        others = _collect(plan, writer, recorder, Console(stderr=True))
    _report(config, plan, others, Console())


def _load(config: CollectTreesConfig, spec: RoutingSpec) -> tuple[TargetModel, Drafter]:
    """Target and drafter in one arithmetic, checked against each other."""
    from ecospec.cli.loading import load_target  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.decoding.drafters.eagle3_drafter import Eagle3Drafter  # noqa: PLC0415
    from ecospec.decoding.target import TargetModel  # noqa: PLC0415

    dtype = "float32" if config.dtype == "auto" and config.device == "cpu" else config.dtype
    model = load_target(config.target, dtype, config.device)
    if config.experts_implementation is not None:
        model.set_experts_implementation(config.experts_implementation)
    identity = {name: getattr(spec, name) for name in ("tokenizer_fingerprint", "target_fingerprint")}
    drafter = Eagle3Drafter.from_pretrained(config.drafter, model, identity=identity, dtype=model.dtype)
    if config.top_k > (most := drafter.head.config.draft_vocab_size):
        raise ValueError(
            f"--top-k must be at most {most}, the draft vocabulary of {config.drafter}, got {config.top_k}"
        )
    return TargetModel(model, spec), drafter


def _require_room(target: TargetModel, plan: TreePlan, depth: int) -> None:
    """Refuse texts whose last trees would stand beyond the target's positions, before anything runs."""
    from ecospec.decoding.capability import require_positions  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.trace_collection.tree_plan import roots_of  # noqa: PLC0415

    for trace in plan.sequences:
        start, stop = trace.prompt_length, trace.num_tokens
        if plan.at == "positions":
            start, stop = roots_of(trace).start, roots_of(trace).stop
        try:
            require_positions(target.model, start, stop - start, depth)
        except ValueError as error:
            raise ValueError(
                f"sequence {trace.sequence_id}: {error}, or collect its traces with a smaller --max-length"
            ) from error


def _at_positions(config: CollectTreesConfig, target: TargetModel, drafter: Drafter) -> Recorder:
    """Record the tree below every token of a text."""
    import torch  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.decoding.tree_recording import record_text  # noqa: PLC0415
    from ecospec.trace_collection.tree_plan import roots_of  # noqa: PLC0415

    def record(trace: RoutingTrace) -> list[RecordedTree]:
        return record_text(
            target,
            drafter,
            torch.tensor(trace.token_ids, dtype=torch.int64),
            roots_of(trace),
            depth=config.depth,
            top_k=config.top_k,
            beam=config.beam,
            trees_per_forward=config.trees_per_forward,
        )

    return record


def _at_steps(config: CollectTreesConfig, target: TargetModel, drafter: Drafter) -> Recorder:
    """Decode from a text's prompt as far as the text goes, and record the tree of every step."""
    import torch  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.decoding.loop import DecodingLoop  # noqa: PLC0415
    from ecospec.decoding.policies import make_policy  # noqa: PLC0415
    from ecospec.predictor.bundle import load_predictor  # noqa: PLC0415

    predictor = None
    if config.predictor is not None:
        predictor = load_predictor(
            config.predictor,
            target_embedding=cast("Any", target.model).get_input_embeddings(),
            require_spec=target.spec,
            device=str(target.device),
            dtype=target.dtype,
        ).eval()
    trees: list[RecordedTree] = []
    loop = DecodingLoop(
        target,
        drafter,
        predictor,
        make_policy(config.policy_name),
        budget=config.budget or 4,
        depth=config.depth,
        top_k=config.top_k,
        beam=config.beam,
        timing=False,
        on_tree=trees.append,
    )

    def record(trace: RoutingTrace) -> list[RecordedTree]:
        trees.clear()
        prompt = torch.tensor(trace.token_ids[: trace.prompt_length], dtype=torch.int64)
        # Greedy text ends where the stored one does, so no end-of-sequence token has to be known.
        loop.generate(prompt, trace.num_tokens - trace.prompt_length)
        return list(trees)

    return record


def _writer(config: CollectTreesConfig, target: TargetModel, traces: TraceStore, plan: TreePlan) -> TreeStoreWriter:
    """The store, opened with everything that shapes its rows."""
    from ecospec.cli.provenance import provenance  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.predictor.bundle_files import bundle_folder  # noqa: PLC0415
    from ecospec.trace_collection.manifest import sha256_of  # noqa: PLC0415
    from ecospec.trace_collection.tree_store import TreeStoreWriter  # noqa: PLC0415

    shaping = ("at", "depth", "top_k", "beam", "limit", "experts_implementation")
    collection: dict[str, Any] = {name: getattr(config, name) for name in shaping}
    collection |= {
        "origin": plan.origin,
        "temperature": 0.0,
        "skipped": plan.skipped,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafter": sha256_of(config.drafter / "model.safetensors"),
        "traces": dict(traces.manifest.collection),
    }
    if plan.at == "positions":
        collection["trees_per_forward"] = config.trees_per_forward
    else:
        model = None if config.predictor is None else bundle_folder(config.predictor) / "model.safetensors"
        collection |= {"policy": config.policy_name, "budget": config.budget or 4}
        collection["predictor"] = None if model is None else sha256_of(model)
    assert target.spec is not None
    return TreeStoreWriter(
        config.out,
        target.spec,
        collection=collection,
        plan_hash=plan.digest(),
        provenance=provenance(),
        resume=config.resume,
        tokens_per_shard=config.nodes_per_shard,
        background=target.device.type != "cpu",
    )


def _collect(plan: TreePlan, writer: TreeStoreWriter, record: Recorder, console: Console) -> int:
    """Record the sequences that are not yet in the store.

    Returns:
        Trees at whose root the target now chooses another token than the text has.
    """
    others = 0
    with _progress(console, len(plan.sequences)) as show:
        done = writer.finished_units
        if done > len(plan.sequences):
            raise ValueError(
                f"{writer.path} lists {done} sequences, {len(plan.sequences)} are planned; collect again"
            )
        show(done, 0)
        for trace in plan.sequences[done:]:
            trees = [_tree_trace(trace, tree, writer.spec) for tree in record(trace)]
            if trace.origin == "generated":
                text = trace.token_ids
                others += sum(
                    tree.position + 1 < text.size and int(tree.emitted[0]) != int(text[tree.position + 1])
                    for tree in trees
                )
            writer.append(trees)
            done += 1
            show(done, sum(tree.num_nodes for tree in trees))
    return others


def _tree_trace(trace: RoutingTrace, recorded: RecordedTree, spec: RoutingSpec) -> TreeTrace:
    """The row of a recorded tree."""
    import numpy as np  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.trace_collection.tree_records import TreeTrace  # noqa: PLC0415

    tree = recorded.tree
    return TreeTrace(
        sequence_id=trace.sequence_id,
        group_id=trace.group_id,
        position=recorded.position,
        token=tree.tokens.numpy().astype(np.int32),
        parent=tree.parents.numpy().astype(np.int16),
        draft_logprob=tree.logprobs.numpy(),
        experts=recorded.experts.numpy().astype(spec.expert_dtype),
        target_logprob=recorded.target_logprobs.numpy(),
        emitted=recorded.emitted.numpy().astype(np.int32),
        accepted=recorded.accepted.numpy(),
        temperature=0.0,
        seed=0,  # greedy: there is no noise
    )


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int, int], None]]:
    """Yield what takes (sequences done, nodes just recorded)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("collect trees"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[nodes]:,} nodes, {task.fields[speed]:,.0f} nodes/s"),
        TimeRemainingColumn(),
    )
    start, recorded = time.monotonic(), 0
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("collect", total=total, nodes=0, speed=0.0)

        def show(done: int, nodes: int) -> None:
            nonlocal recorded
            recorded += nodes
            speed = recorded / max(time.monotonic() - start, 1e-9)
            bar.update(task, completed=done, nodes=recorded, speed=speed)

        yield show


def _report(config: CollectTreesConfig, plan: TreePlan, others: int, console: Console) -> None:
    """Print what the store holds."""
    from ecospec.cli.tables import show_line  # noqa: PLC0415 - keeps `--help` fast
    from ecospec.trace_collection.tree_store import TreeStore  # noqa: PLC0415
    from ecospec.trace_collection.tree_summary import summarise_trees  # noqa: PLC0415

    found = summarise_trees(TreeStore(config.out))
    shares = ", ".join(f"{share:.1%} at depth {depth}" for depth, share in enumerate(found.accepted, start=1))
    show_line(
        console,
        f"{found.trees:,} trees, {found.nodes:,} nodes with experts from {len(plan.sequences):,} sequences in "
        f"{config.out}, {found.num_bytes / found.nodes:.1f} bytes per node",
    )
    show_line(console, f"trees with an accepted node: {shares}")
    for reason, count in plan.skipped.items():
        show_line(console, f"left out: {count:,} sequences {reason}")
    if others:
        show_line(
            console,
            f"at {others:,} roots the target now chooses another token than the text has (near ties, or another "
            "arithmetic than the text was generated in): a replay leaves the text there",
        )
