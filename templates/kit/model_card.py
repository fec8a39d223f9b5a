"""The model card: what was trained on what, the measured numbers, and how to load the model."""

from pathlib import Path

from kit.runlog import short

TORCH = """from safetensors.torch import load_model

model = OwnModel()
load_model(model, "best/model.safetensors")"""

TRANSFORMERS = """from transformers import pipeline

classify = pipeline("text-classification", "best")
print(classify({texts}, truncation=True, max_length={max_length}))"""

TIMM = """import timm
import torch
from PIL import Image, ImageOps

model = timm.create_model("local-dir:best", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
with torch.no_grad():
    probabilities = model(transform(photo)[None]).softmax(-1)[0]
print(model.pretrained_cfg["label_names"][probabilities.argmax()], probabilities.max().item())"""


def transformers_call(num_texts: int, max_length: int) -> str:
    """Return how to use a text model with its one or two texts, cut as in training."""
    pair = '{"text": "The first sentence.", "text_pair": "The second sentence."}'
    texts = pair if num_texts == 2 else '"A sentence."'
    return TRANSFORMERS.replace("{texts}", texts).replace("{max_length}", str(max_length))


def write_card(path: Path, settings, results: dict, task: str | None, how_to_load: str, facts: dict) -> None:
    """Write README.md of a run directory, with the front matter that the hub reads.

    `task` is the hub's name, such as text-classification; `facts` is what run.json says. Names no path of this machine.
    """
    from huggingface_hub import EvalResult, ModelCardData

    model, dataset = (getattr(settings, name, None) for name in ("model_name_or_path", "dataset_name"))
    is_on_hub = model is not None and not Path(model).exists()
    source = dataset or next(
        (Path(value).name for name in ("train_file", "data_dir") if (value := getattr(settings, name, None))),
        "own data",
    )
    title = f"{Path(model).name} fine-tuned on {source}" if model else f"Trained on {source}"
    measured = {name: value for name, value in results.items() if isinstance(value, int | float)}
    front = ModelCardData(
        model_name=title,
        pipeline_tag=task,
        base_model=model if is_on_hub else None,
        datasets=[dataset] if dataset else None,
        eval_results=[
            EvalResult(task or "other", source, source, name.removeprefix("test_"), value, dataset_split="test")
            for name, value in measured.items()
            if name.startswith("test_") and task
        ],
    )
    rows = [f"| {name} | {short(value)} |" for name, value in measured.items()]
    for split, details in results.items():
        if isinstance(details, dict):
            majority = details["majority"]
            rows += [
                f"| {split}: {name}, 95 % interval | {short(part['low'])} to {short(part['high'])} |"
                for name in ("accuracy", "f1")
                if (part := details[name])["low"] is not None
            ]
            rows.append(f"| {split}: accuracy of always {majority['label']!r} | {short(majority['accuracy'])} |")
    names = [
        entry["label"] for details in results.values() if isinstance(details, dict) for entry in details["classes"]
    ]
    labels = f"Labels: {', '.join(dict.fromkeys(names))}.\n" if names else ""
    sizes = ", ".join(f"{count} {split}" for split, count in facts["data"]["rows"].items())
    table = "\n".join(rows)
    path.write_text(
        f"---\n{front.to_yaml()}\n---\n\n# {title}\n\n| measured | value |\n| --- | --- |\n{table}\n\n{labels}"
        f"Data: {sizes}.\nTrained on: {facts['world']['summary']}, in {facts['seconds']:.0f} seconds.\n"
        "Limits: measured on data like that of training, and on nothing else.\n"
        "Settings: settings.yaml. What else is known about the run: report.html, run.json, metrics.jsonl.\n\n"
        f"```python\n{how_to_load}\n```\n",
        "utf-8",
    )
