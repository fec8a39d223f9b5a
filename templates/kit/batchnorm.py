"""BatchNorm, the one layer whose numbers depend on how a step is split: what it needs, and what to tell the user."""

import torch

ENOUGH = 8  # images: with fewer at a time the statistics are mostly noise


def learns_batchnorm(model: torch.nn.Module) -> bool:
    """Return whether some BatchNorm of the model is trained: a frozen one keeps its statistics and needs nothing."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    return any(layer.weight is None or layer.weight.requires_grad for layer in layers)


def min_micro_batch_size(model, micro_batch_size: int | str, global_batch_size: int, num_processes: int) -> int:
    """Return what `StepSampler` fills a micro-batch up to: one image has no statistics, and a few have bad ones.

    The fillers have weight 0 in the loss. They count in the statistics, as another image of the same batch would; with
    DDP the running statistics are those of process 0, which holds the most real images of every step.
    """
    if not learns_batchnorm(model):
        return 1
    share = global_batch_size // num_processes
    size = share if micro_batch_size == "auto" else min(micro_batch_size, share)
    return min(ENOUGH, max(2, size))


def synchronise_batchnorm(accelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with statistics over all processes, under the same names; unchanged where that cannot be."""
    from timm.layers import convert_sync_batchnorm

    is_possible = accelerator.device.type == "cuda" and accelerator.num_processes > 1  # it raises elsewhere
    return convert_sync_batchnorm(model) if is_possible else model


def describe_batchnorm(
    model, sampler, micro_batch_size: int | str, sync_batchnorm: bool, gradient_checkpointing: bool
) -> list[str]:
    """Return what the user should know about BatchNorm in this run."""
    if not learns_batchnorm(model):
        return ["sync_batchnorm has no effect: no BatchNorm is trained in this model"] if sync_batchnorm else []
    notes = []
    is_synchronised = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
    if sync_batchnorm and not is_synchronised:
        notes.append("sync_batchnorm is ignored: it needs several processes on GPUs")
    at_a_time = sampler.min_micro_batch_size * (sampler.num_processes if is_synchronised else 1)
    if at_a_time < ENOUGH:
        notes.append(
            f"BatchNorm sees as few as {at_a_time} images at a time, and its statistics are noisy: raise"
            " global_batch_size and micro_batch_size, or use --sync_batchnorm true (several GPUs), --freeze_backbone"
            " true, or a model with another norm, such as resnet50_gn"
        )
    if gradient_checkpointing:
        notes.append("gradient_checkpointing runs BatchNorm twice a step: its statistics follow the last batches more")
    if micro_batch_size == "auto":
        notes.append("BatchNorm sees one micro-batch: with micro_batch_size auto the numbers follow what fits")
        return notes
    last = sampler.steps_per_epoch
    if fillers := sampler.num_fillers(1):
        notes.append(
            f"for BatchNorm each step is filled up with {fillers} of weight 0; none is needed where a process has"
            " several images and micro_batch_size divides them"
        )
    elif fillers := sampler.num_fillers(last):
        count = sampler.window(last).num_samples
        notes.append(
            f"the last step of an epoch has {count} image{'s' if count > 1 else ''}: none is left out, and {fillers} of"
            f" weight 0 fill{'s' if fillers == 1 else ''} up its micro-batches for BatchNorm"
        )
    return notes
