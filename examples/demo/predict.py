"""Show what the trained model says of three test pairs: `python examples/demo/predict.py outputs/demo`."""

import json
import sys
from pathlib import Path

# A paraphrase; a near-miss with other words; and one whose words have only changed places, the kind that a minute of
# training does not teach (README.md has the counts).
SHOWN = (0, 8, 46)


def main(run: str) -> int:
    folder, data = Path(run) / "best", Path(run) / "data" / "test.jsonl"
    if not (folder / "config.json").is_file() or not data.is_file():
        print(f"error: there is no finished run in {run}: run `make demo` first", file=sys.stderr)
        return 2
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    rows = [rows[index] for index in SHOWN]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    sentences = [[row[column] for row in rows] for column in ("sentence1", "sentence2")]
    with torch.no_grad():
        probabilities = model(**tokenizer(*sentences, padding=True, return_tensors="pt")).logits.softmax(-1)
    for row, probability in zip(rows, probabilities, strict=True):
        said = model.config.id2label[probability.argmax().item()]
        print(f"  {row['sentence1']}\n  {row['sentence2']}")
        print(f"    model: {said} ({probability.max():.0%}), really: {row['label']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
