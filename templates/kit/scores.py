"""Scores of a classifier: per class, against the majority, with confidence intervals, and how well it is calibrated."""

import math

import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support


def score_classifier(
    labels: np.ndarray, probabilities: np.ndarray, label_names: list[str], predictions: np.ndarray | None = None
) -> dict:
    """Return the scores of a classifier as a dict that JSON can hold; what is undefined is None.

    `labels` [n] are class ids, `probabilities` [n, k] floats, `predictions` [n] class ids (default: the most probable
    class; give them where the probabilities are rounded). `f1` is that of class 1 for two classes and the macro F1 for
    more, as in kit.metrics. A class in neither labels nor predictions does not count in the macro F1. `low` and `high`
    bound the 95 % interval over samples. Raises `ValueError` for arrays that do not fit together.
    """
    labels, probabilities = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    num_classes = len(label_names)
    if not len(labels) or probabilities.shape != (len(labels), num_classes):
        raise ValueError(
            f"{len(labels)} labels and {num_classes} names need [{len(labels)}, {num_classes}] probabilities"
        )
    if not np.isfinite(probabilities).all():
        raise ValueError("some probabilities are not finite")
    predictions = probabilities.argmax(1) if predictions is None else np.asarray(predictions)
    if len(predictions) != len(labels) or min(labels.min(), predictions.min()) < 0:
        raise ValueError(f"{len(labels)} labels need as many predictions, all of them class ids")

    classes = range(num_classes)
    confusion = confusion_matrix(labels, predictions, labels=classes)
    per_class = precision_recall_fscore_support(labels, predictions, labels=classes, zero_division=np.nan)
    names = ("precision", "recall", "f1", "support")
    return {
        "samples": len(labels),
        **_with_intervals(confusion),
        "majority": _majority(confusion, label_names),
        "classes": [
            {"label": label, **{name: _plain(value) for name, value in zip(names, values, strict=True)}}
            for label, *values in zip(label_names, *per_class, strict=True)
        ],
        "confusion": confusion.tolist(),  # row: label, column: prediction
        "calibration": calibration(probabilities[np.arange(len(labels)), predictions], predictions == labels),
    }


def _plain(value) -> float | int | None:
    """Return a NumPy number as Python's, NaN as None: JSON has no NaN."""
    return None if math.isnan(value) else value.item()


def _summary(right: np.ndarray, of_label: np.ndarray, of_prediction: np.ndarray) -> tuple[float, float, float]:
    """Return accuracy, macro F1 and F1 from the counts [k] of right answers, of labels and of predictions."""
    total = of_label + of_prediction
    f1 = 2 * right / np.maximum(total, 1)
    macro = f1[total > 0].mean()
    return right.sum() / of_label.sum(), macro, f1[1] if len(f1) == 2 else macro


def _with_intervals(confusion: np.ndarray, num_draws: int = 1000) -> dict:
    """Return accuracy, macro F1 and F1, each with its 95 % percentile bootstrap interval (Efron, 1979).

    Drawing n samples with replacement gives a confusion matrix from the multinomial distribution over its cells, so the
    cells are drawn and no sample is touched: time and memory do not grow with n.
    """
    num_classes, num_samples = len(confusion), confusion.sum()
    rows, columns = confusion.nonzero()
    cells = confusion[rows, columns]
    is_right = rows == columns

    def summary(counts: np.ndarray) -> tuple[float, float, float]:
        right, of_label, of_prediction = (
            np.bincount(place, weights=weights, minlength=num_classes)
            for place, weights in ((rows, counts * is_right), (rows, counts), (columns, counts))
        )
        return _summary(right, of_label, of_prediction)

    draw = np.random.default_rng(0)
    draws = [summary(draw.multinomial(num_samples, cells / num_samples)) for _ in range(num_draws)]
    low, high = np.percentile(draws, [2.5, 97.5], axis=0)
    return {
        name: {"value": float(value), "low": float(low[i]), "high": float(high[i])}
        for i, (name, value) in enumerate(zip(("accuracy", "macro_f1", "f1"), summary(cells), strict=True))
    }


def _majority(confusion: np.ndarray, label_names: list[str]) -> dict:
    """Return what the constant answer reaches: always the most frequent label of these samples."""
    of_label = confusion.sum(1)
    most = of_label.argmax()
    right, of_prediction = np.zeros_like(of_label), np.zeros_like(of_label)
    right[most], of_prediction[most] = of_label[most], of_label.sum()
    values = _summary(right, of_label, of_prediction)
    names = ("accuracy", "macro_f1", "f1")
    return {"label": label_names[most], **{name: float(value) for name, value in zip(names, values, strict=True)}}


def calibration(confidence: np.ndarray, is_right: np.ndarray, num_bins: int = 10) -> dict:
    """Return the reliability bins and the expected calibration error (Guo et al., 2017) of predictions.

    `confidence` [n] is the probability given to each prediction. Bins of equal width; empty ones are left out.
    """
    place = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    count, confidences, rights = (
        np.bincount(place, weights=weights, minlength=num_bins) for weights in (None, confidence, is_right)
    )
    return {
        "expected_calibration_error": float(np.abs(rights - confidences).sum() / len(confidence)),
        "bins": [
            {
                "low": i / num_bins,
                "high": (i + 1) / num_bins,
                "count": int(count[i]),
                "confidence": float(confidences[i] / count[i]),
                "accuracy": float(rights[i] / count[i]),
            }
            for i in count.nonzero()[0]
        ],
    }


def confused_pairs(confusion: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (label, prediction, count) of the errors in a confusion matrix [k, k], the most frequent first."""
    errors = np.array(confusion)
    np.fill_diagonal(errors, 0)
    rows, columns = errors.nonzero()
    order = np.argsort(-errors[rows, columns], kind="stable")
    return [(int(rows[i]), int(columns[i]), int(errors[rows[i], columns[i]])) for i in order]
