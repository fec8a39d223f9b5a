"""Fine-tune a timm backbone on labelled images.

    accelerate launch --config_file configs/single_gpu.yaml image_classification.py --config RECIPE.yaml

resnet50 on Oxford-IIIT Pets is known to reach 92 to 94 % top-1 (its example has what was measured). The same
recipe and seed give the same run on any number of processes, before and after a crash; BatchNorm, where it learns, sees
one micro-batch of one process, so that its numbers follow how a step is split.
"""

from kit.stopping import Stopper, catch_signals

if __name__ == "__main__":
    catch_signals()  # before the slow imports below: from here on a signal ends the run in good order

import copy
import csv
import os
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
from torch.utils.data import default_collate

from kit import checkpoints
from kit.batches import EvaluationSampler, StepSampler, build_loader, seed_all
from kit.batchnorm import describe_batchnorm, min_micro_batch_size, synchronise_batchnorm
from kit.errors import UserError, exit_codes, one_line
from kit.evaluation import Progress, gather_in_order, is_due, note_evaluation
from kit.image_cache import open_cache
from kit.image_sources import PETS, ImageSplits, check_images, find_images
from kit.images import BatchTransform, ImageDataset
from kit.memory import MemoryGuard, half_of, largest_that_fits
from kit.runlog import RunDirectory, check_run_directory
from kit.settings import parse_settings
from kit.world import (
    FirstOnNode,
    average_gradients,
    build_accelerator,
    check_compile,
    check_precision,
    describe_world,
    on_main,
    share_buffers,
    visible_cores,
)

IMAGE_CACHE_GB = 50.0  # of 10^9 bytes: the most that all image caches together may take


