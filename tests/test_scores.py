"""The scores of a classifier, against scikit-learn and against the bootstrap done sample by sample."""

import json
import tracemalloc

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score

from kit.scores import confused_pairs, score_classifier


def made(num_samples: int, num_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return labels [n] of unequal frequency and probabilities [n, k] that often favour them."""
    draw = np.random.default_rng(seed)
    labels = np.minimum(draw.geometric(0.35, num_samples) - 1, num_classes - 1)
    logits = draw.normal(size=(num_samples, num_classes))
    logits[np.arange(num_samples), labels] += 1.5
    probabilities = np.exp(logits)
    return labels, probabilities / probabilities.sum(1, keepdims=True)


def names(num_classes: int) -> list[str]:
    return [f"label {i}" for i in range(num_classes)]


def one_hot(predictions: list[int], num_classes: int) -> np.ndarray:
    return np.eye(num_classes)[predictions]


@pytest.mark.parametrize("num_classes", [2, 5])
def test_scores_are_those_of_scikit_learn(num_classes):
    labels, probabilities = made(400, num_classes)
    predictions = probabilities.argmax(1)
    scores = score_classifier(labels, probabilities, names(num_classes))
    assert scores["samples"] == 400
    assert scores["accuracy"]["value"] == pytest.approx(accuracy_score(labels, predictions))
    assert scores["macro_f1"]["value"] == pytest.approx(f1_score(labels, predictions, average="macro"))
    how = "binary" if num_classes == 2 else "macro"
    assert scores["f1"]["value"] == pytest.approx(f1_score(labels, predictions, average=how))
    for name, score in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
        of_classes = [row[name] for row in scores["classes"]]
        assert of_classes == pytest.approx(score(labels, predictions, average=None).tolist())
    assert [row["support"] for row in scores["classes"]] == np.bincount(labels).tolist()
    assert np.array(scores["confusion"]).sum() == 400
    assert scores["confusion"][1][0] == ((labels == 1) & (predictions == 0)).sum()

    constant = DummyClassifier(strategy="most_frequent").fit(labels, labels).predict(labels)
    assert scores["majority"]["label"] == f"label {constant[0]}"
    assert scores["majority"]["accuracy"] == pytest.approx(accuracy_score(labels, constant))
    assert scores["majority"]["macro_f1"] == pytest.approx(f1_score(labels, constant, average="macro"))
    assert scores["majority"]["f1"] == pytest.approx(f1_score(labels, constant, average=how))


@pytest.mark.parametrize("num_classes", [3, 8])
def test_a_class_in_neither_labels_nor_predictions_does_not_count(num_classes):
    scores = score_classifier([2, 1, 0, 0], one_hot([2, 1, 0, 1], num_classes), names(num_classes))
    assert scores["macro_f1"]["value"] == pytest.approx(7 / 9)
    for row in scores["classes"][3:]:
        assert row == {"label": row["label"], "precision": None, "recall": None, "f1": None, "support": 0}
    right = score_classifier([0, 1, 1], one_hot([0, 1, 1], num_classes), names(num_classes))
    assert right["macro_f1"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_a_class_that_is_never_predicted_has_no_precision_and_counts_with_f1_0():
    scores = score_classifier([0, 1, 2], one_hot([0, 1, 1], 3), names(3))
    assert scores["classes"][2] == {"label": "label 2", "precision": None, "recall": 0.0, "f1": 0.0, "support": 1}
    assert scores["macro_f1"]["value"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    json.dumps(scores, allow_nan=False)


def test_the_interval_is_that_of_drawing_samples_with_replacement():
    labels, probabilities = made(150, 4)
    predictions = probabilities.argmax(1)
    scores = score_classifier(labels, probabilities, names(4))
    draw = np.random.default_rng(1)
    drawn = []
    for _ in range(2000):
        picked = draw.integers(0, 150, 150)
        right = (labels[picked] == predictions[picked]).mean()
        drawn.append((right, f1_score(labels[picked], predictions[picked], average="macro", zero_division=0.0)))
    for i, name in enumerate(("accuracy", "macro_f1")):
        low, high = np.percentile(np.array(drawn)[:, i], [2.5, 97.5])
        # Both are estimates from 1000 and 2000 draws; the interval itself is 0.16 wide.
        assert scores[name]["low"] == pytest.approx(low, abs=0.012)
        assert scores[name]["high"] == pytest.approx(high, abs=0.012)
        assert scores[name]["low"] < scores[name]["value"] < scores[name]["high"]
    assert score_classifier(labels, probabilities, names(4)) == scores


def test_200_000_samples_of_37_classes_need_little_more_memory_than_they_take():
    labels, probabilities = made(200_000, 37)
    tracemalloc.start()
    scores = score_classifier(labels, probabilities, names(37))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scores["samples"] == 200_000
    assert peak < 1.5 * probabilities.nbytes


def test_reliability_bins_are_those_of_scikit_learn():
    labels, probabilities = made(500, 3)
    calibration = score_classifier(labels, probabilities, names(3))["calibration"]
    confidence, is_right = probabilities.max(1), probabilities.argmax(1) == labels
    share, mean = calibration_curve(is_right, confidence, n_bins=10)
    assert [part["accuracy"] for part in calibration["bins"]] == pytest.approx(share.tolist())
    assert [part["confidence"] for part in calibration["bins"]] == pytest.approx(mean.tolist())
    counts = [part["count"] for part in calibration["bins"]]
    assert sum(counts) == 500
    error = sum(count * abs(a - b) for count, a, b in zip(counts, share, mean, strict=True)) / 500
    assert calibration["expected_calibration_error"] == pytest.approx(error)


def test_the_last_bin_holds_full_certainty():
    bins = score_classifier([0, 1, 1], one_hot([0, 1, 0], 2), names(2))["calibration"]["bins"]
    assert bins == [{"low": 0.9, "high": 1.0, "count": 3, "confidence": 1.0, "accuracy": pytest.approx(2 / 3)}]


def test_predictions_are_taken_as_given_where_rounding_made_a_tie():
    scores = score_classifier([1, 1], np.full((2, 2), 0.5), names(2), predictions=[1, 1])
    assert scores["accuracy"]["value"] == 1.0


def test_confused_pairs_come_with_the_most_frequent_first():
    assert confused_pairs([[5, 1, 0], [4, 9, 2], [0, 0, 7]]) == [(1, 0, 4), (1, 2, 2), (0, 1, 1)]


@pytest.mark.parametrize(
    ("labels", "probabilities", "says"),
    [
        ([], np.zeros((0, 2)), "0 labels"),
        ([0, 1], [[0.5, 0.5]], "2 labels and 2 names"),
        ([0, 1], np.full((2, 3), 1 / 3), "2 names"),
        ([0, -1], [[0.5, 0.5]] * 2, "class ids"),
        ([0, 1], [[0.5, 0.5], [np.nan, 0.5]], "not finite"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(labels, probabilities, says):
    with pytest.raises(ValueError, match=says):
        score_classifier(labels, probabilities, names(2))
