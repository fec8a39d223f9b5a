"""A tiny BERT and tiny data, made on the spot: nothing is downloaded, a run takes a second."""

import json
import random
from pathlib import Path

WORDS = "alpha beta gamma delta cat dog tree house runs sleeps eats sees blue red green old new small large".split()


def write_pairs(path: Path, count: int, seed: int = 0, labels=(0, 1), learnable: bool = False) -> Path:
    """Write PAIRS(count): sentence1, sentence2, label, idx, as JSON lines. Lengths differ a lot.

    The labels have nothing to do with the words, unless they shall be `learnable`: then the first label has the first
    two thirds of WORDS, the others have the last.
    """
    draw = random.Random(f"{path.stem} {seed}")

    def sentence(words) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(2, 24)))

    rows = []
    for i in range(count):
        label = draw.choice(labels) if i > 1 else labels[-i]
        words = WORDS if not learnable else WORDS[:16] if label == labels[0] else WORDS[8:]
        rows.append({"sentence1": sentence(words), "sentence2": sentence(words), "label": label, "idx": i})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def make_tiny(folder: Path, learnable: bool = False) -> Path:
    """Fill a folder with TINY-BERT in bert/ (dropout on) and bert_still/ (dropout off), and PAIRS as *.jsonl."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), "utf-8")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    for name, dropout in (("bert", 0.1), ("bert_still", 0.0)):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        BertForSequenceClassification(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for split, count in (("train", 37), ("validation", 13), ("test", 11)):
        write_pairs(folder / f"{split}.jsonl", count, learnable=learnable)
    return folder


def settings_for(folder: Path) -> dict:
    """Return settings of the text template for such a folder: 37 pairs, steps of 8, micro-batches of 3."""
    return {
        "model_name_or_path": str(folder / "bert"),
        "train_file": str(folder / "train.jsonl"),
        "validation_file": str(folder / "validation.jsonl"),
        "test_file": str(folder / "test.jsonl"),
        "global_batch_size": 8,
        "micro_batch_size": 3,
        "eval_batch_size": 4,
        "learning_rate": 1e-3,
        "max_length": 48,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "ddp_timeout": 30.0,
    }