@dataclass
class Settings:
    """What to train. Where it runs is the profile's business (configs/)."""

    model_name_or_path: str = "resnet50"
    """A timm model, such as resnet50 or hf-hub:timm/NAME; a folder in timm's form; a file TIMM_NAME.safetensors."""
    pretrained: bool = True
    """Start from the weights of that name, folder or file; false: from random ones."""
    data_dir: str | None = None
    """A folder with a sub-folder per class, with or without train, validation, test above; or CLASS_NUMBER.jpg."""
    dataset_name: str | None = None
    """oxford-iiit-pet (in data_dir, downloaded if need be), or a data set of the hub."""
    dataset_config_name: str | None = None
    """Its configuration, where it has several."""
    image_column: str | None = None
    """Of a data set of the hub. Unset: the only column of images."""
    label_column: str | None = None
    """Of a data set of the hub. Unset: the only column of classes."""
    validation_fraction: OpenUnitInterval = 0.1
    """Share of the training data that becomes the validation split where there is none; stratified, by seed."""
    image_size: PositiveInt = 224
    """Height and width of what the model sees, in pixels."""
    crop_scale: ClosedUnitInterval = 0.35
    """Least share of an image's area that a training crop takes; 0.08 is usual where weights begin at random."""
    skip_bad_images: bool = False
    """Leave images that cannot be decoded out of the run, counted, instead of stopping with their paths."""
    cache_images: bool = False
    """Decode every image once and keep small copies on disk, for this and later runs."""
    freeze_backbone: bool = False
    """Train the new head only; the statistics of frozen BatchNorm do not move."""
    sync_batchnorm: bool = False
    """BatchNorm over the micro-batches of all processes; on GPUs only."""
    ema_decay: OpenUnitInterval | None = None
    """Keep an exponential moving average of the weights with this decay, reached slowly; evaluated as eval_ema_*."""
    label_smoothing: ClosedUnitInterval = 0.0
    """Share of a label's weight that is spread over all classes."""
    mixup: NonNegativeFloat = 0.0
    """Blend pairs of images and labels, by Beta(mixup, mixup); 0: not at all. With cutmix: one of the two a batch."""
    cutmix: NonNegativeFloat = 0.0
    """Paste a part of one image into another, of an area by Beta(cutmix, cutmix); 0: not at all."""
    output_dir: str = "outputs/image_classification"
    """The run directory: all that a run leaves behind."""
    overwrite_output_dir: bool = False
    """Delete the run that output_dir holds and start anew."""
    resume_from_checkpoint: str = "auto"
    """auto goes on from the newest complete checkpoint of this run; a path; none."""
    num_train_epochs: PositiveInt = 10
    """Passes over the training data."""
    max_train_steps: PositiveInt | None = None
    """Total number of optimizer steps; overrides num_train_epochs."""
    global_batch_size: PositiveInt = 32
    """Samples in one optimizer step, over all processes. The accumulation is derived from it."""
    micro_batch_size: PositiveInt | Literal["auto"] = 16
    """Samples in one forward pass on one process: as many as fit into memory. auto finds out."""
    eval_batch_size: PositiveInt = 32
    """Samples in one forward pass of an evaluation."""
    learning_rate: NonNegativeFloat = 3e-4
    """Peak learning rate of AdamW."""
    head_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the new head. Unset: learning_rate."""
    weight_decay: NonNegativeFloat = 0.05
    """On matrices only, not on biases and norms."""
    warmup_ratio: ClosedUnitInterval = 0.1
    """Share of all steps in which the learning rate rises from 0."""
    lr_scheduler_type: Literal["linear", "cosine", "constant_with_warmup", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up, counted in optimizer steps."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm once per step; 0: not at all."""
    seed: NonNegativeInt = 42
    """Decides the order of samples, crops and mixing, the new layers, dropout and the carved split."""
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Unset: what the profile says."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    torch_compile: bool = False
    """Compile the model."""
    torch_compile_backend: str = "inductor"
    """Backend of torch.compile."""
    num_workers: NonNegativeInt | None = None
    """Worker processes that load data, for each training process. Unset: as many as there are cores to spare."""
    logging_steps: PositiveInt = 10
    """Write a training line every so many steps."""
    eval_steps: PositiveInt | Literal["epoch"] = "epoch"
    """Evaluate every so many steps or at each epoch's end; always at the last step."""
    metric_for_best_model: Literal["accuracy", "f1", "loss", "ema_accuracy", "ema_f1", "ema_loss"] = "accuracy"
    """Which number of the evaluation decides on the best model; with ema_ the averaged weights are exported."""
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
    is_loss = settings.metric_for_best_model in ("loss", "ema_loss")
    return not is_loss if settings.greater_is_better is None else settings.greater_is_better


# ---------------------------------------------------------------------------------------------------------- data


def check(settings: Settings) -> None:
    """Refuse what is known to be wrong before anything heavy is imported or launched."""
    check_precision(settings.mixed_precision)
    if not settings.data_dir and settings.dataset_name in (None, PETS):
        raise UserError("no images: give data_dir (a folder) or dataset_name; for oxford-iiit-pet both")
    if settings.data_dir and settings.dataset_name is None and not Path(settings.data_dir).expanduser().is_dir():
        raise UserError(f"data_dir: there is no folder {settings.data_dir!r}")
    if settings.metric_for_best_model.startswith("ema_") and settings.ema_decay is None:
        raise UserError(f"metric_for_best_model {settings.metric_for_best_model} needs ema_decay, such as 0.999")
    check_model_source(settings.model_name_or_path)
    check_compile(settings.torch_compile, settings.torch_compile_backend)
    check_run_directory(settings)


