"""Fine-tune a timm backbone on labelled images.

    accelerate launch --config_file configs/single_gpu.yaml image_classification.py --config RECIPE.yaml

resnet50 on Oxford-IIIT Pets is known to reach 92 to 94 % top-1 (its example has what was measured). The same
recipe and seed give the same run on any number of processes, before and after a crash; BatchNorm, where it learns, sees
one micro-batch of one process, so that its numbers follow how a step is split.
"""

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveInt,
)

from kit.command_line import start
from kit.errors import UserError
from kit.image_options import check_image_source, check_model_source
from kit.run_directory import check_run_directory
from kit.settings import TrainingSettings

IMAGE_CACHE_GB = 50.0  # of 10^9 bytes: the most that all image caches together may take


@dataclass(kw_only=True)
class Settings(TrainingSettings):
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
    drop_rate: ClosedUnitInterval = 0.0
    """Dropout before the classification layer, or where the model has it."""
    drop_path_rate: ClosedUnitInterval = 0.0
    """Stochastic depth: share of residual branches that are left out, rising with the depth."""
    label_smoothing: ClosedUnitInterval = 0.0
    """Share of a label's weight that is spread over all classes."""
    mixup: NonNegativeFloat = 0.0
    """Blend each image and label with another, by Beta(mixup, mixup). 0: do not. With cutmix, each image gets one."""
    cutmix: NonNegativeFloat = 0.0
    """Paste a part of another image into each, of an area by Beta(cutmix, cutmix). 0: do not. Both decode twice."""
    class_weights: Literal["balanced"] | None = None
    """balanced: weigh each class in the loss by the inverse of its frequency in the training data."""
    head_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the new head. Unset: learning_rate."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    num_train_epochs: PositiveInt = 10
    """Passes over the training data."""
    learning_rate: NonNegativeFloat = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.05
    """For matrices only, not for biases and norms."""
    lr_scheduler_type: Literal["linear", "cosine", "constant_with_warmup", "constant"] = "cosine"
    """Course of the learning rate after the warm-up, counted in optimizer steps."""
    num_workers: NonNegativeInt | None = None
    """Worker processes that load data, for each training process. Unset: one for each spare core."""
    metric_for_best_model: Literal["accuracy", "f1", "loss", "ema_accuracy", "ema_f1", "ema_loss"] = "accuracy"
    """The evaluation's number that decides which model is the best. With ema_ the averaged weights are exported."""
    output_dir: str = "outputs/image_classification"
    """The run directory: everything that a run leaves behind."""


def check(settings: Settings) -> None:
    """Refuse what is known to be wrong before anything heavy is imported or launched."""
    check_image_source(settings.data_dir, settings.dataset_name)
    if settings.metric_for_best_model.startswith("ema_") and settings.ema_decay is None:
        raise UserError(f"metric_for_best_model {settings.metric_for_best_model} needs ema_decay, such as 0.999")
    check_model_source(settings.model_name_or_path)
    check_run_directory(settings)


if __name__ == "__main__":
    settings = start(Settings, check, __doc__)  # before the slow imports: a mistake costs a second

import copy
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.data import default_collate

from kit.batches import EvaluationSampler, build_loader, build_sampler, seed_all
from kit.batchnorm import describe_batchnorm, min_micro_batch_size, synchronise_batchnorm
from kit.dropout import dropout_notes, exact_dropout
from kit.errors import exit_codes
from kit.evaluation import class_weights, describe_labels, gather_in_order, write_predictions
from kit.image_cache import open_cache
from kit.image_checks import check_images
from kit.image_models import freeze_backbone, head_parameters, loading, timm_arguments
from kit.image_sources import ImageSplits, find_images
from kit.images import ImageDataset, Mixing, NormalisedBatches, layout_for
from kit.model_card import TIMM
from kit.run import Run, is_finished
from kit.world import FirstOnNode, build_accelerator, on_main, share_buffers

# ---------------------------------------------------------------------------------------------------------- data


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


def train_transforms(settings: Settings) -> dict:
    """Return what happens to training images: how much is taken, what then to its uint8 [3, size, size], and mixing."""
    from torchvision.transforms import v2

    mixing = Mixing(settings.mixup, settings.cutmix) if settings.mixup or settings.cutmix else None
    augment = v2.Compose([v2.RandomHorizontalFlip()])
    return {"crop_scale": (settings.crop_scale, 1.0), "augment": augment, "mixing": mixing}


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


# --------------------------------------------------------------------------------------------------------- model


def build_model(settings: Settings, num_classes: int):
    """Return the preprocessing that belongs to the model, and the model with a new head, the same on every process."""
    import timm

    seed_all(settings.seed, "model")
    with loading(settings.model_name_or_path):
        arguments = timm_arguments(settings.model_name_or_path, settings.image_size, num_classes)
        drops = {"drop_rate": settings.drop_rate, "drop_path_rate": settings.drop_path_rate}
        arguments |= {name: rate for name, rate in drops.items() if rate}  # not every model takes them
        model = timm.create_model(pretrained=settings.pretrained, **arguments)
        if settings.pretrained:
            model.reset_classifier(num_classes)  # a plain new layer: what some models begin with suits 1,000 classes
        model.set_grad_checkpointing(settings.gradient_checkpointing)
    preprocessing = timm.data.resolve_data_config({"img_size": settings.image_size}, model=model)
    if settings.freeze_backbone:
        freeze_backbone(model)
    if settings.torch_compile:
        model.compile(backend=settings.torch_compile_backend)
    return preprocessing, model


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


