"""The bench that README's figures come from: it runs, and what it writes fits together. Nobody judges times here."""

import json
import math
import sys

import worlds
from conftest import REPOSITORY


def run_toy(output_dir: str) -> None:
    sys.path.insert(0, str(REPOSITORY / "examples" / "bench"))
    import bench

    bench.main(["--toy", "--output_dir", output_dir])


def test_the_bench_measures_every_row_and_writes_a_table_a_picture_and_json(tmp_path):
    toy = worlds.process(run_toy, (str(tmp_path),))
    toy.start()
    toy.join(120)
    if toy.is_alive():
        toy.kill()
    assert toy.exitcode == 0
    found = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    rows = found["rows"]
    assert found["toy"] is True
    kinds = ("a step", "tokens", "an evaluation", "a checkpoint", "first batch", "sampler", "--help", "a mistake")
    assert all(any(row["name"].startswith(kind) for row in rows) for kind in kinds)
    for row in rows:
        assert all(row[side] > 0 and math.isfinite(row[side]) for side in ("ours", "other"))
        assert 0 < row["low"] <= row["ratio"] <= row["high"], row
    tokens = [row for row in rows if row["name"].startswith("tokens")]
    assert len(tokens) == 2 and all(1 <= row["ours"] < row["other"] for row in tokens)
    table = (tmp_path / "bench.md").read_text("utf-8")
    assert len(table.splitlines()) == len(rows) + 2 and all(row["name"] in table for row in rows)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
