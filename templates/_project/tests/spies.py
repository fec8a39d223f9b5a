"""What a test wants to see of a run from inside: each function gets the script's module before `main`.

Results go to files named after the environment variable SPY.
"""

import copy
import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import torch


def _copied(batch):
    return {name: _copied(part) if isinstance(part, dict) else part.clone() for name, part in batch.items()}


def train_plainly(script) -> None:
    """After `main` on one process, a step in one pass: train on the same batches as plain PyTorch does.

    Writes SPY.json: the numbers of each step, and the loss and number of samples of each evaluation.
    """
    forward, predict, main = script.forward, script.predict, script.main
    start, training, evaluations, criteria = [], [], {}, []

    def seeing_forward(model, batch):
        if torch.is_grad_enabled():
            start or start.append(copy.deepcopy(model))
            training.append(_copied(batch))
        else:
            evaluations[len(training)][-1].append(_copied(batch))
        return forward(model, batch)

    def seeing_predict(accelerator, model, criterion, *others):
        criteria.append(criterion)
        evaluations.setdefault(len(training), []).append([])
        return predict(accelerator, model, criterion, *others)

    def loss_of(model, batch):
        return (criteria[0](forward(model, batch), batch["label"]) * batch["weight"]).sum()

    def run_both(settings):
        main(settings)
        model, rows = start[0], []
        optimizer, schedule = script.build_optimizer(settings, model, len(training))
        for step, batch in enumerate(training, 1):
            model.train()
            with script.exact_dropout(model, batch["sample_id"], settings.seed, step):
                loss = loss_of(model, batch) / len(batch["label"])
                loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            learning_rate = schedule.get_last_lr()[0]
            rows.append(
                {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item(), "learning_rate": learning_rate}
            )
            if step in evaluations:
                model.eval()
                batches = evaluations[step][0]
                with torch.no_grad():
                    total = sum(loss_of(model, batch).item() for batch in batches)
                count = sum(len(batch["label"]) for batch in batches)
                rows.append({"step": step, "eval_loss": total / count, "eval_samples": count})
        with open(f"{os.environ['SPY']}.json", "w") as file:
            json.dump(rows, file)

    script.forward, script.predict, script.main = seeing_forward, seeing_predict, run_both


def count_exchanges(script) -> None:
    """Append a letter to SPY.txt for each exchange of gradients that process 0 takes part in."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    build = script.build_accelerator

    def counting(group, bucket):
        if os.environ["RANK"] == "0":
            with open(f"{os.environ['SPY']}.txt", "a") as file:
                file.write("x")
        return allreduce_hook(group, bucket)

    def seeing_build(*arguments, **keywords):
        accelerator = build(*arguments, **keywords)
        prepare = accelerator.prepare

        def seeing_prepare(*parts):
            prepared = prepare(*parts)
            for part in prepared if isinstance(prepared, tuple) else ():
                if isinstance(part, DistributedDataParallel):
                    part.register_comm_hook(None, counting)
            return prepared

        accelerator.prepare = seeing_prepare
        return accelerator

    script.build_accelerator = seeing_build


def note_saves(script) -> None:
    """Append the step of each checkpoint that is begun to SPY.txt."""
    from kit.checkpoints import CheckpointWriter

    save = CheckpointWriter.save

    def noting(self, step, *arguments):
        with open(f"{os.environ['SPY']}.txt", "a") as file:
            file.write(f"{step}\n")
        return save(self, step, *arguments)

    CheckpointWriter.save = noting


def skip_third_step(script) -> None:
    """Let the third optimizer step count as skipped, as fp16 does when a scaled gradient overflows."""
    from accelerate import Accelerator

    asked = []
    Accelerator.optimizer_step_was_skipped = property(lambda self: asked.append(1) or len(asked) == 3)


def on_a_terminal(script) -> None:
    """Let the progress bar believe that somebody is looking."""
    sys.stderr.isatty = lambda: True


def one_second_a_step(script) -> None:
    """Let the clock that the run reads go on by a second in each step."""
    from kit import run

    train_step, clock = script.train_step, [0.0]

    def replaced(*arguments):
        clock[0] += 1.0
        return train_step(*arguments)

    run.time = SimpleNamespace(perf_counter=lambda: clock[0])
    script.train_step = replaced


def without_test_split(script) -> None:
    """Take the test split away."""
    load = script.load_data

    def replaced(settings):
        splits = load(settings)
        if isinstance(splits, tuple) and len(splits) == 3:
            return (*splits[:2], None)
        return dataclasses.replace(splits, test=[] if isinstance(splits.test, list) else None)

    script.load_data = replaced


def hide_test_labels(script) -> None:
    """Hide the labels of the split of NUM_SAMPLES; append the number of each process that writes predictions."""
    predict, write = script.predict, script.write_predictions

    def replaced(*arguments):
        predicted = predict(*arguments)
        if len(predicted["label"]) == int(os.environ["NUM_SAMPLES"]):
            predicted["label"].fill_(-1)
        return predicted

    def noting(*arguments):
        with open(f"{os.environ['SPY']}.txt", "a") as file:
            file.write(os.environ["RANK"])
        return write(*arguments)

    script.predict, script.write_predictions = replaced, noting


def note_exports(script) -> None:
    """Append the number of the process to SPY.txt for each model that is exported."""
    export = script.export

    def noting(*arguments):
        with open(f"{os.environ['SPY']}.txt", "a") as file:
            file.write(os.environ["RANK"])
        return export(*arguments)

    script.export = noting
