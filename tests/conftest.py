"""What every test needs: the templates on the path, no network, its own caches, a tiny model and tiny data."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATES = REPOSITORY / "templates"
sys.path.insert(0, str(TEMPLATES))  # where Python looks first when it runs a template

# Before any import of the libraries. No cache of the user's is touched, no hub is asked.
CACHES = tempfile.TemporaryDirectory(prefix="templates-tests-")
os.environ.update(HF_HOME=CACHES.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Several processes share few cores: threads that spin would make each ten times slower.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
    os.environ.pop(name, None)
# `make test` hands its own options on to every make below it.
for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "VENV"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real MRPC and pets; a test that asks for it is skipped where it is not to be had."""
    folder = os.environ.get("TEMPLATES_DATA")
    if not folder:
        pytest.skip("TEMPLATES_DATA names no folder with the real data (mrpc/, pets/)")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """TINY-BERT and PAIRS, as tiny.py makes them, on a path with a space."""
    from tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny data"))


@pytest.fixture(scope="session")
def tiny_settings(tiny) -> dict:
    """Settings of a run of the text template that takes a second: 37 pairs, steps of 8, micro-batches of 3."""
    from tiny import settings_for

    return settings_for(tiny)
