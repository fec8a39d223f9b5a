"""Fine-tune a pretrained encoder on sentences or pairs of them.

    accelerate launch --config_file configs/cpu.yaml text_classification.py --config RECIPE.yaml

bert-base-cased on GLUE MRPC reaches about 85 % accuracy and just under 90 % F1 (its example has what was
measured). The same recipe and seed give the same run on any number of processes, before and after a crash.
"""

from kit.stopping import Stopper, catch_signals

if __name__ == "__main__":
    catch_signals()  # before the slow imports below: from here on a signal ends the run in good order

import csv
import hashlib
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
)

from kit import checkpoints
from kit.batches import EvaluationSampler, StepSampler, build_loader, seed_all
from kit.errors import UserError, exit_codes, one_line
from kit.evaluation import Progress, gather_in_order, is_due, note_evaluation
from kit.memory import MemoryGuard, half_of, largest_that_fits
from kit.runlog import RunDirectory, check_run_directory
from kit.settings import parse_settings
from kit.tables import TextSplits, check_text_sources, read_text_splits
from kit.world import (
    FirstOnNode,
    average_gradients,
    build_accelerator,
    check_compile,
    check_precision,
    describe_world,
    on_main,
    share_buffers,
)


@dataclass
class Settings:
    """What to train. Where it runs is the profile's business (configs/)."""

    model_name_or_path: str = "bert-base-cased"
    """A model of the hub, or a folder that save_pretrained wrote."""
    dataset_name: str | None = None
    """A data set of the hub; or give train_file."""
    dataset_config_name: str | None = None
    """Its configuration, such as mrpc of nyu-mll/glue."""
    train_file: str | None = None
    """CSV, TSV, JSON, JSON lines or Parquet."""
    validation_file: str | None = None
    """If neither file nor split exists, validation_fraction of the training data is carved out."""
    test_file: str | None = None
    """Scored once, with the best model; without labels it gets predictions.csv instead."""
    text_columns: list[str] | None = None
    """One or two columns, as '[first, second]'. Unset: the usual names are looked for."""
    label_column: str = "label"
    """Words or whole numbers."""
    validation_fraction: OpenUnitInterval = 0.1
    """Share of the training data that becomes the validation split where there is none; stratified, by seed."""
    max_length: PositiveInt = 128
    """Longer inputs are cut, in tokens."""
    output_dir: str = "outputs/text_classification"
    """The run directory: all that a run leaves behind."""
    overwrite_output_dir: bool = False
    """Delete the run that output_dir holds and start anew."""
    resume_from_checkpoint: str = "auto"
    """auto goes on from the newest complete checkpoint of this run; a path; none."""
    num_train_epochs: PositiveInt = 3
    """Passes over the training data."""
    max_train_steps: PositiveInt | None = None
    """Total number of optimizer steps; overrides num_train_epochs."""
    global_batch_size: PositiveInt = 32
    """Samples in one optimizer step, over all processes. The accumulation is derived from it."""
    micro_batch_size: PositiveInt | Literal["auto"] = 16
    """Samples in one forward pass on one process: as many as fit into memory. auto finds out."""
    eval_batch_size: PositiveInt = 32
    """Samples in one forward pass of an evaluation."""
    learning_rate: NonNegativeFloat = 5e-5
    """Peak learning rate of AdamW."""
    weight_decay: NonNegativeFloat = 0.01
    """On matrices only, not on biases and norms."""
    warmup_ratio: ClosedUnitInterval = 0.1
    """Share of all steps in which the learning rate rises from 0."""
    lr_scheduler_type: Literal["linear", "cosine", "constant_with_warmup", "constant"] = "linear"
    """How the learning rate goes on after the warm-up, counted in optimizer steps."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm once per step; 0: not at all."""
    seed: NonNegativeInt = 42
    """Decides the order of samples, the new layers, dropout and the carved split."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Unset: what the profile says."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    torch_compile: bool = False
    """Compile the model."""
    torch_compile_backend: str = "inductor"
    """Backend of torch.compile."""
    num_workers: NonNegativeInt = 0
    """Worker processes that load data, for each training process."""
    logging_steps: PositiveInt = 10
    """Write a training line every so many steps."""
    eval_steps: PositiveInt | Literal["epoch"] = "epoch"
    """Evaluate every so many steps or at each epoch's end; always at the last step."""
    metric_for_best_model: Literal["accuracy", "f1", "loss"] = "accuracy"
    """Which number of the evaluation decides on the best model."""
    greater_is_better: bool | None = None
    """Direction of that metric. Unset: smaller is better for loss only."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after so many evaluations in a row without improvement."""
    checkpointing_steps: PositiveInt | Literal["epoch"] = "epoch"
    """Save every so many steps or at each epoch's end; always at the last step and with each new best model."""
    checkpoints_total_limit: PositiveInt | None = 2
    """Keep so many checkpoints; the newest and the best always stay."""
    skip_nonfinite_steps: NonNegativeInt = 0
    """Skip up to so many steps whose gradient is not finite instead of stopping; waits for the device each step."""
    max_train_time: PositiveFloat | None = None
    """Seconds after which this start of the run saves and stops."""
    ddp_timeout: PositiveFloat = 600.0
    """Seconds that a process waits for the others before it gives up."""


