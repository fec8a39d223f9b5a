"""Fine-tune a pretrained encoder on sentences or pairs of them.

    accelerate launch --config_file configs/cpu.yaml text_classification.py --config RECIPE.yaml

bert-base-cased on GLUE MRPC reaches about 85 % accuracy and just under 90 % F1 (its example has what was
measured). The same recipe and seed give the same run on any number of processes, before and after a crash.
"""

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import OpenUnitInterval, PositiveInt

from kit.command_line import start
from kit.run_directory import check_run_directory
from kit.settings import TrainingSettings
from kit.tables import check_text_sources
from kit.text_models import check_model_folder


@dataclass(kw_only=True)
class Settings(TrainingSettings):
    """What to train. Where it runs is the profile's business (configs/)."""

    model_name_or_path: str = "bert-base-cased"
    """A model on the hub, or a folder that save_pretrained wrote."""
    dataset_name: str | None = None
    """A dataset on the hub. Or give train_file."""
    dataset_config_name: str | None = None
    """Configuration of that dataset, such as mrpc of nyu-mll/glue."""
    train_file: str | None = None
    """CSV, TSV, JSON, JSON lines or Parquet; .gz too. A pattern such as 'data/*.csv.gz' reads several files as one."""
    validation_file: str | None = None
    """If there is neither a file nor a split, validation_fraction of the training data is taken."""
    test_file: str | None = None
    """Scored once, with the best model. Without labels it gets predictions.csv instead."""
    text_columns: list[str] | None = None
    """One or two columns, as '[first, second]'. Unset: the usual names, or the only column with words."""
    label_column: str = "label"
    """Labels may be strings, booleans or integers."""
    validation_fraction: OpenUnitInterval = 0.1
    """Share of the training data that becomes the validation split where there is none; stratified, by seed."""
    max_length: PositiveInt = 128
    """Cut longer inputs to this number of tokens."""
    class_weights: Literal["balanced"] | None = None
    """balanced: weigh each class in the loss by the inverse of its frequency in the training data."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    metric_for_best_model: Literal["accuracy", "f1", "loss"] = "accuracy"
    """The evaluation's number that decides which model is the best."""
    output_dir: str = "outputs/text_classification"
    """The run directory: everything that a run leaves behind."""


def source_of(settings: Settings) -> dict:
    """Return the settings that say where the data come from."""
    names = "train_file validation_file test_file dataset_name text_columns label_column validation_fraction"
    return {name: getattr(settings, name) for name in names.split()}


def check(settings: Settings) -> None:
    """Refuse what is known to be wrong before anything heavy is imported or launched."""
    check_text_sources(**source_of(settings))
    check_model_folder(settings.model_name_or_path)
    check_run_directory(settings)


if __name__ == "__main__":
    settings = start(Settings, check, __doc__)  # before the slow imports: a mistake costs a second

import hashlib
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from kit.batches import EvaluationSampler, build_loader, build_sampler, seed_all
from kit.dropout import dropout_notes, exact_dropout
from kit.errors import exit_codes
from kit.evaluation import class_weights, describe_labels, gather_in_order, write_predictions
from kit.model_card import transformers_call
from kit.run import Run, is_finished
from kit.tables import TextSplits, read_text_splits
from kit.text_models import assert_fits, loading, padding_notes, renew_head
from kit.world import FirstOnNode, build_accelerator, on_main, share_buffers

# ---------------------------------------------------------------------------------------------------------- data


def load_data(settings: Settings) -> TextSplits:
    """Read and check the splits; the caller makes sure that one process of a node does it first."""
    return read_text_splits(**source_of(settings), dataset_config_name=settings.dataset_config_name, seed=settings.seed)


def tokenize(splits: TextSplits, tokenizer, max_length: int) -> list:
    """Return train, validation and test (or None) as token ids with their `length`.

    Each is cached beside its split, under all else that decides the result.
    """
    columns = splits.text_columns

    def encode(rows: dict) -> dict:
        encoded = tokenizer(*(rows[column] for column in columns), truncation=True, max_length=max_length)
        return {**encoded, "length": [len(ids) for ids in encoded["input_ids"]]}

    with tempfile.TemporaryDirectory() as folder:  # hashed before its first use, which changes it
        tokenizer.save_pretrained(folder)
        files = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    key = hashlib.sha256(b"\0".join([*files, repr((columns, max_length)).encode()])).hexdigest()[:32]
    return [
        split and split.map(encode, batched=True, remove_columns=list(columns), new_fingerprint=key, desc="tokenizing")
        for split in (splits.train, splits.validation, splits.test)
    ]


