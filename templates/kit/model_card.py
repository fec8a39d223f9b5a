"""The model card: what was trained on what, the measured numbers, and how to load the model."""

from pathlib import Path

from kit.runlog import short

TORCH = """from safetensors.torch import load_model

model = OwnModel()
load_model(model, "best/model.safetensors")"""

TRANSFORMERS = """from transformers import pipeline

classify = pipeline("text-classification", "best")
print(classify({"text": "The first sentence.", "text_pair": "The second sentence."}))"""

TIMM = """import timm
import torch
from PIL import Image, ImageOps

model = timm.create_model("local-dir:best", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
with torch.no_grad():
    probabilities = model(transform(photo)[None]).softmax(-1)[0]
print(model.pretrained_cfg["label_names"][probabilities.argmax()], probabilities.max().item())"""


def write_card(path: Path, title: str, results: dict, how_to_load: str, facts: dict) -> None:
    """Write README.md of a run directory; `facts` is what run.json says."""
    rows = "\n".join(f"| {name} | {short(value)} |" for name, value in results.items())
    sizes = ", ".join(f"{count} {split}" for split, count in facts["data"]["rows"].items())
    path.write_text(
        f"# {title}\n\n| measured | value |\n| --- | --- |\n{rows}\n\n"
        f"Data: {sizes}.\nTrained on: {facts['world']['summary']}, in {facts['seconds']:.0f} seconds.\n"
        "Settings: settings.yaml; everything else that is known about the run: run.json, metrics.jsonl.\n\n"
        f"```python\n{how_to_load}\n```\n",
        "utf-8",
    )
