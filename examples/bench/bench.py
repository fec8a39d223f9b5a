"""Measure what these templates cost and gain, each as a ratio: below 1 is quicker than the other.

    PYTHONPATH=templates python examples/bench/bench.py                    # TEMPLATES_DATA=FOLDER: on the real MRPC

Both sides of a ratio take turns in the same process, on one CPU thread, and every round gives one ratio: the table has
the median and the range of all rounds. CPU time is counted, so that other programs disturb less; waiting for a disk is
counted by the clock. `peer.py` has Accelerate's own loop as its users write it. Writes bench.json, bench.md and
bench.png into --output_dir. `--toy` makes everything small: it shows that the bench works, and its numbers say nothing.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one core is what is measured

import datasets
import torch
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

import peer
import text_classification as template
from kit.batches import EvaluationSampler, StepSampler, build_loader, build_sampler
from kit.checkpoints import CheckpointWriter, choose, restore
from kit.run import Run
from kit.world import build_accelerator

REPOSITORY = Path(__file__).resolve().parents[2]
BATCH, VOCABULARY = 16, 1000


@dataclass
class Row:
    """One line of the table: the median of a ratio with its range, and the medians of both sides."""

    name: str
    ours: float
    other: float
    unit: str
    ratio: float
    low: float
    high: float
    against: str


@dataclass
class Size:
    """How much of everything is measured."""

    rounds: int = 7
    steps: int = 60
    rows: int = 2000
    num_samples: int = 10_000_000
    far_step: int = 100_000
    processes: tuple[int, ...] = (1, 8, 64, 512, 4096)
    layers: int = 70  # of 384 x 384, and 11.5 million numbers of embedding
    starts: int = 3


TOY = Size(2, 3, 64, 20_000, 100, (1, 64), 1, 1)


def interleaved(
    rounds: int, sides: dict[str, Callable[[], object]], clock=time.process_time, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each side in each round; who is first changes from round to round."""
    seconds = {name: [] for name in sides}
    for number in range(warm_ups + rounds):
        for name in list(sides) if number % 2 else reversed(sides):
            began = clock()
            sides[name]()
            seconds[name].append(clock() - began)
    return {name: values[warm_ups:] for name, values in seconds.items()}


def row(name: str, ours: list[float], other: list[float], against: str, unit: str = "ms", scale: float = 1e3) -> Row:
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    medians = (scale * statistics.median(side) for side in (ours, other))
    return Row(name, *medians, unit, statistics.median(ratios), min(ratios), max(ratios), against)


# --------------------------------------------------------------------------------------------------- made things


def make_tokenizer(folder: Path) -> BertTokenizerFast:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCABULARY - 5))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), "utf-8")
    return BertTokenizerFast(str(folder / "vocab.txt"))


def make_rows(lengths: list[int]) -> datasets.Dataset:
    """Return tokenized rows of these lengths, as the text template has them."""
    draw = random.Random(0)
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[draw.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths],
            "token_type_ids": [[0] * length for length in lengths],
            "attention_mask": [[1] * length for length in lengths],
            "label": [draw.randrange(2) for _ in lengths],
            "length": lengths,
        }
    )


def make_model(width: int = 32) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2, "num_hidden_layers": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **shape, **still))


def pair_lengths(count: int) -> tuple[list[int], str]:
    """Return the lengths of sentence pairs, and where they are from: MRPC in words, or made ones like its own."""
    if folder := os.environ.get("TEMPLATES_DATA"):
        lines = (Path(folder) / "mrpc" / "train.jsonl").read_text("utf-8").splitlines()
        pairs = [json.loads(line) for line in lines][:count]
        return [len(f"{pair['sentence1']} {pair['sentence2']}".split()) + 3 for pair in pairs], "MRPC, words"
    draw = random.Random(0)
    return [min(max(round(draw.gauss(53, 14)), 16), 103) for _ in range(count)], "made lengths"


# ---------------------------------------------------------------------------------------------------------- rows


def measure_loop(size: Size, settings, accelerator, tokenizer) -> list[Row]:
    """Steps of a tiny model, where the loop itself is most of what can be seen."""
    rows = make_rows([32] * size.rows)
    collate = template.PadToLongest(tokenizer)
    with contextlib.ExitStack() as stack:
        model = make_model()
        sampler = build_sampler(settings, len(rows), 1, rows["length"], process_index=0)
        optimizer, schedule = template.build_optimizer(settings, model, sampler.total_steps)
        criterion = torch.nn.CrossEntropyLoss(reduction="none")
        model, optimizer = accelerator.prepare(model, optimizer)
        loader = accelerator.prepare(build_loader(rows, sampler, collate, settings))
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        run = stack.enter_context(Run(accelerator, settings, sampler, state, {"sha256": {}, "rows": {}}))
        run.resume()
        model.train()
        batches = run.batches(loader)

        def ours() -> None:
            for _ in range(size.steps):
                assert not (run.is_evaluation_due() or run.is_save_due() or run.is_over())
                window = run.next_window()
                values = template.train_step(
                    accelerator, model, criterion, optimizer, schedule, batches, window, settings
                )
                run.note_step(*values, schedule.get_last_lr()[0])

        bare = peer.bare_loop(make_model(), rows, tokenizer, BATCH)
        plain = peer.accelerate_loop(make_model(), rows, tokenizer, BATCH)
        sides = {
            "ours": ours,
            "bare": lambda: [next(bare) for _ in range(size.steps)],
            "accelerate": lambda: [next(plain) for _ in range(size.steps)],
        }
        found = {
            name: [value / size.steps for value in values] for name, values in interleaved(size.rounds, sides).items()
        }
    return [
        row("a step of a tiny model", found["ours"], found["bare"], "a bare PyTorch loop"),
        row("a step of a tiny model", found["ours"], found["accelerate"], "Accelerate's example"),
    ]


