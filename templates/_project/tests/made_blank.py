"""The run that the tests try things on; the made data stand in the script itself."""

from pathlib import Path


def make(folder: Path) -> dict:
    """Return the settings of a small run whose last step is ragged; `folder` is for data that you make here."""
    sizes = {"global_batch_size": 500, "micro_batch_size": 150, "eval_batch_size": 80}
    return sizes | {"num_train_epochs": 2, "logging_steps": 1}
