"""The run that the tests try things on; the made data stand in the script itself."""

from pathlib import Path


def make(folder: Path) -> dict:
    """Return the settings of a small run whose last step is ragged; `folder` is for data that you make here."""
    return {"num_train_epochs": 2, "global_batch_size": 500, "micro_batch_size": 150, "logging_steps": 1}