def measure_padding(size: Size) -> list[Row]:
    lengths, source = pair_lengths(size.rows)
    steps = StepSampler(len(lengths), BATCH, BATCH, 1, 0, -(-len(lengths) // BATCH), lengths)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    batches = {
        "ours": [steps.samples(step) for step in range(1, steps.total_steps + 1)],
        "random": [order[start : start + BATCH] for start in range(0, len(order), BATCH)],
    }
    real = sum(lengths)
    tokens = {
        name: sum(max(lengths[i] for i in batch) * len(batch) for batch in cut) / real for name, cut in batches.items()
    }
    return [
        row(f"tokens computed per real one ({source})", [tokens["ours"]], [other], against, "tokens", 1)
        for against, other in (("random batches", tokens["random"]), ("padded to 128", 128 * len(lengths) / real))
    ]


def measure_evaluation(size: Size, settings, accelerator, tokenizer) -> list[Row]:
    lengths, _ = pair_lengths(size.rows)
    rows, model = make_rows(lengths), make_model(128).eval()
    sampler = EvaluationSampler(len(rows), BATCH, 1, rows["length"], process_index=0)
    loader = accelerator.prepare(build_loader(rows, sampler, template.PadToLongest(tokenizer), settings))

    @torch.no_grad()
    def ours() -> None:
        assert sum(len(template.forward(model, batch)) for batch in loader) == len(rows)

    evaluate = peer.accelerate_evaluation(model, rows, tokenizer, BATCH)
    found = interleaved(size.rounds, {"ours": ours, "peer": evaluate})
    return [row("an evaluation", found["ours"], found["peer"], "Accelerate's example")]


def measure_checkpoints(size: Size, accelerator, folder: Path) -> list[Row]:
    layers = [torch.nn.Linear(384, 384) for _ in range(size.layers)]
    model = torch.nn.Sequential(torch.nn.Embedding(30_000 if size.layers > 1 else 30, 384), *layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    accelerator.free_memory()
    accelerator.prepare(model, optimizer)
    writer, steps = CheckpointWriter(folder / "ours", 1), itertools.count(1)
    stalls, whole, others, loads, their_loads = [], [], [], [], []
    for _ in range(size.rounds + 1):
        began = time.process_time()
        writer.save(next(steps), state, {}, None)
        writer.finish()  # in training it goes on beside the next steps
        whole.append(time.process_time() - began)
        stalls.append(writer.stalls[-1])
        began = time.perf_counter(), time.process_time()
        accelerator.save_state(str(folder / "peer"))
        others.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        began = time.process_time()
        restore(choose(writer.folder, "auto")[0], state)
        loads.append(time.process_time() - began)
        began = time.process_time()
        accelerator.load_state(str(folder / "peer"))
        their_loads.append(time.process_time() - began)
    waits, costs = zip(*others[1:], strict=True)
    return [
        row("a checkpoint holds the loop up (clock)", stalls[1:], list(waits), "save_state"),
        row("a checkpoint's whole cost, hashed and synced", whole[1:], list(costs), "save_state"),
        row("a checkpoint verified and loaded", loads[1:], their_loads[1:], "load_state, unverified"),
    ]


def measure_resume(size: Size) -> list[Row]:
    def ours(step: int) -> None:
        sampler = StepSampler(size.num_samples, BATCH, BATCH, 1, 0, size.num_samples // BATCH, process_index=0)
        sampler.start_step = step
        assert len(next(iter(sampler))) == BATCH

    loader = DataLoader(range(size.num_samples), BATCH, shuffle=True, collate_fn=len)
    sides = {
        "near": lambda: ours(10),
        "far": lambda: ours(size.far_step),
        "peer": lambda: next(iter(skip_first_batches(loader, size.far_step))),
    }
    found = interleaved(min(size.rounds, 3), sides)
    name = f"first batch after step {size.far_step:,} of {size.num_samples:,} samples"
    return [
        row(name, found["far"], found["near"], "after step 10"),
        row(name, found["far"], found["peer"], "skip_first_batches"),
    ]


def measure_sampler(size: Size) -> list[Row]:
    """The sampler of one process in the middle of so many, through Accelerate's shard, 16 samples a step for each."""
    result = []
    for num_processes in size.processes:
        index, num_samples = num_processes // 2, 8 * BATCH * num_processes
        steps = StepSampler(num_samples, BATCH * num_processes, BATCH, num_processes, 0, 10**9, process_index=index)
        steps.samples(1)
        plain = BatchSampler(RandomSampler(range(num_samples)), BATCH, drop_last=True)
        ours = iter(BatchSamplerShard(steps, num_processes, index, even_batches=False))
        theirs = iter(
            BatchSamplerShard(itertools.chain.from_iterable(itertools.repeat(plain)), num_processes, index, False)
        )
        sides = {
            "ours": lambda ours=ours: [next(ours) for _ in range(8)],
            "peer": lambda theirs=theirs: [next(theirs) for _ in range(8)],
        }
        found = {name: [value / 8 for value in values] for name, values in interleaved(size.rounds, sides).items()}
        name = f"sampler, one of {num_processes:,} process{'es' if num_processes > 1 else ''}"
        result.append(row(name, found["ours"], found["peer"], "BatchSampler and RandomSampler"))
    return result


def measure_starts(size: Size) -> list[Row]:
    script, profile = REPOSITORY / "templates/text_classification.py", REPOSITORY / "configs/cpu.yaml"
    launch = [REPOSITORY / "templates/launch.py", "--config_file", profile]
    mistake = [script, "--learning_rat", "1"]
    commands = {
        "torch": (0, ["-c", "import torch"]),
        "help": (0, [script, "--help"]),
        "mistake": (2, mistake),
        "launched": (2, [*launch, *mistake]),
    }

    def children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def start(code: int, command: list) -> None:
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, timeout=120)
        assert done.returncode == code, done.stderr.decode()

    sides = {name: lambda given=given: start(*given) for name, given in commands.items()}
    found = interleaved(size.starts, sides, children, warm_ups=0)  # what they import has been read from disk by now
    return [
        row("--help", found["help"], found["torch"], "import torch", "s", 1),
        row("a mistake in an option", found["mistake"], found["torch"], "import torch", "s", 1),
        row("the same through launch.py", found["launched"], found["mistake"], "the script alone", "s", 1),
    ]


# -------------------------------------------------------------------------------------------------------- output


def as_table(rows: list[Row]) -> str:
    lines = ["| what | ours | the other | ratio | range | against |", "| --- | --- | --- | --- | --- | --- |"]
    for one in rows:
        spread = f"{one.low:.3g} to {one.high:.3g}"
        sides = f"{one.ours:.3g} {one.unit} | {one.other:.3g} {one.unit}"
        lines.append(f"| {one.name} | {sides} | {one.ratio:.3g} | {spread} | {one.against} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw each ratio with its range on a logarithmic axis; left of the line these templates are quicker."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(rows):
        colour = "#4477aa" if one.ratio <= 1 else "#ee6677"
        axes.plot([one.low, one.high], [place, place], color=colour, linewidth=2)
        axes.plot(one.ratio, place, "o", color=colour)
        axes.annotate(f"{one.ratio:.2g}", (one.ratio, place), (0, 6), textcoords="offset points", ha="center")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{one.name} / {one.against}" for one in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.set_xlabel("ratio: ours / the other (below 1: ours is quicker)")
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/bench"))
    parser.add_argument("--toy", action="store_true", help="everything small: does the bench work?")
    options = parser.parse_args(arguments)
    size = TOY if options.toy else Size()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    began, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        settings = template.Settings(
            output_dir=str(folder / "run"),
            global_batch_size=BATCH,
            micro_batch_size=BATCH,
            max_train_steps=10**6,
            eval_steps=10**6,
            checkpointing_steps=10**6,
            num_workers=0,
        )
        accelerator, tokenizer = build_accelerator(settings), make_tokenizer(folder)
        for measure, given in (
            (measure_loop, (size, settings, accelerator, tokenizer)),
            (measure_padding, (size,)),
            (measure_evaluation, (size, settings, accelerator, tokenizer)),
            (measure_checkpoints, (size, accelerator, folder)),
            (measure_resume, (size,)),
            (measure_sampler, (size,)),
            (measure_starts, (size,)),
        ):
            with contextlib.redirect_stdout(io.StringIO()):  # what a run says when it begins
                rows += measure(*given)
            print(f"{measure.__name__.removeprefix('measure_'):<12} {time.perf_counter() - began:4.0f} s", flush=True)
    table = as_table(rows)
    print(table)
    facts = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    facts |= {"toy": options.toy, "seconds": time.perf_counter() - began, "rows": [asdict(one) for one in rows]}
    (options.output_dir / "bench.json").write_text(json.dumps(facts, indent=1), "utf-8")
    (options.output_dir / "bench.md").write_text(table + "\n", "utf-8")
    draw(rows, options.output_dir / "bench.png")


if __name__ == "__main__":
    main(sys.argv[1:])
