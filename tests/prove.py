"""Train tiny networks in every way that must not matter, and print how far the runs are apart: `make prove`.

With everything that draws at random: dropout, stochastic depth, augmentation, mixup and cutmix.
"""

import json
import signal
import sys
import tempfile
from pathlib import Path

import conftest  # noqa: F401 (the templates on the path, no network, own caches)
from made_image_classification import make as make_images
from tiny import make_tiny, settings_for
from worlds import World, largest_difference, lines, run, samples_by_step

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
# way: the starts of one run, each (processes, settings, fault that ends this start and its options)
WAYS = {
    "one process, a step in one pass": [(1, {"micro_batch_size": 8}, None)],
    "micro-batches of 3 (8 = 3 + 3 + 2)": [(1, {"micro_batch_size": 3}, None)],
    "micro-batches of 1": [(1, {"micro_batch_size": 1}, None)],
    "micro-batches as memory allows": [(1, {"micro_batch_size": "auto"}, ("limited_memory", {"limit": 5}))],
    "2 workers load the data": [(1, {"num_workers": 2}, None)],
    "2 processes": [(2, {"micro_batch_size": 4}, None)],
    "2 processes, micro-batches of 3": [(2, {"micro_batch_size": 3}, None)],
    "3 processes (8 = 3 + 3 + 2)": [(3, {"micro_batch_size": 2}, None)],
    "killed in mid-window, resumed": [(1, {}, ("die_in_window", {"call": 11})), (1, {}, None)],
    "killed while saving, resumed": [(1, {}, ("die_while_saving", {"call": 5})), (1, {}, None)],
    "killed twice in an epoch": [
        (1, {}, ("die_in_window", {"call": 9})),
        (1, {}, ("die_in_window", {"call": 5})),
        (1, {}, None),
    ],
    "2 processes, one killed, resumed": [(2, {}, ("die_in_window", {"call": 9, "rank": 1})), (2, {}, None)],
    "stopped on 2, resumed on 1": [(2, {}, ("signal_in_evaluation", {})), (1, {}, None)],
    "stopped on 1, resumed on 3": [(1, {}, ("signal_in_evaluation", {})), (3, {}, None)],
    "compiled (aot_eager)": [(1, COMPILED, None)],
    "activations computed again": [(1, {"gradient_checkpointing": True}, None)],
}
IMAGE_WAYS = {
    "one process, a step in one pass": [(1, {"micro_batch_size": 8}, None)],
    "micro-batches of 3 (8 = 3 + 3 + 2)": [(1, {"micro_batch_size": 3}, None)],
    "2 processes, 2 workers each": [(2, {"micro_batch_size": 2, "num_workers": 2}, None)],
    "3 processes (8 = 3 + 3 + 2)": [(3, {"micro_batch_size": 2}, None)],
    "stopped on 2, resumed on 1": [(2, {}, ("signal_in_evaluation", {})), (1, {}, None)],
    "activations computed again": [(1, {"gradient_checkpointing": True}, None)],
}
LIMIT, LIMIT_COMPILED = 1e-5, 1e-4  # rounding of fp32; other kernels round differently


def train(
    template: str, name: str, starts: list, settings: dict, folder: Path
) -> tuple[list[dict], dict[int, list[int]]]:
    """Do one run, by one or more starts; return its training lines and the samples of each step."""
    slug = "".join(letter if letter.isalnum() else "_" for letter in name)
    settings = settings | {"output_dir": str(folder / slug)}
    for num_processes, changed, fault in starts:
        patches, environment = ["faults:record_samples"], {"SAMPLES": str(folder / f"{slug}.samples")}
        is_last = (num_processes, changed, fault) == starts[-1]
        if fault:
            patches.append(f"faults:{fault[0]}")
            environment["FAULT"] = json.dumps(fault[1])
        options = {"patches": patches, "environment": environment, "template": template}
        if is_last:
            run(num_processes, settings | changed, **options)
        else:
            codes = World(num_processes, settings | changed, **options).wait()
            assert -signal.SIGKILL in codes or set(codes) == {75}, f"{name}: the fault never came: {codes}"
    rows = [
        {key: row[key] for key in ("step", "loss", "grad_norm", "learning_rate")}
        for row in lines(folder / slug, "loss")
    ]
    return rows, samples_by_step(folder / f"{slug}.samples")


def compare(template: str, ways: dict, settings: dict, folder: Path) -> int:
    """Train in each way, print a line for each; return how many are not the same run as the first."""
    print(f"{'way':<38} steps  largest difference  same samples")
    plain, failures = None, 0
    for way, starts in ways.items():
        rows, samples = train(template, way, starts, settings, folder)
        plain = plain or (rows, samples)
        difference, same = largest_difference(plain[0], rows), samples == plain[1]
        is_good = same and difference <= (LIMIT_COMPILED if starts[0][1] == COMPILED else LIMIT)
        failures += not is_good
        mark = "" if is_good else "   <- NOT the same run"
        print(f"{way:<38} {len(rows):>5}  {difference:>18.1e}  {'yes' if same else 'no':>12}{mark}", flush=True)
    return failures


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="prove ") as name:
        folder = Path(name)
        common = {"checkpointing_steps": 2, "num_train_epochs": 1, "eval_steps": 3}
        print("Text: BERT with dropout")
        text = settings_for(make_tiny(folder)) | common | {"test_file": None}
        failures = compare("text_classification", WAYS, text, folder / "text runs")
        print("\nImages: ConvNeXt with dropout, stochastic depth, crops, mirroring, mixup and cutmix")
        images = make_images(folder / "images") | common
        images |= {"drop_rate": 0.2, "drop_path_rate": 0.3, "mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1}
        failures += compare("image_classification", IMAGE_WAYS, images, folder / "image runs")
    count = len(WAYS) + len(IMAGE_WAYS)
    print(f"{count - failures} of {count} ways are the same run")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
