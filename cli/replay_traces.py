"""``collect-traces --mode replay``: run the sequences of a trace store again and say how far the experts agree."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ecospec.cli.collect_target import prepare_target
from ecospec.cli.collect_traces import CollectTracesConfig, show_progress
from ecospec.cli.tables import show_line, show_table
from ecospec.eval.tables import Table

if TYPE_CHECKING:
    from ecospec.trace_collection.replay import Agreement, ReplayReport

#: File in the output folder, beside the store of the re-run.
REPORT_NAME, STORE_NAME = "replay.json", "traces"
#: Flagged layers that are printed; replay.json has all.
SHOWN_LOW = 10


def run_replay(config: CollectTracesConfig) -> None:
    """Replay ``--traces`` and write ``replay.json``.

    Args:
        config: Options of ``collect-traces``.

    Raises:
        FileNotFoundError: The store does not exist.
        ValueError: It is damaged or of another target.
    """
    from rich.console import Console  # noqa: PLC0415 - keeps `--help` fast

    from ecospec.cli.provenance import provenance  # noqa: PLC0415
    from ecospec.trace_collection.manifest import write_durably  # noqa: PLC0415
    from ecospec.trace_collection.replay import replay  # noqa: PLC0415
    from ecospec.trace_collection.store import TraceStore  # noqa: PLC0415

    assert config.traces is not None
    if config.out.resolve() == config.traces.resolve():
        raise ValueError(f"--out {config.out} is the store that --traces names; name a new folder")
    source = TraceStore(config.traces)
    source.require_complete()
    source.verify()  # a flipped byte would count as a set that differs
    target = prepare_target(config)
    target.spec.require_same(
        source.spec, mine=f"target {config.target_path or config.target}", theirs=f"store {config.traces}"
    )
    with target.open() as opened, show_progress(Console(stderr=True)) as progress:
        report = replay(
            opened.engine,
            source,
            config.out / STORE_NAME,
            config,
            spec=target.spec,
            resume=config.resume,
            options=opened.options,
            provenance={**provenance(), **opened.about},
            tokens_per_shard=config.tokens_per_shard,
            low_share=config.low_share,
            progress=progress,
        )
    content = json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n"
    write_durably(config.out / REPORT_NAME, content.encode())
    console = Console()
    for table in replay_tables(report):
        show_table(console, table)
    for line in low_lines(report):
        show_line(console, line)
    show_line(console, f"written to {config.out / REPORT_NAME}")


def replay_tables(report: ReplayReport) -> list[Table]:
    """Tables by dataset and origin, and by layer."""
    layers = report.spec.layer_indices
    flagged = {layer for _, layer, _ in report.low()}
    shares, overlaps = report.total.shares(), report.total.overlaps(report.spec.top_k)
    worst = [min(report.groups, key=lambda group: group.shares()[layer]) for layer in range(len(layers))]
    return [
        Table(
            f"Replay against the store, % (recorded in {report.recorded.get('dtype', 'an unknown dtype')}, "
            f"replayed in {report.replayed.get('dtype', 'an unknown dtype')})",
            ("dataset, origin", "tokens", "identical sets", "identical in all layers", "overlap", "lowest layer"),
            [_group_row(group, report) for group in (*report.groups, report.total)],
            strong=[len(report.groups)],
            notes=["identical sets: mean over layers of the share of tokens whose K experts are the same"],
        ),
        Table(
            "By layer, %",
            ("layer", "identical sets", "overlap", "lowest dataset", "its identical sets"),
            [
                [
                    f"{number}{' (low)' if layer in flagged else ''}",
                    _percent(shares[layer]),
                    _percent(overlaps[layer]),
                    f"{worst[layer].dataset}, {worst[layer].origin}",
                    _percent(worst[layer].shares()[layer]),
                ]
                for layer, number in enumerate(layers)
            ],
        ),
    ]


def low_lines(report: ReplayReport) -> list[str]:
    """Say which layers fall low, worst first."""
    low, layers = report.low(), report.spec.layer_indices
    lines = [
        f"low: layer {layers[layer]} of {group.dataset}, {group.origin}: {_percent(share)} % identical sets, below "
        f"{_percent(report.low_share)} %"
        for group, layer, share in low[:SHOWN_LOW]
    ]
    return lines + ([f"and {len(low) - SHOWN_LOW} more"] if len(low) > SHOWN_LOW else [])


def _group_row(group: Agreement, report: ReplayReport) -> list[str]:
    shares = group.shares()
    lowest = int(shares.argmin())
    return [
        f"{group.dataset}, {group.origin}" if group.dataset else "all",
        f"{group.tokens:,}",
        _percent(shares.mean()),
        _percent(group.whole / group.tokens),
        _percent(group.overlaps(report.spec.top_k).mean()),
        f"{report.spec.layer_indices[lowest]}: {_percent(shares[lowest])}",
    ]


def _percent(share: float) -> str:
    """A share in percent; only a whole one is shown as 100.

    >>> _percent(0.99999), _percent(1.0)
    ('99.99', '100')
    """
    return "100" if share == 1 else f"{int(share * 10_000) / 100:.2f}"
