"""What a decoding benchmark measures: its options, and the parts, cost levels and policies made from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec.cli.checks import require_above, require_at_least, require_known, require_power_of_two

if TYPE_CHECKING:
    from ecospec.decoding.cost_model import CostModel
    from ecospec.decoding.drafters.base import Drafter
    from ecospec.decoding.target import TargetModel
    from ecospec.decoding.widening import CostLevel
    from ecospec.eval.decoding_benchmark import BenchmarkPrompt, BenchmarkSettings
    from ecospec.predictor.bundle_files import PredictorBundle
    from ecospec.predictor.routing_spec import RoutingSpec
    from ecospec.trace_collection.prompts import Prompt

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class BenchmarkDecodingConfig:
    """Options of ``benchmark-decoding``."""

    target: Path
    """Folder (or hub id) of the target."""
    drafter: Path
    """Folder of the EAGLE-3 head."""
    predictor: Path
    """Predictor bundle (any kind)."""
    cost: str | None = None
    """Cost tables of calibrate-cost, separated by commas, one per level; evict and tuning need them."""
    out: Path
    """Folder for report.json, report.md and report.html."""
    policies: str = "autoregressive,probability,ecospec,evict,ecospec_oracle"
    """Policies, separated by commas; autoregressive must be among them."""
    levels: str = "bare,ballast"
    """Cost levels, separated by commas: bare (experts widened), ballast (also dense weights, read every step)."""
    widening_factor: int | None = None
    """Factor by which experts are widened; None takes the cost table's or the level's. 1 for a full-size target."""
    prompts: str = "stdlib:report"
    """Prompts: stdlib:<split>, a file, a folder, hf: or preset:, or several with commas (docs/prompts.md)."""
    groups: Path = Path("checkpoints/groups.json")
    """Manifest of the demo corpus, for stdlib: prompts."""
    number: int = 32
    """Prompts, one per group."""
    prompt_tokens: int = 64
    """Tokens of a prompt cut from a document, and the most of any other."""
    max_new_tokens: int = 64
    """Tokens generated per run."""
    budget: int = 4
    """Nodes verified per step at most, root included."""
    depth: int = 3
    """Draft forwards per step."""
    top_k: int = 2
    """Candidates per expanded node."""
    beam: int = 2
    """Nodes expanded per level of the tree."""
    epsilon: float = 0.25
    """ε' of ecospec, in units of the pairs one token touches."""
    buffer_init: str = "root"
    """What ecospec counts as touched before it selects: root or empty."""
    tune: bool = False
    """Choose ε' per cost level on --tuning-prompts by modelled time, instead of --epsilon."""
    tuning_prompts: str = "stdlib:tuning"
    """Prompts for tuning, disjoint from --prompts."""
    tuning_number: int = 8
    """Number of tuning prompts."""
    block: int = 4
    """Prompts between two switches of the cost level."""
    max_minutes: float | None = None
    """No further block of prompts begins after this time; None: all prompts are run."""
    device: str = "cpu"
    """Device: cpu, cuda, cuda:0, ..."""
    dtype: str = "float32"
    """Arithmetic of the target and the predictor: float32, bfloat16, float16 or float64."""
    seed: int = 0
    """Seed of the choice of prompts and of the order of runs."""
    threads: int = 1
    """CPU threads; one makes timings repeatable."""
    allow_load: bool = False
    """Measure although other work runs (load average above 0.3); the load is recorded."""
    resume: bool = False
    """Write into a folder that already holds a report, replacing it."""

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: An option is out of range; the message names the flag.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        require_at_least(self, 1, "number", "prompt_tokens", "tuning_number", "block", "threads", "budget")
        require_at_least(self, 1, "depth", "top_k", "beam")
        require_at_least(self, 2, "max_new_tokens")
        require_above(self, 0, "epsilon", "max_minutes")
        require_power_of_two("widening_factor", self.widening_factor)
        require_known("buffer_init", [self.buffer_init], ("root", "empty"))
        self._check_names()

    def _check_names(self) -> None:
        from ecospec.decoding.policies import POLICIES  # noqa: PLC0415 - keeps `--help` fast
        from ecospec.decoding.widening import COST_LEVELS  # noqa: PLC0415

        require_known("policies", parts(self.policies), POLICIES)
        require_known("levels", parts(self.levels), COST_LEVELS)
        if "autoregressive" not in parts(self.policies):
            raise ValueError(
                f"--policies {self.policies!r} lacks autoregressive, which everything is compared with"
            )
        if not parts(self.levels):
            raise ValueError("--levels is empty; name bare, ballast or both")


