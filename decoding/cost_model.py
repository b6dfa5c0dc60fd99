"""CostModel: what a step of the target costs on one machine, as measured. The contract, its reader and writer.

On disk one JSON file, written by ``ecospec calibrate-cost``::

    {
      "format_version": 1,
      "level": "bare",                      # name of the cost level
      "widening_factor": 64,
      "ballast_bytes_per_layer": 0,
      "ballast_target_ratio": null,         # the ratio the ballast was sized for, where it was sized here
      "spec": {...},                        # RoutingSpec of the target
      "device": "cpu", "dtype": "float32", "threads": 1,
      "hardware": "AMD EPYC, 2 cores",
      "experts_implementation": "ecospec_grouped",
      "context_length": 128,                # tokens in the KV cache while measuring
      "repeats": 7,
      "load_average": 0.1,
      "table": [                            # T(n, U): forced routing, median seconds
        {"tokens": 1, "unique": [4.0], "seconds": [0.009]},
        {"tokens": 2, "unique": [4.0, 6.0, 8.0], "seconds": [0.010, 0.013, 0.016]},
        ...
      ],
      "workload": "drafted",                # where the tokens of C(n) came from: drafted trees, or text in chains
      "mean_curve": [0.009, 0.014, ...],    # C(n), n = 1, 2, ...: mean seconds with the target's own routing
      "mean_unique": [4.0, 6.9, ...],       # and the unique experts per layer it touched
      "provenance": {...}                   # git SHA, versions, argv
    }

Shapes: n tokens of a step (root included), U unique experts per MoE layer, mean over the layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecospec.predictor.routing_spec import RoutingSpec

FORMAT_VERSION = 1
_WORKLOADS = ("drafted", "text")
_LOWEST = {"widening_factor": 1, "ballast_bytes_per_layer": 0, "threads": 1, "context_length": 0, "repeats": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class CostRow:
    """Measured times for one number of tokens.

    Attributes:
        tokens: n.
        unique: Unique experts per MoE layer, ascending.
        seconds: Time of a step at each of them.

    Raises:
        ValueError: The row is empty, not ascending, or holds a time that is not positive.
    """

    tokens: int
    unique: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Validate."""
        where = f"CostRow of {self.tokens} tokens"
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"CostRow.tokens must be a positive integer, got {self.tokens!r}")
        if not self.unique or len(self.unique) != len(self.seconds):
            raise ValueError(f"{where}: unique has {len(self.unique)} entries, seconds {len(self.seconds)}")
        if self.unique[0] <= 0 or any(low >= high for low, high in itertools.pairwise(self.unique)):
            raise ValueError(f"{where}: unique must be positive and ascending, got {self.unique}")
        _require_times(f"{where}: seconds", self.seconds)

    def at(self, unique: float) -> float:
        """Interpolate linearly in U; beyond the measured range the nearest end holds."""
        return _interpolate(self.unique, self.seconds, unique)


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """Measured cost of a target's steps; the fields are drawn at the top of this file.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    level: str
    widening_factor: int
    ballast_bytes_per_layer: int
    ballast_target_ratio: float | None
    spec: RoutingSpec
    device: str
    dtype: str
    threads: int
    hardware: str
    experts_implementation: str
    context_length: int
    repeats: int
    load_average: float | None
    table: tuple[CostRow, ...]
    workload: str
    mean_curve: tuple[float, ...]
    mean_unique: tuple[float, ...]
    provenance: dict[str, Any]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Validate every field."""
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"CostModel.format_version is {self.format_version}, this version reads {FORMAT_VERSION}; "
                "measure again with calibrate-cost"
            )
        for name in ("level", "device", "dtype", "hardware", "experts_implementation"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"CostModel.{name} must be a non-empty string, got {getattr(self, name)!r}")
        lowest = {
            "widening_factor": 1,
            "ballast_bytes_per_layer": 0,
            "threads": 1,
            "context_length": 0,
            "repeats": 1,
        }
        for name, least in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"CostModel.{name} must be an integer of at least {least}, got {value!r}")
        if self.workload not in _WORKLOADS:
            raise ValueError(f"CostModel.workload must be one of {', '.join(_WORKLOADS)}, got {self.workload!r}")
        if not isinstance(self.spec, RoutingSpec):
            raise ValueError(f"CostModel.spec must be a RoutingSpec, got {type(self.spec).__name__}")
        if not isinstance(self.provenance, dict):
            raise ValueError(f"CostModel.provenance must be an object, got {self.provenance!r}")
        self._check_measurements()

    def _check_measurements(self) -> None:
        tokens = [row.tokens for row in self.table]
        if not tokens or any(low >= high for low, high in itertools.pairwise(tokens)):
            raise ValueError(f"CostModel.table must list ascending numbers of tokens, got {tokens}")
        if highest := [row.tokens for row in self.table if row.unique[-1] > self.spec.num_experts]:
            raise ValueError(
                f"CostModel.table has more unique experts at {highest[0]} tokens than the target's "
                f"{self.spec.num_experts}"
            )
        _require_times("CostModel.mean_curve", self.mean_curve)
        if not self.mean_curve or len(self.mean_unique) != len(self.mean_curve):
            raise ValueError(
                f"CostModel.mean_curve has {len(self.mean_curve)} entries, mean_unique {len(self.mean_unique)}; "
                "both start at one token and have the same length"
            )
        for name in ("load_average", "ballast_target_ratio"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and math.isfinite(value) and value >= 0):
                raise ValueError(f"CostModel.{name} must be null or a number of at least 0, got {value!r}")

    def time(self, tokens: float, unique: float) -> float:
        """T(n, U): seconds of one step of the target.

        Linear in U within the two nearest measured numbers of tokens, then linear in n between them; outside the
        measured range the nearest measurement holds.

        Args:
            tokens: n, root included.
            unique: U, unique experts per MoE layer, mean over the layers.
        """
        counts = [float(row.tokens) for row in self.table]
        return _interpolate(counts, [row.at(unique) for row in self.table], tokens)

    def mean_time(self, tokens: int) -> float:
        """C(n): mean seconds of a step over n tokens with the target's own routing.

        Raises:
            ValueError: n was not measured.
        """
        if not 1 <= tokens <= len(self.mean_curve):
            raise ValueError(
                f"C({tokens}) was not measured, only C(1) to C({len(self.mean_curve)}); run calibrate-cost with "
                f"--max-tokens {tokens}"
            )
        return self.mean_curve[tokens - 1]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form drawn at the top of this file."""
        return dataclasses.asdict(self) | {"spec": self.spec.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "CostModel") -> CostModel:
        """Read the JSON form.

        Args:
            data: The JSON object.
            source: File named in error messages.

        Raises:
            ValueError: A field is unknown, missing or out of range.
        """
        values = _checked(cls, data, f"{source}: CostModel")
        rows = values["table"]
        if not isinstance(rows, list):
            raise ValueError(f"{source}: CostModel.table must be a list of rows, got {type(rows).__name__}")
        try:
            values["table"] = tuple(
                CostRow(row["tokens"], _numbers("unique", row["unique"]), _numbers("seconds", row["seconds"]))
                for row in (_checked(CostRow, row, f"{source}: CostModel.table") for row in rows)
            )
            for name in ("mean_curve", "mean_unique"):
                values[name] = _numbers(name, values[name])
            values["spec"] = RoutingSpec.from_dict(values["spec"])
            return cls(**values)
        except ValueError as error:
            message = str(error)
            raise ValueError(message if message.startswith(source) else f"{source}: {message}") from error

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all.

        Raises:
            FileExistsError: It exists; a cost table is measured anew, never overwritten.
        """
        target = Path(path)
        if target.exists():
            raise FileExistsError(f"{target} exists; remove it or name another file to measure again")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(target)
        return target

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a file written by `save`.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is not a cost table; the message names file and field.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no cost table at {path}; measure one with calibrate-cost")
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON ({error}); measure a cost table with calibrate-cost") from error
        return cls.from_dict(data, str(path))


def _checked(cls: type, data: object, where: str) -> dict[str, Any]:
    """Return the fields of a JSON object, which must be exactly those of a dataclass."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {type(data).__name__}")
    names = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - names):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(sorted(names))}")
    if missing := sorted(names - set(data)):
        raise ValueError(f"{where}: field {missing[0]!r} is missing")
    return dict(data)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(name: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, (list, tuple)) or not all(_is_number(value) for value in values):
        raise ValueError(f"{name} must be a list of numbers, got {values!r}")
    return tuple(float(value) for value in values)


def _require_times(name: str, values: Sequence[float]) -> None:
    if not all(_is_number(value) and math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"{name} must be positive, got {list(values)}")


def _interpolate(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Piecewise linear through ascending points, constant beyond both ends."""
    if at <= points[0]:
        return values[0]
    for (left, low), (right, high) in itertools.pairwise(zip(points, values, strict=True)):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return values[-1]
