"""Faults that a test plants into one start of a run: each function gets the template's module before `main`.

What a fault needs to know (which rank, which call) stands in the environment variable FAULT as JSON.
"""

import json
import multiprocessing
import os
import signal
import time


def _options() -> dict:
    return {"rank": 0, "call": 1} | json.loads(os.environ.get("FAULT", "{}"))


def _is_here() -> bool:
    return int(os.environ.get("RANK", "0")) == _options()["rank"]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner, name: str, action, after: bool = False) -> None:
    """Let `owner.name` do `action()` at its Nth call in the chosen process, before or after its own work."""
    original, calls = getattr(owner, name), []

    def replaced(*arguments, **keywords):
        calls.append(1)
        is_now = _is_here() and len(calls) == _options()["call"]
        if is_now and not after:
            action()
        result = original(*arguments, **keywords)
        if is_now and after:
            action()
        return result

    setattr(owner, name, replaced)


def die_in_window(template) -> None:
    _before(template, "summed_loss", _die)


def die_while_saving(template) -> None:
    from kit import checkpoints

    _before(checkpoints, "save_file", _die, after=True)


def die_before_rename(template) -> None:
    from kit import checkpoints

    _before(checkpoints.os, "replace", _die)


def die_in_evaluation(template) -> None:
    _before(template, "gather_in_order", _die)


def die_after_evaluation(template) -> None:
    _before(template.Run, "note_evaluation", _die, after=True)


def die_in_export(template) -> None:
    _before(template, "export", _die, after=True)


def signal_in_evaluation(template) -> None:
    _before(template, "gather_in_order", lambda: None)
    from kit.stopping import Stopper

    original = Stopper.poll
    calls = []

    def poll(self, step=None, *values):
        if step is None and _is_here():
            calls.append(1)
            if len(calls) == _options()["call"]:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step, *values)

    Stopper.poll = poll


def raise_in_window(template) -> None:
    def fail():
        raise KeyError("the true cause")

    _before(template, "summed_loss", fail)


def hang_in_window(template) -> None:
    _before(template, "summed_loss", lambda: time.sleep(600))


def slow_steps(template) -> None:
    original = template.Run.next_window

    def replaced(run):
        time.sleep(0.05)
        return original(run)

    template.Run.next_window = replaced


def slow_data(template) -> None:
    original = template.load_data

    def replaced(settings):
        time.sleep(20 if _is_here() else 0)
        return original(settings)

    template.load_data = replaced


def not_finite_loss(template) -> None:
    original, calls = template.summed_loss, []

    def replaced(*arguments):
        calls.append(1)
        loss = original(*arguments)
        return loss * float("nan") if _is_here() and len(calls) == _options()["call"] else loss

    template.summed_loss = replaced


def limited_memory(template) -> None:
    """Let a forward pass of more than `limit` samples (after `after` passes: of `then`) raise as a device would."""
    options = _options()
    original, calls = template.forward, []

    def replaced(model, batch):
        calls.append(1)
        limit = options["then"] if len(calls) > options.get("after", 10**9) and _is_here() else options["limit"]
        if model.training and len(batch["label"]) > limit:
            raise template.torch.OutOfMemoryError("CUDA out of memory (planted)")
        return original(model, batch)

    template.forward = replaced


def out_of_memory(template) -> None:
    """Let memory run out inside the `call`th forward or backward pass (`where`) of one process, once."""
    options = _options()
    original, calls = template.forward, []

    def fail(*_):
        raise template.torch.OutOfMemoryError("CUDA out of memory (planted)")

    def replaced(model, batch):
        calls.append(model.training)
        is_now = _is_here() and model.training and sum(calls) == options["call"]
        if is_now and options["where"] == "backward":
            hook = next(model.parameters()).register_hook(lambda grad: hook.remove() or fail())
        elif is_now:
            inner = [module for module in model.modules() if not list(module.children())][-1]
            hook = inner.register_forward_pre_hook(lambda *_: hook.remove() or fail())
        return original(model, batch)

    template.forward = replaced


def out_of_memory_in_evaluation(template) -> None:
    original = template.forward

    def replaced(model, batch):
        if not model.training:
            raise template.torch.OutOfMemoryError("CUDA out of memory (planted)")
        return original(model, batch)

    template.forward = replaced


def own_folder(template) -> None:
    """Let one process see another disk under the name of the run directory."""
    from kit import runlog

    runlog.SHARED_WITHIN = 1.0
    main = template.main

    def replaced(settings):
        if _is_here():
            settings.output_dir += " of another disk"
        return main(settings)

    template.main = replaced