def is_greater_better(settings: Settings) -> bool:
    """Return the direction of the metric that decides on the best model."""
    is_loss = settings.metric_for_best_model == "loss"
    return not is_loss if settings.greater_is_better is None else settings.greater_is_better


# ---------------------------------------------------------------------------------------------------------- data


def source_of(settings: Settings) -> dict:
    """Return the settings that say where the data come from."""
    names = "train_file validation_file test_file dataset_name text_columns label_column validation_fraction"
    return {name: getattr(settings, name) for name in names.split()}


def check(settings: Settings) -> None:
    """Refuse what is known to be wrong before anything heavy is imported or launched."""
    check_precision(settings.mixed_precision)
    check_text_sources(**source_of(settings))
    check_model_folder(settings.model_name_or_path)
    check_compile(settings.torch_compile, settings.torch_compile_backend)
    check_run_directory(settings)


def check_model_folder(name: str) -> None:
    folder = Path(name)
    if (folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2) and not folder.is_dir():
        raise UserError(f"model_name_or_path: there is no folder {name}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model_name_or_path: folder {name} has no config.json: it holds no saved model")
    if folder.is_dir() and not any(path for kind in ("tokenizer*", "vocab*", "*.model") for path in folder.glob(kind)):
        raise UserError(
            f"model_name_or_path: folder {name} has no tokenizer: save one there with tokenizer.save_pretrained"
        )


def load_data(settings: Settings) -> TextSplits:
    """Read and check the splits; the caller makes sure that one process of a node does it first."""
    return read_text_splits(**source_of(settings), dataset_config_name=settings.dataset_config_name, seed=settings.seed)


def describe_labels(label_names: tuple[str, ...]) -> str:
    f1 = f"f1 is of {label_names[1]}" if len(label_names) == 2 else "f1 is the mean over the labels"
    return f"labels {', '.join(label_names[:20])}{', ...' if len(label_names) > 20 else ''}; {f1}"


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


def evaluation_loader(settings: Settings, rows, collate, num_processes: int):
    sampler = EvaluationSampler(len(rows), settings.eval_batch_size, num_processes, rows["length"])
    return build_loader(rows, sampler, collate, settings.num_workers, settings.seed)


# --------------------------------------------------------------------------------------------------------- model


def build_model(settings: Settings, label_names: tuple[str, ...]):
    """Return the tokenizer and the model with a new classification layer, the same on every process."""
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # they load and write in moments, and every process would draw one
    names = {
        "id2label": dict(enumerate(label_names)),
        "label2id": {name: i for i, name in enumerate(label_names)},
    }
    seed_all(settings.seed, "model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model_name_or_path)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            settings.model_name_or_path,
            num_labels=len(label_names),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **names,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model_name_or_path {settings.model_name_or_path}: cannot be loaded ({one_line(error)[:200]}). Ways on:"
            " a folder with a saved model, a cache (HF_HOME) filled on a machine with a network, or `make demo`"
        ) from error
    if fault := misfit(settings, tokenizer, model, set(report["missing_keys"])):
        raise UserError(f"model_name_or_path {settings.model_name_or_path}: {fault}")
    if settings.gradient_checkpointing:  # by its old name, which is good to below 6: the new one is not in 5.20
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.torch_compile:
        model.compile(backend=settings.torch_compile_backend, dynamic=True)
    return tokenizer, model


