"""What every test needs: the templates on the path, no network, its own caches, a tiny model and tiny data."""

import json
import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATES = REPOSITORY / "templates"
sys.path.insert(0, str(TEMPLATES))  # where Python looks first when it runs a template

# Before any import of the libraries. No cache of the user's is touched, no hub is asked.
CACHES = tempfile.TemporaryDirectory(prefix="templates-tests-")
os.environ.update(HF_HOME=CACHES.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Several processes share few cores: threads that spin would make each ten times slower.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
    os.environ.pop(name, None)

WORDS = "alpha beta gamma delta cat dog tree house runs sleeps eats sees blue red green old new small large".split()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real MRPC and pets; a test that asks for it is skipped where it is not to be had."""
    folder = os.environ.get("TEMPLATES_DATA")
    if not folder:
        pytest.skip("TEMPLATES_DATA names no folder with the real data (mrpc/, pets/)")
    return Path(folder)


def write_pairs(path: Path, count: int, seed: int = 0, labels=(0, 1)) -> Path:
    """Write PAIRS(count): sentence1, sentence2, label, idx, as JSON lines. Lengths differ a lot."""
    draw = random.Random(f"{path.stem} {seed}")

    def sentence() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 24)))

    rows = [
        {"sentence1": sentence(), "sentence2": sentence(), "label": draw.choice(labels), "idx": i} for i in range(count)
    ]
    rows[0]["label"], rows[1 % count]["label"] = labels[0], labels[-1]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with TINY-BERT in bert/ (dropout on) and bert_still/ (dropout off), and PAIRS as *.jsonl."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("tiny data")  # a path with a space, always
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), "utf-8")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    import torch

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
        write_pairs(folder / f"{split}.jsonl", count)
    return folder


@pytest.fixture(scope="session")
def tiny_settings(tiny) -> dict:
    """Settings of a run of the text template that takes a second: 37 pairs, steps of 8, micro-batches of 3."""
    return {
        "model_name_or_path": str(tiny / "bert"),
        "train_file": str(tiny / "train.jsonl"),
        "validation_file": str(tiny / "validation.jsonl"),
        "test_file": str(tiny / "test.jsonl"),
        "global_batch_size": 8,
        "micro_batch_size": 3,
        "eval_batch_size": 4,
        "learning_rate": 1e-3,
        "max_length": 48,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "ddp_timeout": 30.0,
    }