class PadToLongest:
    """Collate tokenized rows into tensors [batch, longest row of the batch]."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        own = {name: torch.tensor([row[name] for row in rows]) for name in ("label", "sample_id", "weight")}
        rows = [{name: row[name] for name in self.tokenizer.model_input_names if name in row} for row in rows]
        return {"inputs": dict(self.tokenizer.pad(rows, return_tensors="pt")), **own}


# --------------------------------------------------------------------------------------------------------- model


def build_model(settings: Settings, splits: TextSplits):
    """Return the tokenizer, the model in fp32, the same on every process, and notes for the user."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    name, labels = settings.model_name_or_path, splits.label_names
    seed_all(settings.seed, "model")
    with loading(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            name,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: i for i, label in enumerate(labels)},
            problem_type="single_label_classification",
            dtype=torch.float32,  # whatever the file holds: mixed precision keeps its weights in fp32
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    notes = renew_head(model, AutoConfig.from_pretrained(name), labels)
    assert_fits(model, tokenizer, name, settings.max_length, len(splits.text_columns), set(report["missing_keys"]))
    model.config.pad_token_id = tokenizer.pad_token_id
    if settings.gradient_checkpointing:  # by its old name, which is good to below 6: the new one is not in 5.20
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.torch_compile:
        model.compile(backend=settings.torch_compile_backend, dynamic=True)
    return tokenizer, model, notes + padding_notes(tokenizer)


def build_optimizer(settings: Settings, model, total_steps: int):
    """Return AdamW and its schedule over `total_steps` optimizer steps."""
    from transformers import get_scheduler

    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    warmup_steps = round(settings.warmup_ratio * total_steps)
    return optimizer, get_scheduler(settings.lr_scheduler_type, optimizer, warmup_steps, total_steps)


def forward(model, batch: dict) -> torch.Tensor:
    """Return the logits [batch, classes] in fp32."""
    return model(**batch["inputs"]).logits.float()


# ------------------------------------------------------------------------------------------ training and evaluation


def summed_loss(model, criterion, batch: dict) -> torch.Tensor:
    """Return the loss summed over the samples: a step divides once, by the samples that it has over all processes."""
    return (criterion(forward(model, batch), batch["label"]) * batch["weight"]).sum()


def train_step(accelerator, model, criterion, optimizer, schedule, batches, window, settings: Settings):
    """Make one optimizer step over a window of micro-batches. Returns this process's summed loss and the norm."""
    loss_sum = torch.zeros((), device=accelerator.device)
    # DDP averages over the processes and backward() divides by the accumulation: undo both, so that the gradient is
    # that of the mean over the whole step, however it is split.
    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / window.num_samples
    for is_last in window:
        batch = next(batches)
        with (
            nullcontext() if is_last else accelerator.no_sync(model),  # gradients are exchanged once a step
            exact_dropout(model, batch["sample_id"], settings.seed, window.step),  # the same masks for any split
        ):
            loss = summed_loss(model, criterion, batch)
            accelerator.backward(loss * scale)
        loss_sum += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
    # A gradient that is not finite: fp16's scaler skips the step by itself, skip_nonfinite_steps does where it is set.
    if accelerator.scaler or not settings.skip_nonfinite_steps or grad_norm.isfinite():
        optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            schedule.step()
    optimizer.zero_grad()
    return loss_sum, grad_norm


@torch.no_grad()
def predict(accelerator, model, criterion, loader, run: Run) -> dict[str, torch.Tensor] | None:
    """Return `output` [n, ...], `loss` [n] and `label` [n] in the order of the data; None if the run was stopped."""
    share_buffers(accelerator, model.eval())
    parts = []
    for batch in run.evaluation_batches(loader):
        output = forward(model, batch)
        kept = {"output": output, "loss": criterion(output, batch["label"])}
        kept |= {name: batch[name] for name in ("label", "sample_id", "weight")}
        parts.append({name: value.cpu() for name, value in kept.items()})
    model.train()
    return None if run.is_stopped else gather_in_order(accelerator, parts, len(loader.dataset))