def misfit(settings: Settings, tokenizer, model, missing_keys: set[str]) -> str | None:
    """Return why a loaded model cannot do its work, None where it can."""
    body = {name for name, _ in model.base_model.named_parameters(prefix=model.base_model_prefix)}
    if len(body & missing_keys) > len(body) / 2:  # some layers may be new, such as a pooler
        return f"its weights are of another model: {len(body & missing_keys)} of {len(body)} tensors are missing"
    if len(tokenizer) > (known := model.get_input_embeddings().num_embeddings):
        return (
            f"its tokenizer has {len(tokenizer)} tokens, the model knows {known}: save the tokenizer there that belongs"
            " to it"
        )
    if tokenizer.pad_token_id is None:
        return "its tokenizer has no padding token: take an encoder such as bert-base-cased, or set and save one"
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            reserved = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            if settings.max_length > (longest := module.num_embeddings - reserved):
                return f"it reads {longest} tokens at most: set max_length to that or less, not {settings.max_length}"
    return None


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


# ---------------------------------------------------------------------------------------------- loss and evaluation


def forward(model, batch: dict) -> torch.Tensor:
    """Return the logits [batch, classes] in fp32."""
    return model(**batch["inputs"]).logits.float()


def weighted_loss(logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy summed over the samples: the loop divides once, by the samples of the whole step."""
    return (F.cross_entropy(logits, label, reduction="none") * weight).sum()


@torch.no_grad()
def predict(accelerator, model, loader, num_samples: int, stop: Stopper) -> dict[str, torch.Tensor] | None:
    """Return `logits` [n, classes] and `label` [n] in the order of the data; None when all agreed to stop."""
    share_buffers(accelerator, model.eval())
    parts = []
    for batch in loader:
        if stop.poll():
            break
        kept = {"logits": forward(model, batch)} | {name: batch[name] for name in ("label", "sample_id", "weight")}
        parts.append({name: value.cpu() for name, value in kept.items()})
    model.train()
    return None if stop.reason else gather_in_order(accelerator, parts, num_samples)


def score(accelerator, predicted: dict[str, torch.Tensor], prefix: str) -> dict[str, float]:
    """Return loss, number of samples and metrics over all predictions, computed once, the same on every process."""

    def compute() -> dict[str, float]:
        from kit.metrics import classification_metrics

        logits, label = predicted["logits"], predicted["label"]
        metrics = {"loss": F.cross_entropy(logits.double(), label).item(), "samples": len(label)}
        return metrics | classification_metrics(logits.argmax(-1), label, num_labels=logits.shape[1])

    return {f"{prefix}_{name}": value for name, value in on_main(accelerator, compute).items()}


# -------------------------------------------------------------------------------------------------------- memory


def find_micro_batch_size(accelerator, model, loader, sampler: StepSampler, stop: Stopper) -> int:
    """Return the largest micro-batch whose forward and backward pass fits on every process; changes nothing."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a forward pass moves batch statistics
    optimizer_state = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]  # AdamW makes it later

    def fits(size: int) -> bool:
        rows = [loader.dataset[sample] for sample in sampler.heaviest(size)]
        with MemoryGuard(is_on=True) as guard, accelerator.no_sync(model):
            batch = send_to_device(loader.collate_fn(rows), accelerator.device)
            accelerator.backward(weighted_loss(forward(model, batch), batch["label"], batch["weight"]))
        fitted = not guard.ran_out
        model.zero_grad()
        guard.reset()
        return fitted

    model.train()
    found = largest_that_fits(stop, fits, sampler.largest_share)
    del optimizer_state
    for buffer, before in buffers:
        buffer.copy_(before)
    return found


# ---------------------------------------------------------------------------------------------------------- main

HOW_TO_LOAD = """from transformers import pipeline

classify = pipeline("text-classification", "best")
print(classify({"text": "The first sentence.", "text_pair": "The second sentence."}))"""


