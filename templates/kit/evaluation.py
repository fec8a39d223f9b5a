"""Evaluation: every sample predicted exactly once, put back into order; what the labels mean for loss and metrics."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch


def gather_in_order(accelerator, parts: list[dict[str, torch.Tensor]], num_samples: int) -> dict[str, torch.Tensor]:
    """Return the values of all processes in the order of the data set, on the CPU, on every process.

    `parts` holds this process's batches: `sample_id` [n] int64, `weight` [n] (0 marks a filler) and any other
    tensors [n, ...] of the same trailing shape everywhere. Each sample must have been seen exactly once.
    """
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if accelerator.num_processes > 1:
        # A collective needs the same shape everywhere: pad with weight 0.
        values = {name: value.to(accelerator.device) for name, value in values.items()}
        values = {name: accelerator.pad_across_processes(value, dim=0) for name, value in values.items()}
        values = accelerator.gather(values)
    values = {name: value.cpu() for name, value in values.items()}
    is_real = values.pop("weight") > 0
    ids = values.pop("sample_id")[is_real]
    order = ids.argsort()
    assert torch.equal(ids[order], torch.arange(num_samples)), "a sample was missed or predicted twice"
    return {name: value[is_real][order] for name, value in values.items()}


def class_weights(kind: str | None, labels: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Return the weight of each class in the loss, float32 [classes]; None for equal weights.

    'balanced' is n / (classes * count of the class), as in scikit-learn: the mean over the data is 1.
    """
    if kind is None:
        return None
    counts = torch.bincount(torch.as_tensor(labels[:]))
    return (counts.sum() / (len(counts) * counts)).float().to(device)


def printable(text: str) -> str:
    """Return `text` with line ends, control and invisible characters as escapes, so that it stays on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_labels(label_names: tuple[str, ...]) -> str:
    """Return one line for the banner: the labels, and what f1 means for them."""
    shown = [printable(name) for name in label_names]
    f1 = f"f1 is that of {shown[1]}" if len(shown) == 2 else "f1 is the mean over the labels that occur"
    return f"labels {', '.join(shown[:20])}{', ...' if len(shown) > 20 else ''}; {f1}"


def write_predictions(
    path: Path, predicted: dict[str, torch.Tensor], label_names: Sequence[str], inputs: dict[str, Iterable]
) -> dict | None:
    """Write one CSV row for each sample of a split, in its order; return the scores of `kit.scores`.

    Columns: index, those of `inputs`, label (empty where hidden), prediction, and p_LABEL for each label. None is
    returned where labels are hidden. `predicted` holds `output` [n, classes] and `label` [n].
    """
    from kit.scores import score_classifier

    labels, probabilities = predicted["label"].numpy(), predicted["output"].double().softmax(-1).numpy()
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", *inputs, "label", "prediction", *(f"p_{name}" for name in label_names)])
        rows = zip(range(len(labels)), *inputs.values(), strict=True)
        for row, label, shares in zip(rows, labels, probabilities, strict=True):
            names = label_names[label] if label >= 0 else "", label_names[shares.argmax()]
            writer.writerow([*row, *names, *(f"{share:.6f}" for share in shares)])
    return score_classifier(labels, probabilities, list(label_names)) if (labels >= 0).all() else None