def build_ema(settings: Settings, model, optimizer, schedule, device: torch.device):
    """Return timm's moving average of all weights and statistics, which follows each optimizer step, or None.

    Its decay rises as 1 - (1 + step)^(-2/3) up to `ema_decay`.
    """
    from timm.utils import ModelEmaV3

    if settings.ema_decay is None:
        return None
    ema = ModelEmaV3(model, settings.ema_decay, use_warmup=True).to(device)
    optimizer.register_step_post_hook(lambda *_: ema.update(model, schedule.last_epoch + 1))
    return ema.module


def forward(model, batch: dict) -> torch.Tensor:
    """Return the logits [batch, classes] in fp32."""
    return model(batch["image"]).float()


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
    scores = {}
    for prefix, judged in {"": model, "ema_": run.state.get("ema")}.items():
        if judged is None:
            continue
        with accelerator.autocast():  # the average is not prepared
            predicted = predict(accelerator, judged, criterion, loader, run)
        if predicted is None:
            return None
        scores |= {f"{prefix}{name}": value for name, value in on_main(accelerator, score, predicted).items()}
    return scores


# ---------------------------------------------------------------------------------------------------------- main


def export(model, preprocessing: dict, label_names: tuple[str, ...], folder: Path) -> None:
    """Write the model as timm saves it, with its preprocessing and label names."""
    from timm.models import save_for_hf

    plain = copy.deepcopy(model).to("cpu", memory_format=torch.contiguous_format)
    save_for_hf(
        plain, str(folder), {"label_names": list(label_names)}, data_config=preprocessing, safe_serialization=True
    )


def main(settings: Settings) -> None:
    # Accelerator
    check(settings)
    preparation = FirstOnNode(settings.data_dir, settings.dataset_name, settings.model_name_or_path)
    accelerator = build_accelerator(settings)
    num_processes = accelerator.num_processes

    # Data and model
    with preparation:
        splits = load_data(settings)
        preprocessing, model = build_model(settings, len(splits.label_names))
        train, validation, test = build_datasets(settings, splits, preprocessing)
    if settings.sync_batchnorm:
        model = synchronise_batchnorm(accelerator, model)
    model = model.to(accelerator.device, memory_format=layout_for(accelerator.device))
    company = min_micro_batch_size(model, settings.micro_batch_size, settings.global_batch_size, num_processes)
    sampler = build_sampler(
        settings, len(train), num_processes, min_micro_batch_size=company, process_index=accelerator.process_index
    )
    options = settings.micro_batch_size, settings.sync_batchnorm, settings.gradient_checkpointing
    batchnorm_notes = describe_batchnorm(model, sampler, *options)
    data = splits.source
    notes = [*splits.notes, describe_labels(splits.label_names), *batchnorm_notes, *dropout_notes(model)]
    if is_finished(accelerator, settings, data):
        return
    optimizer, schedule = build_optimizer(settings, model, sampler.total_steps)
    ema = build_ema(settings, model, optimizer, schedule, accelerator.device)
    weights = class_weights(settings.class_weights, [item.label for item in splits.train], accelerator.device)
    criterion = torch.nn.CrossEntropyLoss(weight=weights, ignore_index=-1, reduction="none")  # -1: hidden label

    # Prepare (not the schedule: Accelerate would step it once per process)
    def evaluation_loader(rows):
        rows_sampler = EvaluationSampler(
            len(rows), settings.eval_batch_size, num_processes, process_index=accelerator.process_index
        )
        return on_device(accelerator.prepare(build_loader(rows, rows_sampler, collate, settings)))

    def on_device(loader, label_smoothing=0.0):
        mean, std, num_classes = preprocessing["mean"], preprocessing["std"], len(splits.label_names)
        return NormalisedBatches(loader, mean, std, num_classes, accelerator.device, label_smoothing)

    model, optimizer = accelerator.prepare(model, optimizer)
    train_loader = accelerator.prepare(build_loader(train, sampler, collate, settings))
    train_loader = on_device(train_loader, settings.label_smoothing)
    validation_loader = evaluation_loader(validation)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule} | ({} if ema is None else {"ema": ema})

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
        kind = "ema" if settings.metric_for_best_model.startswith("ema_") else "model"
        plain_model.load_state_dict(run.state[kind].state_dict())
        on_main(accelerator, export, plain_model, preprocessing, splits.label_names, run.path / "final")
        run.load_best(kind, plain_model)
        on_main(accelerator, export, plain_model, preprocessing, splits.label_names, run.path / "best")
        for split, rows, items in (("validation", validation, splits.validation), ("test", test, splits.test)):
            if rows is not None:
                predicted = predict(accelerator, model, criterion, evaluation_loader(rows), run)
                if predicted is None:
                    run.leave()
                path = run.path / f"predictions_{split}.csv"
                inputs = {"name": [item.name for item in items], "path": [item.where for item in items]}
                details = on_main(accelerator, write_predictions, path, predicted, splits.label_names, inputs)
                run.note_split(split, details and on_main(accelerator, score, predicted), details)
        run.finish("image-classification", TIMM)
    accelerator.end_training()


if __name__ == "__main__":
    with exit_codes():
        main(settings)
