"""Score the majority class and a bag of words on sentence pairs: the numbers that a model has to beat.

    python examples/demo/baseline.py outputs/demo/data/train.jsonl outputs/demo/data/test.jsonl

trains on the first file and scores the second. Both are JSON lines with sentence1, sentence2 and label
("paraphrase" or "different"); the demo's are synthetic (pairs.py writes them).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def bag_of_words_baseline(train: list[dict[str, Any]], test: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Accuracy and F1 (of "paraphrase") on `test`: of the majority class in `train`, and of a bag of words.

    The bag of words is a logistic regression on the counts of the words and of the two-word sequences in each
    sentence, and on how many words, and how many sequences, the sentences share and do not share.
    """
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.preprocessing import StandardScaler

    pattern = r"\w+"  # scikit-learn's own leaves out the digits
    counter = CountVectorizer(token_pattern=pattern, ngram_range=(1, 2))
    counter.fit(row[sentence] for row in train for sentence in ("sentence1", "sentence2"))
    analyzers = [CountVectorizer(token_pattern=pattern, ngram_range=(n, n)).build_analyzer() for n in (1, 2)]

    def overlap(row: dict[str, Any]) -> list[int]:
        sets = [(set(analyze(row["sentence1"])), set(analyze(row["sentence2"]))) for analyze in analyzers]
        return [size for first, second in sets for size in (len(first & second), len(first ^ second))]

    scaler = StandardScaler().fit([overlap(row) for row in train])

    def features(rows: list[dict[str, Any]]) -> csr_matrix:
        counts = [counter.transform(row[sentence] for row in rows) for sentence in ("sentence1", "sentence2")]
        return hstack([*counts, csr_matrix(scaler.transform([overlap(row) for row in rows]))]).tocsr()

    labels = [row["label"] == "paraphrase" for row in train]
    expected = [row["label"] == "paraphrase" for row in test]
    model = LogisticRegression(max_iter=1000).fit(features(train), labels)
    predictions = {
        "majority class": [2 * sum(labels) >= len(labels)] * len(test),
        "bag of words": model.predict(features(test)),
    }
    return {
        name: {
            "accuracy": float(accuracy_score(expected, predicted)),
            "f1": float(f1_score(expected, predicted, zero_division=0.0)),
        }
        for name, predicted in predictions.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Majority class and bag of words on sentence pairs.")
    parser.add_argument("train", type=Path, help="JSON lines to train on")
    parser.add_argument("test", type=Path, help="JSON lines to score")
    arguments = parser.parse_args()
    for path in (arguments.train, arguments.test):
        if not path.is_file():
            print(
                f"{path}: no such file; write it with `python examples/demo/pairs.py {path.parent}`",
                file=sys.stderr,
            )
            sys.exit(2)
    scores = bag_of_words_baseline(read_rows(arguments.train), read_rows(arguments.test))
    for name, score in scores.items():
        print(f"{name:<16} accuracy {score['accuracy']:.3f}   F1 {score['f1']:.3f}   on {arguments.test}")


if __name__ == "__main__":
    main()
