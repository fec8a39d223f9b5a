"""Say of three pairs of sentences whether they mean the same: `python examples/demo/predict.py outputs/demo/best`."""

import sys
from pathlib import Path

PAIRS = [
    ("The nurse gave the old man a letter.", "The old man was given a letter by the nurse."),
    ("The nurse gave the old man a letter.", "The old man gave the nurse a letter."),
    ("After lunch the pilot called the farmer.", "The pilot called the farmer after lunch."),
]


def main(folder: str) -> int:
    if not (Path(folder) / "config.json").is_file():
        print(f"error: there is no model in {folder}: run `make demo` first", file=sys.stderr)
        return 2
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForSequenceClassification.from_pretrained(folder),
    )
    with torch.no_grad():
        encoded = tokenizer(*map(list, zip(*PAIRS, strict=True)), padding=True, return_tensors="pt")
        probabilities = model(**encoded).logits.softmax(-1)
    for (first, second), row in zip(PAIRS, probabilities, strict=True):
        print(f"  {model.config.id2label[row.argmax().item()]:<12} {row.max():4.0%}  {first}  |  {second}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