def slow_disk(template) -> None:
    """Let each checkpoint take half a second to write, or as many `seconds` as are asked for."""
    from kit import checkpoints

    write = checkpoints.write

    def replaced(*arguments):
        time.sleep(_options().get("seconds", 0.5))
        return write(*arguments)

    checkpoints.write = replaced


def full_disk(template) -> None:
    """After the first checkpoint no file may grow beyond 40 kB, as with `ulimit -f`."""
    import resource

    from kit import checkpoints

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    _before(checkpoints, "prune", fill, after=True)


def count_tokenizing(template) -> None:
    """Append a line to the file COUNTER each time a split is really tokenized; start with the cache CACHE."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = os.environ["CACHE"]
    original = template.tokenize

    def replaced(splits, tokenizer, *arguments):
        def counting(*texts, **keywords):
            with open(os.environ["COUNTER"], "a") as file:
                file.write(f"{os.environ.get('RANK')} {len(texts[0])}\n")
            return tokenizer(*texts, **keywords)

        counting.save_pretrained = tokenizer.save_pretrained
        return original(splits, counting, *arguments)

    template.tokenize = replaced


def worse_each_time(template) -> None:
    """Let each evaluation find a larger loss than the one before."""
    _judge(template, lambda number: float(number))


def better_each_time(template) -> None:
    """Let each evaluation find a smaller loss than the one before."""
    _judge(template, lambda number: 1 / number)


def no_number(template) -> None:
    """Let each evaluation find nothing that is a number."""
    _judge(template, lambda number: float("nan"))


def _judge(template, loss_of) -> None:
    """Let the Nth evaluation find `loss_of(N)` for every number but the count."""
    original, calls = template.Run.note_evaluation, []

    def replaced(run, scores):
        calls.append(1)
        return original(run, scores and {n: v if n == "samples" else loss_of(len(calls)) for n, v in scores.items()})

    template.Run.note_evaluation = replaced


def break_an_image(template) -> None:
    """Cut a training image in two after all were checked, as a failing disk would."""
    original = template.build_datasets

    def replaced(settings, splits, *others):
        path = splits.train[0].place
        with open(path, "r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) // 2)
        return original(settings, splits, *others)

    template.build_datasets = replaced


def record_samples(template) -> None:
    """Write the samples that are really trained on to SAMPLES.rank: {"step": k}, then a line for each micro-batch."""
    next_window, forward = template.Run.next_window, template.forward

    def write(**row) -> None:
        with open(f"{os.environ['SAMPLES']}.{os.environ.get('RANK', '0')}", "a") as file:
            file.write(json.dumps(row) + "\n")

    def note_step(run):
        window = next_window(run)
        write(step=window.step)
        return window

    def note_samples(model, batch):
        if model.training:
            write(samples=batch["sample_id"][batch["weight"] > 0].tolist())
        return forward(model, batch)

    template.Run.next_window, template.forward = note_step, note_samples


def _in_worker(template, action) -> None:
    """Do `action()` in a data-loading worker of the chosen process when it makes its `call`th training batch."""
    options, collate, calls = _options(), template.PadToLongest.__call__, []

    def replaced(self, rows):
        calls.append(1)
        if _is_here() and multiprocessing.parent_process() and len(calls) == options["call"]:
            action()
        return collate(self, rows)

    template.PadToLongest.__call__ = replaced


def block_a_worker(template) -> None:
    _in_worker(template, lambda: time.sleep(600))


def kill_a_worker(template) -> None:
    _in_worker(template, _die)


def unused_parameters(template) -> None:
    """Give the model a layer that no forward pass uses."""
    original = template.build_model

    def replaced(*arguments):
        tokenizer, model, notes = original(*arguments)
        model.forgotten = template.torch.nn.Linear(2, 2)
        return tokenizer, model, notes

    template.build_model = replaced


def late_time_limit(template) -> None:
    """Let max_train_time count from the first step on, whatever the imports took."""
    from kit import stopping

    original = template.Run.next_window

    def replaced(run):
        if run.progress.step == 0:
            stopping.STARTED = time.monotonic() + 0.5
        return original(run)

    template.Run.next_window = replaced
    stopping.STARTED = time.monotonic() + 1000


def limited_memory_in_backward(template) -> None:
    """Let the backward pass of more than `limit` samples raise as a device would."""
    original, limit = template.forward, _options()["limit"]

    def fail(gradient):
        raise template.torch.OutOfMemoryError("CUDA out of memory (planted)")

    def replaced(model, batch):
        output = original(model, batch)
        if output.requires_grad and len(batch["label"]) > limit:
            output.register_hook(fail)
        return output

    template.forward = replaced
