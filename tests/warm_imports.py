"""Imported once by the fork server of worlds.py, so that each process of a test starts in a tenth of a second."""

import accelerate
import accelerate.utils
import PIL.Image
import simplejpeg
import timm
import torch
import torchvision.transforms.v2
import transformers.models.bert.modeling_bert

import conftest  # puts the templates on the path and the caches aside
import image_classification
import kit.metrics
import text_classification

torch.set_num_threads(1)
