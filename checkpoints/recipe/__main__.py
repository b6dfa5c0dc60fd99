"""Command line of the recipe: ``python -m checkpoints.recipe [stage ...]``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoints.recipe.settings import Settings
from checkpoints.recipe.stages import STAGES


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the recipe."""
    stages = "\n".join(f"  {name:12s} {stage.summary}" for name, stage in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints.recipe",
        description="Rebuild the demo checkpoints from the Python standard library's own text.",
        epilog=f"stages, in order:\n{stages}\n\nexample:\n  python -m checkpoints.recipe target --threads 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", nargs="*", help="stages to run; default: all that are shipped, in order")
    parser.add_argument(
        "--out", type=Path, default=Path("checkpoints"), help="finished files (default: %(default)s)"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/recipe"), help="scratch (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="initialisation and data order (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the wanted stages; return the exit code, 2 for a user's mistake."""
    parser = build_parser()
    args = parser.parse_args(argv)
    unknown = [name for name in args.stage if name not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; stages: {', '.join(STAGES)}")
    try:
        settings = Settings(args.out, args.work, args.threads, args.seed)
        for name, stage in STAGES.items():
            if name not in args.stage if args.stage else not stage.shipped:
                continue
            if stage.complete(settings):
                print(f"{name}: complete, skipped (delete its output to rebuild it)")
                continue
            print(f"{name}: {stage.summary}")
            stage.run(settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
