"""How well peaks are predicted without a GPU: against published measurements, over model families, beside fits.

With no options, published peaks are compared with predicted ones. `--families` holds the cost that traces give of each
model family of transformers against traces of shapes it was not made from. `--forms` fits the forms of cost model that
need no trace to a handful of probes, and compares them with it. `--speed` times a trace and a table over all cards.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import bench_families
import forms_beside_exact
import prediction_speed
import published_tables


def main() -> None:
    """Print what was asked for."""
    options = _arguments()
    if options.families:
        found = bench_families.run_all(
            only=options.only, jobs=options.jobs, file=options.json, aligned_only=options.aligned
        )
        print(bench_families.table(found))
    elif options.forms:
        print(forms_beside_exact.table(only=options.only))
    elif options.speed:
        print(prediction_speed.table())
    elif options.csv:
        print(published_tables.of_file(options.csv, model=options.model, attention=options.attention, **_card(options)))
    else:
        for text in published_tables.of_sources():
            print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--families", action="store_true", help="every model family of transformers")
    parser.add_argument("--aligned", action="store_true", help="families at multiples of 8 alone, in half the time")
    parser.add_argument("--forms", action="store_true", help="linear and quadratic beside exact")
    parser.add_argument("--speed", action="store_true", help="seconds and memory of traces and predictions")
    parser.add_argument("--only", metavar="NAME", help="one family")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="findings, to be resumed from")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="batch_size, length and a column of peaks in MB")
    parser.add_argument("--model", help="name or directory of its model, for --csv")
    parser.add_argument("--attention", help="attention implementation, for --csv")
    parser.add_argument("--column", help="column of peaks, for --csv (default: the third)")
    parser.add_argument("--dtype", default="float16", help="for --csv (default: %(default)s)")
    parser.add_argument("--head", default="auto", help="for --csv (default: %(default)s)")
    parser.add_argument("--workload", default="forward", help="for --csv (default: %(default)s)")
    parser.add_argument("--capability", default="8.0", help="of the card, for --csv (default: %(default)s)")
    options = parser.parse_args()
    if options.csv and not options.model:
        parser.error("--csv needs --model")
    return options


def _card(options: argparse.Namespace) -> dict[str, str | None]:
    names = ("column", "dtype", "head", "workload", "capability")
    return {name: getattr(options, name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
