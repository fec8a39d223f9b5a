"""Imported once by the fork server of worlds.py, so that each process of a test starts in a tenth of a second."""

import accelerate  # noqa: F401
import accelerate.utils  # noqa: F401
import conftest  # noqa: F401 (puts the templates on the path and the caches aside)
import kit.metrics  # noqa: F401
import text_classification  # noqa: F401
import torch
import transformers.models.bert.modeling_bert  # noqa: F401

torch.set_num_threads(1)
