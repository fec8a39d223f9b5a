"""What every test needs: the project on the path, no network, its own caches, and a small run to try things on.

The name of the file made_SCRIPT.py says which script is tested: rename both together.
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
MADE = next(TESTS.glob("made_*.py"))
SCRIPT = MADE.stem.removeprefix("made_")
for folder in (PROJECT, TESTS):
    sys.path.insert(0, str(folder))

# Before any import of the libraries. No cache of yours is touched, no hub is asked.
CACHES = tempfile.TemporaryDirectory(prefix="tests-")
os.environ.update(HF_HOME=CACHES.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Several processes share few cores: threads that spin would make each ten times slower.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> dict:
    """Settings of a small run with a ragged last step, on a path with a space."""
    return importlib.import_module(MADE.stem).make(tmp_path_factory.mktemp("made data"))
