"""The loops that people copy today, for `bench.py` to measure against.

Accelerate's is that of its examples nlp_example.py and by_feature/gradient_accumulation.py
(https://github.com/huggingface/accelerate/tree/main/examples): random batches, each padded to its longest row, model,
optimizer, loader and schedule prepared, one micro-batch a step.
"""

from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


def _loader(rows, tokenizer, batch_size: int, shuffle: bool) -> DataLoader:
    def collate(examples: list[dict]):
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    rows = rows.rename_column("label", "labels").remove_columns("length")
    return DataLoader(rows, shuffle=shuffle, collate_fn=collate, batch_size=batch_size)


def bare_loop(model, rows, tokenizer, batch_size: int) -> Iterator[None]:
    """Train without any library around PyTorch, clipping included; yields after each step."""
    loader = _loader(rows, tokenizer, batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 100, 10**6)
    model.train()
    while True:
        for batch in loader:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield


def accelerate_loop(model, rows, tokenizer, batch_size: int) -> Iterator[None]:
    """Train as Accelerate's examples do; yields after each step."""
    accelerator = Accelerator(cpu=True)
    loader = _loader(rows, tokenizer, batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 100, 10**6)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    while True:
        for batch in loader:
            batch.to(accelerator.device)
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            yield


def accelerate_evaluation(model, rows, tokenizer, batch_size: int) -> Callable[[], None]:
    """Return a function that evaluates as Accelerate's examples do, but for the metric."""
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(model, _loader(rows, tokenizer, batch_size, shuffle=False))

    def evaluate() -> None:
        model.eval()
        seen = 0
        for batch in loader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, _ = accelerator.gather_for_metrics((predictions, batch["labels"]))
            seen += len(predictions)
        assert seen == len(rows)

    return evaluate
