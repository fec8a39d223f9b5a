"""Make the report of a run, or a page that compares several, from what they left behind.

python report.py outputs/a                            outputs/a/report.html
python report.py outputs/a outputs/b outputs/c        outputs/comparison.html
python report.py outputs/a --follow                   print its lines and renew its report until it ends
"""

import argparse
import sys
import time
from itertools import zip_longest
from pathlib import Path

from kit.errors import UserError, exit_codes
from kit.report import write_report
from kit.report_comparison import write_comparison
from kit.report_reading import read_metrics, read_run_files

INTERVAL = 1.0  # seconds between two looks at a run that is followed
RENEWAL = 10.0  # seconds between two reports of it: each takes part of a second of a core
QUIET = 30.0  # seconds without a new line after which the question is whether the run is still alive


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--output", type=Path, help="the page that compares several runs")
    parser.add_argument("--follow", action="store_true", help="print the lines of a running one until it ends")
    options = parser.parse_args(args)
    runs = [run.expanduser() for run in options.runs]
    if options.follow and len(runs) > 1:
        raise UserError(f"--follow takes one run, not {len(runs)}")
    if options.output and len(runs) == 1:
        raise UserError("--output is for several runs: the report of one run stands in its run directory")
    if options.follow:
        follow(runs[0])
    elif len(runs) == 1:
        print(write_report(runs[0]))
    else:
        output = (options.output or runs[0].parent / "comparison.html").expanduser()
        if output.suffix != ".html":
            raise UserError(f"--output {output}: give a name that ends in .html")
        write_comparison(runs, output)
        print(output)


def follow(run: Path) -> None:
    """Print the lines of a run's metrics as they come and renew its report, until the run ends."""
    metrics = run / "metrics.jsonl"
    printed, size, changed, renewed = [], None, time.monotonic(), None
    while True:
        status = read_run_files(
            run, with_metrics=False
        ).status  # before the lines: what was written until the end is printed too
        now = time.monotonic()
        if metrics.exists() and metrics.stat().st_size != size:
            size, changed = metrics.stat().st_size, now
            rows = read_metrics(metrics)
            is_new = [old != new for old, new in zip_longest(printed, rows)]
            kept = is_new.index(True) if True in is_new else len(rows)
            if kept < len(printed):  # resumed: steps that were not saved are done again
                print(f"resumed    after step {rows[kept - 1]['step'] if kept else 0}", flush=True)
            for row in rows[kept:]:
                print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
            printed = rows
        if status != "running":
            print(f"{status:<10} {write_report(run)}")
            return
        if renewed is None or (renewed < changed and now - renewed > RENEWAL):
            renewed = now
            write_report(run)
        if now - changed > QUIET:
            changed = now
            if not _is_alive(run):
                print(f"killed     {run} says that it is running, but no process holds its lock")
                return
        time.sleep(INTERVAL)


def _is_alive(run: Path) -> bool:
    """Return whether a process holds the lock of a run; True where that cannot be known."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(run / ".lock", timeout=0):
            return False
    except (Timeout, OSError, NotImplementedError):
        return True


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    with exit_codes():
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt:
            print()