def parts(values: str) -> list[str]:
    """Split a comma-separated option; repeated entries count once.

    >>> parts("a, b,a")
    ['a', 'b']
    """
    return list(dict.fromkeys(part.strip() for part in values.split(",") if part.strip()))


@dataclass(frozen=True)
class Bench:
    """The parts that are measured, opened once.

    Attributes:
        config: The options.
        model: The transformers model.
        tokenizer: Its tokenizer.
        target: The model as the decoding loop sees it.
        drafter: The drafter.
        predictor: The predictor.
        settings: Options of the runs.
        sources: Prompts by source, as `read_prompts` gives them.
    """

    config: BenchmarkDecodingConfig
    model: Any
    tokenizer: Any
    target: TargetModel
    drafter: Drafter
    predictor: PredictorBundle
    settings: BenchmarkSettings
    sources: Mapping[str, list[Prompt]]

    @classmethod
    def open(cls, config: BenchmarkDecodingConfig, spec: RoutingSpec, sources: Mapping[str, list[Prompt]]) -> Bench:
        """Load target, drafter and predictor.

        Args:
            config: The options.
            spec: Routing of the target.
            sources: Prompts by source.

        Raises:
            FileNotFoundError: A part does not exist.
            ValueError: Drafter or predictor were made for another target, or the predictor for another drafter.
        """
        import torch  # noqa: PLC0415 - keeps `--help` fast
        from transformers import AutoTokenizer  # noqa: PLC0415

        from ecospec.cli.loading import load_target  # noqa: PLC0415
        from ecospec.decoding.drafter_states import require_states  # noqa: PLC0415
        from ecospec.decoding.drafters.eagle3_drafter import Eagle3Drafter  # noqa: PLC0415
        from ecospec.decoding.experts_kernel import use_grouped_experts  # noqa: PLC0415
        from ecospec.decoding.target import TargetModel  # noqa: PLC0415
        from ecospec.eval.decoding_benchmark import BenchmarkSettings  # noqa: PLC0415
        from ecospec.predictor.bundle import load_predictor  # noqa: PLC0415

        dtype = getattr(torch, config.dtype)
        model = load_target(config.target, config.dtype, config.device)
        use_grouped_experts(model)
        tokenizer = AutoTokenizer.from_pretrained(config.target)
        identity = {
            "tokenizer_fingerprint": spec.tokenizer_fingerprint,
            "target_fingerprint": spec.target_fingerprint,
        }
        drafter = Eagle3Drafter.from_pretrained(config.drafter, model, identity=identity, dtype=dtype)
        predictor = load_predictor(
            config.predictor,
            target_embedding=model.get_input_embeddings(),
            require_spec=spec,
            device=config.device,
            dtype=dtype,
        ).eval()
        require_states(drafter, predictor)
        settings = BenchmarkSettings(
            max_new_tokens=config.max_new_tokens,
            budget=config.budget,
            depth=config.depth,
            top_k=config.top_k,
            beam=config.beam,
            eos=_eos(model, tokenizer),
            seed=config.seed,
            block=config.block,
            max_seconds=None if config.max_minutes is None else 60 * config.max_minutes,
        )
        return cls(config, model, tokenizer, TargetModel(model, spec), drafter, predictor, settings, sources)

    def prompts(self, source: str, number: int, seed: int) -> list[BenchmarkPrompt]:
        """Choose and tokenise prompts of a source."""
        from ecospec.eval.benchmark_prompts import select_prompts  # noqa: PLC0415 - keeps `--help` fast

        found, most = self.sources[source], self.config.prompt_tokens
        return select_prompts(found, self.tokenizer, number=number, max_tokens=most, seed=seed)


def read_prompts(config: BenchmarkDecodingConfig) -> dict[str, list[Prompt]]:
    """Read the prompts of every source that is used, by source.

    Args:
        config: The options.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A source is not understood.
    """
    from ecospec.trace_collection.prompts import load_prompts  # noqa: PLC0415 - keeps `--help` fast

    used = [config.prompts, *([config.tuning_prompts] if config.tune else [])]
    return {source: load_prompts(source, groups=config.groups) for source in dict.fromkeys(used)}