def score(predicted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the mean loss, the number of samples and the metrics over all predictions."""
    from kit.metrics import classification_metrics

    logits, label = predicted["output"], predicted["label"]
    scores = {"loss": predicted["loss"].double().mean().item(), "samples": len(label)}
    return scores | classification_metrics(logits.argmax(-1), label, num_labels=logits.shape[1])


def evaluate(accelerator, model, criterion, loader, run: Run) -> dict[str, float] | None:
    """Return the scores over all samples of `loader`, the same on every process; None if the run was stopped."""
    predicted = predict(accelerator, model, criterion, loader, run)
    return None if predicted is None else on_main(accelerator, score, predicted)


# ---------------------------------------------------------------------------------------------------------- main


def export(model, tokenizer, folder: Path) -> None:
    """Write the model as save_pretrained leaves it, with its tokenizer and label names."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(settings: Settings) -> None:
    # Accelerator
    check(settings)
    preparation = FirstOnNode(settings.train_file, settings.dataset_name, settings.model_name_or_path)
    accelerator = build_accelerator(settings)

    # Data and model
    with preparation:
        splits = load_data(settings)
        tokenizer, model, model_notes = build_model(settings, splits)
        train, validation, test = tokenize(splits, tokenizer, settings.max_length)
    data = splits.source
    notes = [*splits.notes, *model_notes, describe_labels(splits.label_names), *dropout_notes(model)]
    if is_finished(accelerator, settings, data):
        return
    sampler = build_sampler(
        settings, len(train), accelerator.num_processes, train["length"], process_index=accelerator.process_index
    )
    optimizer, schedule = build_optimizer(settings, model, sampler.total_steps)
    weights = class_weights(settings.class_weights, train["label"], accelerator.device)
    criterion = torch.nn.CrossEntropyLoss(weight=weights, ignore_index=-1, reduction="none")  # -1: hidden label

    # Prepare (not the schedule: Accelerate would step it once per process)
    def evaluation_loader(rows):
        rows_sampler = EvaluationSampler(
            len(rows),
            settings.eval_batch_size,
            accelerator.num_processes,
            rows["length"],
            process_index=accelerator.process_index,
        )
        return accelerator.prepare(build_loader(rows, rows_sampler, collate, settings))

    collate = PadToLongest(tokenizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    train_loader = accelerator.prepare(build_loader(train, sampler, collate, settings))
    validation_loader = evaluation_loader(validation)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}

    with Run(accelerator, settings, sampler, state, data, notes) as run:
        # Resume
        run.resume()
        model.train()
        for trial in run.micro_batch_trials(model):  # micro_batch_size: auto
            with trial:
                accelerator.backward(summed_loss(model, criterion, next(iter(train_loader))))
        batches = run.batches(train_loader)

        # Loop: a resumed run enters where the stopped one left
        while True:
            if run.is_evaluation_due():
                run.note_evaluation(evaluate(accelerator, model, criterion, validation_loader, run))
            if run.is_save_due():
                run.save()
            if run.is_over():
                break
            window = run.next_window()
            loss, grad_norm = train_step(accelerator, model, criterion, optimizer, schedule, batches, window, settings)
            run.note_step(loss, grad_norm, schedule.get_last_lr()[0])

        # Export and test
        run.finish_training()
        plain_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        on_main(accelerator, export, plain_model, tokenizer, run.path / "final")
        run.load_best("model", plain_model)
        on_main(accelerator, export, plain_model, tokenizer, run.path / "best")
        for split, rows, texts in (("validation", validation, splits.validation), ("test", test, splits.test)):
            if rows is not None:
                predicted = predict(accelerator, model, criterion, evaluation_loader(rows), run)
                if predicted is None:
                    run.leave()
                path = run.path / f"predictions_{split}.csv"
                inputs = {name: texts[name] for name in splits.text_columns}
                details = on_main(accelerator, write_predictions, path, predicted, splits.label_names, inputs)
                run.note_split(split, details and on_main(accelerator, score, predicted), details)
        run.finish("text-classification", transformers_call(len(splits.text_columns), settings.max_length))
    accelerator.end_training()


if __name__ == "__main__":
    with exit_codes():
        main(settings)
