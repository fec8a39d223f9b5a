"""Imported once by the fork server of worlds.py, so that each process of a test starts in a tenth of a second."""

import contextlib
import importlib

import torch

from conftest import SCRIPT

# What the scripts import where they use it; a project without one of these does not need it.
for name in (SCRIPT, "transformers.models.bert.modeling_bert", "timm", "torchvision.transforms.v2", "kit.metrics"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

torch.set_num_threads(1)