def check_model_source(name: str) -> None:
    path = Path(name)
    is_path = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or path.suffix == ".safetensors"
    if is_path and not path.exists():
        raise UserError(f"model_name_or_path: there is no folder or file {name}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"model_name_or_path: folder {name} has no config.json: it holds no saved timm model")


def load_data(settings: Settings) -> ImageSplits:
    """Find, split and check the images; the caller makes sure that one process of a node does it first."""
    from huggingface_hub.constants import HF_HOME

    splits = find_images(
        data_dir=settings.data_dir,
        dataset_name=settings.dataset_name,
        dataset_config_name=settings.dataset_config_name,
        image_column=settings.image_column,
        label_column=settings.label_column,
        validation_fraction=settings.validation_fraction,
        seed=settings.seed,
    )
    return check_images(splits, Path(HF_HOME) / "image_scans", settings.skip_bad_images)


def describe_labels(label_names: tuple[str, ...]) -> str:
    f1 = f"f1 is of {label_names[1]}" if len(label_names) == 2 else "f1 is the mean over the labels"
    return f"labels {', '.join(label_names[:20])}{', ...' if len(label_names) > 20 else ''}; {f1}"


def train_transforms(settings: Settings) -> dict:
    """Return what happens to training images: how much is taken, and what then to its uint8 [3, size, size]."""
    from torchvision.transforms import v2

    return {"crop_scale": (settings.crop_scale, 1.0), "augment": v2.Compose([v2.RandomHorizontalFlip()])}


def build_datasets(settings: Settings, splits: ImageSplits, preprocessing: dict) -> list[ImageDataset | None]:
    """Return train, validation and test (None where there is none) as images of the size that the model sees."""
    from huggingface_hub.constants import HF_HOME

    cache = None
    if settings.cache_images:
        cache = open_cache(splits, str(Path(HF_HOME) / "image_caches"), settings.image_size, IMAGE_CACHE_GB)
    common = {"image_size": settings.image_size, "crop_pct": preprocessing["crop_pct"], "cache": cache}
    common |= {"interpolation": preprocessing["interpolation"], "tables": splits.tables}
    return [
        ImageDataset(items, **common, **(train_transforms(settings) if items is splits.train else {}))
        if items
        else None
        for items in (splits.train, splits.validation, splits.test)
    ]


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Stack rows into image uint8 [batch, 3, size, size], label, sample_id and weight [batch]."""
    batch = default_collate(rows)
    return batch | {"weight": batch["weight"].float()}  # Apple's devices have no float64


def count_workers(settings: Settings) -> int:
    """Return the workers of one training process: the cores that its node has for it, but one, where it is not set."""
    cores = visible_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cores - 1, 1), 16) if settings.num_workers is None else settings.num_workers


def evaluation_loader(settings: Settings, rows, collate, num_processes: int):
    sampler = EvaluationSampler(len(rows), settings.eval_batch_size, num_processes)
    return build_loader(rows, sampler, collate, count_workers(settings), settings.seed)


# --------------------------------------------------------------------------------------------------------- model


def build_model(settings: Settings, num_classes: int):
    """Return the preprocessing that belongs to the model, and the model with a new head, the same on every process."""
    import timm
    from safetensors import SafetensorError

    name, path, overlay = settings.model_name_or_path, Path(settings.model_name_or_path), None
    if path.is_dir():
        name = f"local-dir:{path}"
    elif path.suffix == ".safetensors":
        name, overlay = path.stem, {"file": str(path)}
    seed_all(settings.seed, "model")
    try:
        arguments = timm.models.resolve_model_input_args(
            name, {"img_size": settings.image_size}, pretrained_cfg_overlay=overlay, num_classes=num_classes
        )
        model = timm.create_model(pretrained=settings.pretrained, **arguments)
        if settings.pretrained:
            model.reset_classifier(num_classes)  # a plain new layer: what some models begin with suits 1,000 classes
        model.set_grad_checkpointing(settings.gradient_checkpointing)
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        similar = timm.list_models(f"*{name.split('.')[0]}*")[:3]
        hint = f"a timm name such as {', '.join(similar)}; " if similar else ""
        raise UserError(
            f"model_name_or_path {settings.model_name_or_path}: cannot be loaded ({one_line(error)[:200]}). Ways on:"
            f" {hint}a folder or file with timm weights, a cache (HF_HOME) filled on a machine with a network,"
            " --pretrained false"
        ) from error
    preprocessing = timm.data.resolve_data_config({"img_size": settings.image_size}, model=model)
    if settings.freeze_backbone:
        model.requires_grad_(False)
        for parameter in head_parameters(model):
            parameter.requires_grad_(True)
    if settings.torch_compile:
        model.compile(backend=settings.torch_compile_backend)
    return preprocessing, model


def head_parameters(model) -> list[torch.nn.Parameter]:
    """Return the parameters of the classification layer, or layers: some models have two."""
    layers = model.get_classifier()
    return [
        parameter for layer in (layers if isinstance(layers, tuple) else (layers,)) for parameter in layer.parameters()
    ]


def train_mode(model) -> None:
    """Do as model.train(), but leave what is frozen in evaluation mode: the statistics of its BatchNorm do not move."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def build_ema(settings: Settings, model, device: torch.device):
    """Return timm's moving average of all weights and statistics, or None. Its decay rises as 1 - (1 + step)^(-2/3)."""
    from timm.utils import ModelEmaV3

    return settings.ema_decay and ModelEmaV3(model, settings.ema_decay, use_warmup=True).to(device)


def build_optimizer(settings: Settings, model, total_steps: int):
    """Return AdamW and its schedule over `total_steps` optimizer steps."""
    from transformers import get_scheduler

    head = {id(parameter) for parameter in head_parameters(model)}
    head_rate = settings.learning_rate if settings.head_learning_rate is None else settings.head_learning_rate
    groups = []
    for is_head, rate in ((False, settings.learning_rate), (True, head_rate)):
        part = [p for p in model.parameters() if p.requires_grad and (id(p) in head) == is_head]
        matrices = [parameter for parameter in part if parameter.ndim >= 2]
        vectors = [parameter for parameter in part if parameter.ndim < 2]
        groups += [
            {"params": matrices, "weight_decay": settings.weight_decay, "lr": rate},
            {"params": vectors, "weight_decay": 0.0, "lr": rate},
        ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.learning_rate)
    warmup_steps = round(settings.warmup_ratio * total_steps)
    return optimizer, get_scheduler(settings.lr_scheduler_type, optimizer, warmup_steps, total_steps)


# ---------------------------------------------------------------------------------------------- loss and evaluation


def forward(model, batch: dict) -> torch.Tensor:
    """Return the logits [batch, classes] in fp32."""
    return model(batch["image"]).float()


def weighted_loss(logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy summed over the samples: the loop divides once, by the samples of the whole step."""
    return (F.cross_entropy(logits, label, reduction="none") * weight).sum()


@torch.no_grad()
def predict(
    accelerator, model, loader, num_samples: int, stop: Stopper, transform: BatchTransform, ema=None
) -> dict[str, torch.Tensor] | None:
    """Return `logits` (and `ema_logits`) [n, classes] and `label` [n] in the order of the data; None: all stop."""
    model.eval()
    for module in (model, ema) if ema is not None else (model,):
        share_buffers(accelerator, module)  # the statistics of BatchNorm are those of process 0
    parts = []
    for batch in map(transform, loader):
        if stop.poll():
            break
        kept = {"logits": forward(model, batch)}
        if ema is not None:
            with accelerator.autocast():
                kept["ema_logits"] = forward(ema, batch)
        kept |= {name: batch[name] for name in ("label", "sample_id", "weight")}
        parts.append({name: value.cpu() for name, value in kept.items()})
    train_mode(model)
    return None if stop.reason else gather_in_order(accelerator, parts, num_samples)


def score(accelerator, predicted: dict[str, torch.Tensor], prefix: str) -> dict[str, float]:
    """Return loss, number of samples and metrics over all predictions, computed once, the same on every process."""

    def compute() -> dict[str, float]:
        from kit.metrics import classification_metrics

        label = predicted["label"]
        scores = {"samples": len(label)}
        for kind in ("", "ema_"):
            if (logits := predicted.get(f"{kind}logits")) is not None:
                metrics = {"loss": F.cross_entropy(logits.double(), label).item()}
                metrics |= classification_metrics(logits.argmax(-1), label, num_labels=logits.shape[1])
                scores |= {f"{kind}{name}": value for name, value in metrics.items()}
        return scores

    return {f"{prefix}_{name}": value for name, value in on_main(accelerator, compute).items()}


# -------------------------------------------------------------------------------------------------------- memory


def find_micro_batch_size(
    accelerator, model, loader, sampler: StepSampler, stop: Stopper, transform: BatchTransform
) -> int:
    """Return the largest micro-batch whose forward and backward pass fits on every process; changes nothing."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a forward pass moves batch statistics
    optimizer_state = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]  # AdamW makes it later

    def fits(size: int) -> bool:
        rows = [loader.dataset[sample] for sample in sampler.heaviest(size)]
        with MemoryGuard(is_on=True) as guard, accelerator.no_sync(model):
            batch = transform(send_to_device(loader.collate_fn(rows), accelerator.device), training=True)
            accelerator.backward(weighted_loss(forward(model, batch), batch["label"], batch["weight"]))
        fitted = not guard.ran_out
        model.zero_grad()
        guard.reset()
        return fitted

    train_mode(model)
    found = largest_that_fits(stop, fits, sampler.largest_share)
    del optimizer_state
    for buffer, before in buffers:
        buffer.copy_(before)
    return found


# ---------------------------------------------------------------------------------------------------------- main

HOW_TO_LOAD = """import timm
import torch
from PIL import Image, ImageOps

model = timm.create_model("local-dir:best", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
with torch.no_grad():
    probabilities = model(transform(photo)[None]).softmax(-1)[0]
print(model.pretrained_cfg["label_names"][probabilities.argmax()], probabilities.max().item())"""


def export(model, preprocessing: dict, label_names: tuple[str, ...], folder: Path) -> None:
    """Write the model as timm saves it, with its preprocessing and label names."""
    from timm.models import save_for_hf

    plain = copy.deepcopy(model).to("cpu", memory_format=torch.contiguous_format)
    save_for_hf(
        plain, str(folder), {"label_names": list(label_names)}, data_config=preprocessing, safe_serialization=True
    )


def write_predictions(logits: torch.Tensor, splits: ImageSplits, path: Path) -> None:
    """Write one CSV row for each image of the test split, in its order: name, label, probability."""
    probabilities, ids = logits.softmax(-1).max(-1)
    rows = zip(ids.tolist(), probabilities.tolist(), strict=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "label", "probability"])
        names = [item.name for item in splits.test]
        writer.writerows([name, splits.label_names[i], f"{p:.6f}"] for name, (i, p) in zip(names, rows, strict=True))