def _eos(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text, from the generation config, else from the tokenizer."""
    found = model.generation_config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, Sequence) else (int(found),)


def read_costs(config: BenchmarkDecodingConfig, spec: RoutingSpec) -> dict[str, CostModel]:
    """Read the cost tables, by level.

    Args:
        config: The options.
        spec: Routing of the target.

    Raises:
        FileNotFoundError: A table does not exist.
        ValueError: A table is of another target, two are of one level, or one that is needed is missing.
    """
    from ecospec.decoding.cost_model import CostModel  # noqa: PLC0415 - keeps `--help` fast

    costs: dict[str, CostModel] = {}
    for path in parts(config.cost or ""):
        cost = CostModel.load(path)
        spec.require_same(cost.spec, mine=f"target {config.target}", theirs=f"cost table {path}")
        if cost.level in costs:
            raise ValueError(f"--cost names two tables of level {cost.level!r}; name one per level")
        costs[cost.level] = cost
    needed = [name for name in ("evict",) if name in parts(config.policies)] + ["--tune"] * config.tune
    missing = [level for level in parts(config.levels) if level not in costs]
    if needed and missing:
        raise ValueError(
            f"{needed[0]} needs a cost table of level {' and of level '.join(map(repr, missing))}; measure with "
            f"{' and '.join(f'calibrate-cost --level {level}' for level in missing)}, and name the files with "
            "--cost, separated by commas"
        )
    return costs


def cost_levels(config: BenchmarkDecodingConfig, costs: Mapping[str, CostModel]) -> dict[str, CostLevel]:
    """The levels to measure, sized as their cost tables were; all share one widened model.

    Args:
        config: The options.
        costs: Cost tables by level.

    Raises:
        ValueError: A level is unknown, or the levels cannot share one model.
    """
    from ecospec.decoding.widening import CostLevel, cost_level  # noqa: PLC0415 - keeps `--help` fast

    found = {}
    for name in parts(config.levels):
        level = cost_level(name)
        if name in costs:
            level = CostLevel(name, costs[name].widening_factor, costs[name].ballast_bytes_per_layer)
        if config.widening_factor is not None:
            level = CostLevel(name, config.widening_factor, level.ballast_bytes_per_layer)
        found[name] = level
    if len({level.widening_factor for level in found.values()}) > 1:
        factors = ", ".join(f"{name} {level.widening_factor}" for name, level in found.items())
        raise ValueError(
            f"the cost levels widen differently ({factors}), but share one model; calibrate them with one factor"
        )
    if other := [n for n, c in costs.items() if n in found and c.widening_factor != found[n].widening_factor]:
        raise ValueError(
            f"the cost table of {other[0]} was measured at widening factor {costs[other[0]].widening_factor}, "
            f"--widening-factor is {config.widening_factor}; calibrate at that factor"
        )
    return found


def benchmark_policy(config: BenchmarkDecodingConfig, name: str, epsilon: float, cost: CostModel | None) -> Any:
    """Build a policy for a cost level.

    Args:
        config: The options.
        name: Name of the policy.
        epsilon: ε' of the level.
        cost: Cost table of the level; evict needs it.

    Raises:
        ValueError: The name is unknown or an option is out of range.
    """
    from ecospec.decoding.policies import make_policy  # noqa: PLC0415 - keeps `--help` fast

    if name in {"ecospec", "ecospec_oracle"}:
        return make_policy(name, epsilon=epsilon, buffer_init=config.buffer_init)
    if name == "ecospec_static":
        return make_policy(name, epsilon=epsilon)
    if name == "evict":
        assert cost is not None
        return make_policy(name, mean_curve=cost.mean_curve)
    if name == "random":
        return make_policy(name, seed=config.seed)
    return make_policy(name)


def ballast_switch(model: Any, ballast_bytes: int) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return what makes contexts in which the target carries ballast (none for 0 bytes)."""
    if not ballast_bytes:
        return contextlib.nullcontext

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        from ecospec.decoding.widening import add_ballast_, remove_ballast_  # noqa: PLC0415 - keeps `--help` fast

        add_ballast_(model, ballast_bytes)
        try:
            yield
        finally:
            remove_ballast_(model)

    return active
