"""Predict three test pairs with the trained model: `python examples/demo/three_pairs.py outputs/demo`."""

import csv
import subprocess
import sys
from pathlib import Path

# A paraphrase; a near-miss with other words; and one whose words have only changed places, the kind that a minute of
# training does not teach (README.md has the counts).
SHOWN = (0, 8, 46)
PREDICT = Path(__file__).resolve().parents[2] / "templates" / "predict.py"


def main(run: str) -> int:
    tests, three = (Path(run, "data", name) for name in ("test.jsonl", "three_pairs.jsonl"))
    if not tests.is_file():
        print(f"error: there is no finished run in {run}: run `make demo` first", file=sys.stderr)
        return 2
    lines = tests.read_text("utf-8").splitlines(keepends=True)
    three.write_text("".join(lines[index] for index in SHOWN), "utf-8")
    output = Path(run, "predictions", "three_pairs.csv")
    command = [sys.executable, str(PREDICT), run, str(three), "--output", str(output), "--overwrite", "true"]
    if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        return code
    with output.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            said = row["prediction"]
            print(f"  {row['sentence1']}\n  {row['sentence2']}")
            print(f"    model: {said} ({float(row[f'p_{said}']):.0%}), really: {row['label']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
