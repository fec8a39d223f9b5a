"""Imported once by the fork server of worlds.py, so that each process of a test starts in a tenth of a second."""

import accelerate
import accelerate.utils
import torch
import transformers.models.bert.modeling_bert

import conftest  # puts the templates on the path and the caches aside
import kit.metrics
import text_classification

torch.set_num_threads(1)
