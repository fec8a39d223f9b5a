"""Write the model of a finished run as ONNX, and compare it with PyTorch's on inputs of several sizes.

    python export.py outputs/a                            outputs/a/onnx/model.onnx, from outputs/a/best
    python export.py outputs/a --which final              from outputs/a/final

Batch size and, for texts, length are free. The file's metadata has `labels` (a JSON list, in the order of the logits),
`task`, and `preprocessing`: what the inputs of training went through. Texts are tokenized with the tokenizer in best/.
"""

import argparse
import importlib.util
import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.errors import UserError, exit_codes, one_line
from kit.report_reading import read_run_files

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # between the logits: both compute in fp32, in another order
LARGEST_FILE = 2**31 - 2**20  # bytes: ONNX keeps the weights of a larger model in a second file


@dataclass
class Exported:
    """A trained model and what has to be known to use it."""

    task: str
    model: object  # nn.Module; its forward takes the inputs in order and returns the logits [batch, classes]
    labels: list[str]
    preprocessing: dict
    make_inputs: Callable[[int, int], dict]  # tensors by name, of a batch size and a length
    free: dict[int, str]  # dimensions of every input that are free
    sizes: list[tuple[int, int]]  # batch size and length: what is compared; the first is exported with


def find_model(run: Path, which: str) -> tuple[Path, dict, dict]:
    """Return the folder of a run's model, the configuration in it, and the run's settings."""
    files = read_run_files(run, with_metrics=False)
    folder = run / which
    if not folder.is_dir():
        raise UserError(f"{run} has no {which}/: its status is {files.status}, and a model is written at the end")
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no config.json that says how to build the model: export your own nn.Module with"
            " torch.onnx.export where you build it"
        ) from None
    if not files.settings:
        raise UserError(f"{run}: settings.yaml cannot be read, which says how the inputs were prepared")
    return folder, config, files.settings


def load_text(folder: Path, settings: dict) -> Exported:
    """Return a text model; its inputs are what its tokenizer makes, [batch, length] each."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config
    draw = torch.Generator().manual_seed(0)
    words = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]

    def make_inputs(batch: int, length: int) -> dict:
        lengths = [length, *torch.randint(1, length + 1, (batch - 1,), generator=draw).tolist()]
        chosen = [torch.randint(len(words), (n,), generator=draw).tolist() for n in lengths]
        rows = {"input_ids": [[words[i] for i in row] for row in chosen]}
        if "token_type_ids" in tokenizer.model_input_names:
            types = max(getattr(config, "type_vocab_size", 1), 1)
            rows["token_type_ids"] = [[min(i * 2 // n, types - 1) for i in range(n)] for n in lengths]
        return dict(tokenizer.pad(rows, return_tensors="pt"))

    class Logits(torch.nn.Module):
        def __init__(self, names: list[str]):
            super().__init__()
            self.model, self.names = model, names

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(self.names, inputs, strict=True))).logits

    longest = settings["max_length"]
    return Exported(
        "text-classification",
        Logits(list(make_inputs(1, 1))).eval(),
        [config.id2label[i] for i in range(config.num_labels)],
        {name: settings.get(name) for name in ("text_columns", "max_length")},
        make_inputs,
        {0: "batch", 1: "length"},
        [(2, min(longest, 11)), (1, 1), (1, longest), (5, min(longest, 7)), (3, longest)],
    )


def load_image(folder: Path, config: dict) -> Exported:
    """Return an image model; its input is `image` [batch, 3, height, width], normalised."""
    import timm
    import torch

    # exportable: layers are built from operations that ONNX has.
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, exportable=True).eval()
    preprocessing = timm.data.resolve_model_data_config(model)
    draw = torch.Generator().manual_seed(0)
    return Exported(
        "image-classification",
        model,
        config["label_names"],
        preprocessing,
        lambda batch, _: {"image": torch.randn(batch, *preprocessing["input_size"], generator=draw)},
        {0: "batch"},
        [(2, 0), (1, 0), (5, 0)],
    )


def convert(exported: Exported, path: Path) -> None:
    """Write the model as ONNX, with its labels and preprocessing in the metadata."""
    import onnx
    import torch

    inputs = exported.make_inputs(*exported.sizes[0])
    free = {number: torch.export.Dim(name) for number, name in exported.free.items()}
    size = sum(parameter.numel() * parameter.element_size() for parameter in exported.model.parameters())
    program = torch.onnx.export(
        exported.model,
        tuple(inputs.values()),
        input_names=list(inputs),
        output_names=["logits"],
        dynamo=True,
        dynamic_shapes=((free,) * len(inputs),) if exported.task.startswith("text") else (free,),
        verbose=False,
    )
    metadata = {"labels": exported.labels, "task": exported.task, "preprocessing": exported.preprocessing}
    for name, value in metadata.items():
        program.model.metadata_props[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    program.save(path, external_data=size > LARGEST_FILE)
    onnx.checker.check_model(path)


def compare(exported: Exported, path: Path) -> list[tuple[list[int], float]]:
    """Return, for each size, the shape of the input and the largest difference between ONNX Runtime and PyTorch."""
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = []
    for size in exported.sizes:
        inputs = exported.make_inputs(*size)
        with torch.no_grad():
            expected = exported.model(*inputs.values())
        (logits,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
        if logits.shape != expected.shape:
            return [*found, (list(next(iter(inputs.values())).shape), float("inf"))]
        difference = (torch.from_numpy(logits) - expected).abs().max().item()
        found.append((list(next(iter(inputs.values())).shape), difference))
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--format", choices=["onnx"], default="onnx")
    parser.add_argument("--which", choices=["best", "final"], default="best")
    options = parser.parse_args(arguments)
    run = options.run.expanduser()
    folder, config, settings = find_model(run, options.which)
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UserError(f"the export needs {', '.join(missing)}, not installed here: pip install '.[onnx]'")

    # The exporter reports on each of its passes; what goes wrong it raises.
    warnings.filterwarnings("ignore", module=r"torch\.(onnx|export)")
    logging.disable(logging.WARNING)
    exported = load_image(folder, config) if "pretrained_cfg" in config else load_text(folder, settings)
    target = run / "onnx"
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=run) as unfinished:
        path = Path(unfinished) / "model.onnx"
        try:
            convert(exported, path)
        except Exception as error:
            raise UserError(
                f"{folder}: the exporter of torch cannot write this model ({one_line(error)[:300]})"
            ) from error
        differences = compare(exported, path)
        for shape, difference in differences:
            print(f"input {shape}: largest difference from PyTorch {difference:.1e}", flush=True)
        if not all(difference <= TOLERANCE for _, difference in differences):  # NaN is no small difference
            raise UserError(f"{folder}: ONNX Runtime and PyTorch differ by more than {TOLERANCE}: nothing is written")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for file in Path(unfinished).iterdir():
            file.replace(target / file.name)
    print(target / "model.onnx")


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