def main(settings: Settings) -> None:
    # Accelerator
    check(settings)
    preparation = FirstOnNode(settings.data_dir, settings.dataset_name, settings.model_name_or_path)
    accelerator = build_accelerator(settings.mixed_precision, settings.ddp_timeout)
    num_processes, process_index = accelerator.num_processes, accelerator.process_index

    # Data
    with preparation:
        splits = load_data(settings)
        preprocessing, model = build_model(settings, len(splits.label_names))
        train, validation, test = build_datasets(settings, splits, preprocessing)
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
        min_micro_batch_size=min_micro_batch_size(
            model, settings.micro_batch_size, settings.global_batch_size, num_processes
        ),
    )
    transform = BatchTransform(
        preprocessing["mean"],
        preprocessing["std"],
        num_classes=len(splits.label_names),
        device=accelerator.device,
        label_smoothing=settings.label_smoothing,
        mixup=settings.mixup,
        cutmix=settings.cutmix,
    )

    # Model, optimizer, schedule
    if settings.sync_batchnorm:
        model = synchronise_batchnorm(accelerator, model)
    batchnorm_notes = describe_batchnorm(
        model,
        sampler,
        sync_batchnorm=settings.sync_batchnorm,
        gradient_checkpointing=settings.gradient_checkpointing,
        micro_batch_size=settings.micro_batch_size,
    )
    if accelerator.device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    ema = build_ema(settings, model, accelerator.device)
    optimizer, schedule = build_optimizer(settings, model, total_steps)

    # Prepare (not the schedule: Accelerate would step it once per process)
    model, optimizer = accelerator.prepare(model, optimizer)
    train_loader = accelerator.prepare(build_loader(train, sampler, collate, count_workers(settings), settings.seed))
    validation_loader = accelerator.prepare(evaluation_loader(settings, validation, collate, num_processes))
    state = {
        "modules": {"model": accelerator.unwrap_model(model, keep_torch_compile=False)}
        | ({} if ema is None else {"ema": ema.module}),
        "optimizers": {"optimizer": optimizer},
        "schedules": {"schedule": schedule} | ({"scaler": accelerator.scaler} if accelerator.scaler else {}),
    }

    facts = {"world": describe_world(accelerator), "data": splits.source, "batch": sampler.describe()}
    stop = Stopper(accelerator, settings.max_train_time, settings.ddp_timeout)
    with stop, RunDirectory(accelerator, settings, facts) as run:
        # Resume
        peak = f"{settings.learning_rate:g} at step {round(settings.warmup_ratio * total_steps)}"
        notes = [*splits.notes, describe_labels(splits.label_names), *batchnorm_notes]
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
                progress.micro_batch_size = find_micro_batch_size(
                    accelerator, model, train_loader, sampler, stop, transform
                )
            sampler.micro_batch_size = progress.micro_batch_size
            run.record(batch=sampler.describe())
            run.say(f"memory     micro-batches of {sampler.micro_batch_size} fit: {sampler.describe()['arithmetic']}")
        sampler.start_step = progress.step
        batches = iter(train_loader)
        num_samples, seconds = 0, 0.0  # since the last training line

        # Loop
        train_mode(model)
        while True:
            # Between two steps: evaluate, save, stop. A resumed run enters here, where the stopped one left.
            step = progress.step
            if progress.evaluated_step < step and is_due(step, settings.eval_steps, sampler):
                predicted = predict(accelerator, model, validation_loader, len(validation), stop, transform, ema)
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
                batch = transform(next(batches), training=True)
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
                if ema is not None:
                    ema.update(state["modules"]["model"], step)
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
        weights = "ema" if settings.metric_for_best_model.startswith("ema_") else "model"
        plain_model.load_state_dict(state["modules"][weights].state_dict())
        if accelerator.is_main_process:
            export(plain_model, preprocessing, splits.label_names, run.path / "final")
        best = writer.folder / checkpoints.folder_name(progress.best_step or 0)
        if on_main(accelerator, best.is_dir):
            checkpoints.load_module(best, weights, plain_model)
        else:
            run.say("there is no checkpoint of a best model: the last model is taken as the best")
        if accelerator.is_main_process:
            export(plain_model, preprocessing, splits.label_names, run.path / "best")
        results = {
            "skipped_steps": progress.skipped_steps,
            "best_step": progress.best_step,
            f"best_{settings.metric_for_best_model}": progress.best_metric,
        }
        if test is not None:
            loader = accelerator.prepare(evaluation_loader(settings, test, collate, num_processes))
            predicted = predict(accelerator, model, loader, len(test), stop, transform)
            if predicted is None:
                run.stop(stop.reason)
            if (predicted["label"] < 0).any():
                if accelerator.is_main_process:
                    write_predictions(predicted["logits"], splits, run.path / "predictions.csv")
                run.say(f"test       has no labels: predictions are in {run.path / 'predictions.csv'}")
            else:
                scores = score(accelerator, predicted, "test")
                run.log(step, **scores)
                results |= scores
        run.record(results=results, checkpoint_stalls_in_seconds=writer.stalls)
        run.write_card(f"{settings.model_name_or_path}, fine-tuned to classify images", results, HOW_TO_LOAD)
        run.say(f"done       {run.path}: the model with the best {settings.metric_for_best_model} is in best/")
    accelerator.end_training()


if __name__ == "__main__":
    with exit_codes():
        main(parse_settings(Settings, __doc__))
