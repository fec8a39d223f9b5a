"""kit/metrics.py: the numbers are those that the field counts."""

import pytest

from kit.metrics import classification_metrics


def test_a_class_that_does_not_occur_does_not_count():
    right = [0, 1, 0, 1]
    assert classification_metrics(right, right, num_labels=3) == {"accuracy": 1.0, "f1": 1.0}
    for num_labels in (3, 8):
        found = classification_metrics([2, 1, 0, 1], [2, 1, 0, 0], num_labels=num_labels)
        assert found == {"accuracy": 0.75, "f1": pytest.approx((1 + 2 / 3 + 2 / 3) / 3)}
    predicted_only = classification_metrics([0, 1, 2, 1], [0, 1, 0, 1], num_labels=3)
    assert predicted_only["f1"] == pytest.approx((2 / 3 + 1 + 0) / 3), "predicted wrongly is a class that occurs"


def test_f1_of_two_classes_is_that_of_class_1():
    assert classification_metrics([1, 1, 0, 0], [1, 0, 0, 0], num_labels=2)["f1"] == pytest.approx(2 / 3)
    assert classification_metrics([0, 0], [0, 0], num_labels=2) == {"accuracy": 1.0, "f1": 0.0}
