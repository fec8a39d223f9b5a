"""Metrics as `evaluate` modules defined here, computed by scikit-learn: no hub, no cache, no files left behind.

`import evaluate` takes seconds, so this module is imported where a metric is computed, never at the top of a script.
"""

import tempfile

import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score

FEATURES = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})


class Accuracy(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(description="Share of right answers.", citation="", features=FEATURES)

    def _compute(self, predictions, references):
        return {"accuracy": float(accuracy_score(references, predictions))}


class F1(evaluate.Metric):
    def _info(self):
        text = "F1 of class 1 for two classes (as GLUE counts it); for more the mean over those that occur."
        return evaluate.MetricInfo(description=text, citation="", features=FEATURES)

    def _compute(self, predictions, references, num_labels):
        # A class in neither predictions nor references has no F1: to count it as 0 would punish right answers.
        how = {"average": "binary", "pos_label": 1} if num_labels == 2 else {"average": "macro"}
        return {"f1": float(f1_score(references, predictions, zero_division=0.0, **how))}


def classification_metrics(predictions, references, num_labels: int) -> dict[str, float]:
    """Return accuracy and F1 of class ids (sequences of int) over `num_labels` classes."""
    # Each module makes a folder when it is built, though it keeps its data in memory: let that go at once.
    with tempfile.TemporaryDirectory() as folder:
        accuracy, f1 = (metric(keep_in_memory=True, cache_dir=folder, seed=0) for metric in (Accuracy, F1))
    columns = {"predictions": predictions, "references": references}
    return accuracy.compute(**columns) | f1.compute(**columns, num_labels=num_labels)