def export(model, tokenizer, folder: Path) -> None:
    """Write the model as save_pretrained leaves it, with its tokenizer and label names."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_predictions(logits: torch.Tensor, label_names: tuple[str, ...], path: Path) -> None:
    """Write one CSV row for each row of the test split, in its order: index, label, probability."""
    probabilities, ids = logits.softmax(-1).max(-1)
    rows = zip(ids.tolist(), probabilities.tolist(), strict=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "label", "probability"])
        writer.writerows([index, label_names[i], f"{p:.6f}"] for index, (i, p) in enumerate(rows))


def main(settings: Settings) -> None:
    # Accelerator
    check(settings)
    preparation = FirstOnNode(settings.train_file, settings.dataset_name, settings.model_name_or_path)
    accelerator = build_accelerator(settings.mixed_precision, settings.ddp_timeout)
    num_processes, process_index = accelerator.num_processes, accelerator.process_index

    # Data
    with preparation:
        splits = load_data(settings)
        tokenizer, model = build_model(settings, splits.label_names)
        train, validation, test = tokenize(splits, tokenizer, settings.max_length)
    if on_main(accelerator, check_run_directory, settings, splits.source["sha256"]) == "done":
        accelerator.print(f"{settings.output_dir} is done; to run it again: --overwrite_output_dir true")
        return
    total_steps = settings.max_train_steps or settings.num_train_epochs * -(-len(train) // settings.global_batch_size)
    sampler = StepSampler(
        num_samples=len(train),
        global_batch_size=settings.global_batch_size,
        micro_batch_size=1 if settings.micro_batch_size == "auto" else settings.micro_batch_size,
        num_processes=num_processes,
        seed=settings.seed,
        total_steps=total_steps,
        lengths=train["length"],
    )
    collate = PadToLongest(tokenizer)

    # Model, optimizer, schedule
    optimizer, schedule = build_optimizer(settings, model, total_steps)

    # Prepare (not the schedule: Accelerate would step it once per process)
    model, optimizer = accelerator.prepare(model, optimizer)
    train_loader = accelerator.prepare(build_loader(train, sampler, collate, settings.num_workers, settings.seed))
    validation_loader = accelerator.prepare(evaluation_loader(settings, validation, collate, num_processes))
    state = {
        "modules": {"model": accelerator.unwrap_model(model, keep_torch_compile=False)},
        "optimizers": {"optimizer": optimizer},
        "schedules": {"schedule": schedule} | ({"scaler": accelerator.scaler} if accelerator.scaler else {}),
    }

    facts = {"world": describe_world(accelerator), "data": splits.source, "batch": sampler.describe()}
    stop = Stopper(accelerator, settings.max_train_time, settings.ddp_timeout)
    with stop, RunDirectory(accelerator, settings, facts) as run:
        # Resume
        peak = f"{settings.learning_rate:g} at step {round(settings.warmup_ratio * total_steps)}"
        notes = [*splits.notes, describe_labels(splits.label_names)]
        run.introduce(f"{settings.lr_scheduler_type}, up to {peak}, end at step {total_steps}", notes)
        progress = Progress()
        if checkpoint := run.choose_checkpoint():
            checkpoints.restore(checkpoint, **state)
            progress = run.read_progress(checkpoint)
        run.start_log(progress, total_steps, sampler.steps_per_epoch)
        writer = checkpoints.CheckpointWriter(run.path / "checkpoints", settings.checkpoints_total_limit)
        guard = MemoryGuard(is_on=settings.micro_batch_size == "auto")
        if guard.is_on:
            if progress.micro_batch_size is None:
                progress.micro_batch_size = find_micro_batch_size(accelerator, model, train_loader, sampler, stop)
            sampler.micro_batch_size = progress.micro_batch_size
            run.record(batch=sampler.describe())
            run.say(f"memory     micro-batches of {sampler.micro_batch_size} fit: {sampler.describe()['arithmetic']}")
        sampler.start_step = progress.step
        batches = iter(train_loader)
        num_samples, seconds = 0, 0.0  # since the last training line

        # Loop
        model.train()  # from_pretrained leaves it in evaluation mode, without dropout
        while True:
            # Between two steps: evaluate, save, stop. A resumed run enters here, where the stopped one left.
            step = progress.step
            if progress.evaluated_step < step and is_due(step, settings.eval_steps, sampler):
                predicted = predict(accelerator, model, validation_loader, len(validation), stop)
                if predicted is not None:
                    scores = score(accelerator, predicted, "eval")
                    run.log(step, **scores)
                    metric = settings.metric_for_best_model
                    note_evaluation(progress, scores[f"eval_{metric}"], is_greater_better(settings))
            is_impatient = 0 < (settings.early_stopping_patience or 0) <= progress.evaluations_without_improvement
            is_over = step == total_steps or is_impatient
            is_save_due = is_due(step, settings.checkpointing_steps, sampler) or progress.best_step == step
            if progress.saved_step < step and (is_save_due or is_over or stop.reason):
                stop.raise_if_failed(sampler)  # a checkpoint never holds numbers that are not finite
                progress.saved_step = step
                if accelerator.is_main_process:
                    documents = {"progress": asdict(progress), "run": run.identity}
                    writer.save(step, state, documents, progress.best_step)
            if is_over or stop.reason:
                break

            # One step
            began = time.perf_counter()
            step += 1
            seed_all(settings.seed, "step", step, process_index)  # dropout: nothing to save, nothing to restore
            window = sampler.window(step)
            loss_sum = torch.zeros((), device=accelerator.device)
            # DDP averages over the processes and backward() divides by the accumulation: undo both, so that the
            # gradient is that of the mean over the whole step, however it is split.
            scale = num_processes * accelerator.gradient_accumulation_steps / window.num_samples
            for micro_batch in range(window.num_micro_batches):
                batch = next(batches)
                is_last = micro_batch == window.num_micro_batches - 1
                # Gradients are exchanged once per step: with the last pass, or below where that pass may fail.
                exchange = nullcontext() if is_last and not guard.is_on else accelerator.no_sync(model)
                with guard, exchange:
                    loss = weighted_loss(forward(model, batch), batch["label"], batch["weight"])
                    accelerator.backward(loss * scale)
                    loss_sum += loss.detach()
            if guard.is_on and stop.on_any_process(guard.ran_out):
                guard.reset()
                sampler.micro_batch_size = progress.micro_batch_size = half_of(sampler.micro_batch_size)
                run.say(f"memory     ran out at step {step}: again with micro-batches of {sampler.micro_batch_size}")
                optimizer.zero_grad()
                sampler.start_step = progress.step
                batches = iter(train_loader)
                continue
            if guard.is_on:
                average_gradients(accelerator, model)
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
            may_skip = progress.skipped_steps < settings.skip_nonfinite_steps and accelerator.scaler is None
            if may_skip and not grad_norm.isfinite():
                progress.skipped_steps += 1
                counted = f"{progress.skipped_steps} of at most {settings.skip_nonfinite_steps}"
                run.say(f"step {step} is skipped ({counted}): its gradient is not finite")
            else:
                optimizer.step()
                if not accelerator.optimizer_step_was_skipped:  # fp16 skips a step whose scaled gradient overflows
                    schedule.step()
                stop.poll(step, loss_sum, grad_norm if accelerator.scaler is None else loss_sum)
            optimizer.zero_grad()
            progress.step = step
            run.advance(step)
            is_logged = step % settings.logging_steps == 0 or step == total_steps
            mean_loss = accelerator.reduce(loss_sum).item() / window.num_samples if is_logged else None  # waits
            num_samples, seconds = num_samples + window.num_samples, seconds + time.perf_counter() - began
            if is_logged:
                run.log(
                    step,
                    loss=mean_loss,
                    learning_rate=schedule.get_last_lr()[0],
                    grad_norm=grad_norm.item(),
                    samples_per_second=num_samples / seconds,
                )
                num_samples, seconds = 0, 0.0

        # Final evaluation and export
        writer.finish()
        accelerator.wait_for_everyone()  # a process that ends early would make the launcher end the others
        if not is_over:
            run.stop(stop.reason)
        plain_model = state["modules"]["model"]
        if accelerator.is_main_process:
            export(plain_model, tokenizer, run.path / "final")
        best = writer.folder / checkpoints.folder_name(progress.best_step or 0)
        if on_main(accelerator, best.is_dir):
            checkpoints.load_module(best, "model", plain_model)
        else:
            run.say("there is no checkpoint of a best model: the last model is taken as the best")
        if accelerator.is_main_process:
            export(plain_model, tokenizer, run.path / "best")
        results = {
            "skipped_steps": progress.skipped_steps,
            "best_step": progress.best_step,
            f"best_{settings.metric_for_best_model}": progress.best_metric,
        }
        if test is not None:
            loader = accelerator.prepare(evaluation_loader(settings, test, collate, num_processes))
            predicted = predict(accelerator, model, loader, len(test), stop)
            if predicted is None:
                run.stop(stop.reason)
            if (predicted["label"] < 0).any():
                if accelerator.is_main_process:
                    write_predictions(predicted["logits"], splits.label_names, run.path / "predictions.csv")
                run.say(f"test       has no labels: predictions are in {run.path / 'predictions.csv'}")
            else:
                scores = score(accelerator, predicted, "test")
                run.log(step, **scores)
                results |= scores
        run.record(results=results, checkpoint_stalls_in_seconds=writer.stalls)
        run.write_card(f"{settings.model_name_or_path}, fine-tuned to classify text", results, HOW_TO_LOAD)
        run.say(f"done       {run.path}: the model with the best {settings.metric_for_best_model} is in best/")
    accelerator.end_training()


if __name__ == "__main__":
    with exit_codes():
        main(parse_settings(Settings, __doc__))
