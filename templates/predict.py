"""Predict with the model of a finished run.

    python predict.py outputs/a new.csv                   outputs/a/predictions/new.csv
    python predict.py outputs/a photos/ --top_k 3         a folder of images, with or without a folder for each class
    accelerate launch --config_file configs/multi_gpu.yaml predict.py outputs/a 'new/*.parquet' --output new.parquet

Reads whatever the training reads, prepares it as the training did, and keeps rows, their order and all columns. Where
the data have labels, they are scored too.
"""

import argparse
import difflib
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

from kit.errors import UserError, exit_codes, prepare_screen
from kit.predictions import (
    FinishedRun,
    check_names,
    output_for,
    predicted_names,
    predicted_rows,
    read_finished_run,
    scores_path,
    settings_for,
    write_rows,
)
from kit.stopping import catch_signals

PREDICTORS = {  # by the template that trained: imported by name, since a project has only its own
    "text_classification": ("kit.table_predictions", "TextPredictor"),
    "image_classification": ("kit.image_predictions", "ImagePredictor"),
}


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line."""

    def error(self, message: str):
        options = [option for action in self._actions for option in action.option_strings]
        unknown = [word for word in message.split() if word.startswith("--")] if "unrecognized" in message else []
        near = [match for word in unknown for match in difflib.get_close_matches(word, options, n=1)]
        raise UserError(f"{message}{f': did you mean {near[0]}?' if near else ''} (see --help)")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number > 0")
    return int(text)


def parse(args: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "run", metavar="RUN", type=lambda text: Path(text).expanduser(), help="output_dir of a training"
    )
    parser.add_argument("data", metavar="DATA", help="a file, a pattern of files in quotes, or a folder of images")
    parser.add_argument("--output", help=".csv or .parquet; unset: RUN/predictions/NAME_OF_THE_DATA.csv")
    parser.add_argument("--overwrite", choices=["true", "false"], default="false", help="replace that file")
    parser.add_argument("--batch_size", type=positive, help="on one process; unset: eval_batch_size of the run")
    parser.add_argument("--top_k", type=positive, help="also the columns top_1 to top_k: the most probable labels")
    parser.add_argument("--which", choices=["best", "final"], default="best", help="the model of the run")
    return parser.parse_args(args)


def check(options: argparse.Namespace) -> tuple[FinishedRun, Path]:
    """Return the run and the file to write; refuse what is known to be wrong before anything heavy is imported."""
    run = read_finished_run(options.run, options.which)
    module, _ = PREDICTORS[run.template]
    if not Path(__file__).with_name(f"{run.template}.py").is_file():
        raise UserError(f"RUN: {run.path} was trained by {run.template}.py, which is not beside predict.py")
    if (options.top_k or 0) > len(run.label_names):
        raise UserError(f"--top_k {options.top_k}: the model knows {len(run.label_names)} labels")
    importlib.import_module(module).check_data(options.data)
    return run, output_for(run, options.data, options.output, options.overwrite == "true")


if __name__ == "__main__":
    catch_signals()
    prepare_screen()
    with exit_codes(is_start=True):  # before the slow imports: a mistake costs a second
        options = parse(sys.argv[1:])
        check(options)

import torch
from tqdm import tqdm

from kit.batches import EvaluationSampler, build_loader
from kit.world import FirstOnNode, build_accelerator, check_machine, on_main


class Batches:
    """What the `predict` of a template needs of a run: the batches, here with a bar on a terminal."""

    is_stopped = False

    def __init__(self, is_main: bool):
        self.is_main = is_main

    def evaluation_batches(self, loader):
        return tqdm(loader, desc="predicting", unit="batch", disable=None if self.is_main else True)


def loss_of_known(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample, 0 where its label is hidden or not one of the model's."""
    label = label.where(label < output.shape[1], -1)
    return torch.nn.functional.cross_entropy(output, label, ignore_index=-1, reduction="none")


def score_known(predicted: dict[str, torch.Tensor], label_names: tuple[str, ...]) -> dict | None:
    """Return the scores (`kit.scores`) of the samples whose label the model knows; None where there are none."""
    from kit.scores import score_classifier

    labels, probabilities = predicted["label"].numpy(), predicted["output"].double().softmax(-1).numpy()
    is_known = (labels >= 0) & (labels < len(label_names))
    return score_classifier(labels[is_known], probabilities[is_known], list(label_names)) if is_known.any() else None


def describe_scores(scores: dict, num_samples: int) -> list[str]:
    """Return the scores as lines for the screen."""
    lines = [f"scored     {scores['samples']} of {num_samples} samples, which have a known label"]
    for name in ("accuracy", "macro_f1"):
        part = scores[name]
        lines.append(f"{name:<10} {part['value']:.4f} (95 % interval {part['low']:.4f} to {part['high']:.4f})")
    width = max(len(part["label"]) for part in scores["classes"])
    for part in scores["classes"]:
        values = (
            f"{name} {'-' if part[name] is None else f'{part[name]:.3f}'}" for name in ("precision", "recall", "f1")
        )
        lines.append(f"{part['label']:<{width}}   {'  '.join(values)}  of {part['support']}")
    return lines


def main(options: argparse.Namespace) -> None:
    run, output = check(options)
    template = importlib.import_module(run.template)
    module, name = PREDICTORS[run.template]
    settings, notes = settings_for(run, template.Settings, options.batch_size), []
    try:
        check_machine(settings)
    except UserError:
        notes = [f"the run computed in {run.precision}, which this machine has not: in fp32 here"]
        settings = replace(settings, mixed_precision="no")
    preparation = FirstOnNode("predict", str(run.model), options.data)
    accelerator = build_accelerator(settings)
    with preparation:
        predictor = getattr(importlib.import_module(module), name)(template, settings, run, options.data)
    top_k = options.top_k or 0
    check_names(predictor.names, run.label_names, top_k, options.data)

    model = accelerator.prepare_model(predictor.model, evaluation_mode=True)
    count = len(predictor.rows)
    sampler = EvaluationSampler(count, settings.eval_batch_size, accelerator.num_processes, predictor.lengths)
    loader = accelerator.prepare(build_loader(predictor.rows, sampler, predictor.collate, settings))
    loader = predictor.on_device(loader, accelerator.device)
    predicted = template.predict(accelerator, model, loss_of_known, loader, Batches(accelerator.is_main_process))

    def write() -> dict | None:
        probabilities = predicted["output"].double().softmax(-1).numpy()
        names = [*predictor.names, *predicted_names(run.label_names, top_k)]
        write_rows(output, names, predictor.inputs(), predicted_rows(probabilities, run.label_names, top_k))
        scores = score_known(predicted, run.label_names)
        scores_path(output).unlink(missing_ok=True)
        if scores is not None:
            scores_path(output).write_text(json.dumps(scores, indent=1) + "\n", "utf-8")
        return scores

    scores = on_main(accelerator, write)
    for note in [*notes, *predictor.notes]:
        accelerator.print(f"note       {note}")
    for line in describe_scores(scores, count) if scores else []:
        accelerator.print(line)
    accelerator.print(f"predicted  {count} samples with {run.model}: {output}")
    accelerator.end_training()


if __name__ == "__main__":
    with exit_codes():
        main(options)
