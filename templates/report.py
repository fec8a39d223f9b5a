"""Make the report of a run, or a page that compares several, from what they left behind.

    python report.py outputs/a                            outputs/a/report.html
    python report.py outputs/a outputs/b outputs/c        outputs/comparison.html
    python report.py outputs/a --follow                   print its lines and renew its report until it ends
"""

import argparse
import sys
import time
from pathlib import Path

from kit.errors import UserError, exit_codes
from kit.report import read_metrics, read_run_files, write_comparison, write_report

INTERVAL = 1.0  # seconds between two looks at a run that is followed
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
    printed, last_change = [], time.monotonic()
    while True:
        status = read_run_files(run).status  # before the lines: what was written until the end is printed too
        rows = read_metrics(run / "metrics.jsonl")
        if rows[: len(printed)] != printed:  # resumed: steps that were not saved are done again
            kept = next(i for i, row in enumerate([*printed, None]) if i >= len(rows) or row != rows[i])
            print(f"resumed    from step {rows[kept - 1]['step'] if kept else 0}", flush=True)
            printed = rows[:kept]
        for row in rows[len(printed) :]:
            print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
        if len(rows) > len(printed) or status != "running":
            report = write_report(run)
            last_change = time.monotonic()
        printed = rows
        if status != "running":
            print(f"{status:<10} {report}")
            return
        if time.monotonic() - last_change > QUIET:
            last_change = time.monotonic()
            if not _is_alive(run):
                print(f"ended      {run} says that it is running, but no process holds its lock: it was killed")
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
