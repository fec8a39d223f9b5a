"""Runs every method on this machine and writes what each sends, stores and waits for, beside a prediction.

    python examples/parallelism/compare_methods.py          # or: make compare-methods

Expected: in two minutes on two cores, outputs/compare_methods/ holds table.md, table.json, report.html
and timelines.png, memory.png, costs.png and idle.png. Bytes and collectives are as predicted.
"""

import dataclasses
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import problem  # isort: skip (before torch: it sets how threads wait)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_model import Machine, model_of, pipeline_idle, predict
from data_parallel import parallel_apply
from model_parallel import Stages
from pictures import MEMORY, write_pictures, write_report
from pipeline_parallel import gpipe, torch_schedule
from processes import UserError, World, launch, read_settings
from record import Record


# --- settings -----------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Settings:
    """
    Args:
        output_dir: where the table, the report and the pictures go
        num_processes: of each method that has several
        num_steps: timed optimizer steps of each method and round
        num_rounds: how often each method is timed; the quickest round's median counts
        hidden_size: width of the transformer
        global_batch_size: samples in one optimizer step
    """

    output_dir: str = "outputs/compare_methods"
    num_processes: int = 2
    num_steps: int = 5
    num_rounds: int = 5
    hidden_size: int = 128
    global_batch_size: int = 32

    def __post_init__(self) -> None:
        if self.num_processes < 2:
            raise UserError(f"--num_processes {self.num_processes}: nothing to compare with fewer than 2")
        if self.global_batch_size % (4 * self.num_processes):
            raise UserError(
                f"--global_batch_size {self.global_batch_size}: must be a multiple of "
                f"4 x {self.num_processes} processes, so that all methods have equal shares"
            )
        if min(self.num_steps, self.num_rounds, self.hidden_size) < 1 or self.hidden_size % 4:
            raise UserError(
                f"--num_steps {self.num_steps} and --num_rounds {self.num_rounds} must be at least 1, "
                f"--hidden_size {self.hidden_size} a multiple of the 4 heads"
            )


ALONE = {  # label: (script, its own settings)
    "plain loop": ("problem", {}),
    "gradient accumulation": ("gradient_accumulation", {"micro_batch_size": 4}),
    "DataParallel, 2 replicas": ("data_parallel", {"devices": ["cpu", "cpu"]}),
    "model parallel, 2 stages": ("model_parallel", {"devices": ["cpu", "cpu"]}),
}
TOGETHER = {
    "DDP from scratch": ("ddp_from_scratch", {}),
    "DDP": ("ddp", {"bucket_cap_mb": 1.0}),
    "DDP, fp16 on the wire": ("ddp", {"bucket_cap_mb": 1.0, "comm_hook": "fp16"}),
    "DDP with accumulation": ("ddp_accumulation", {"micro_batch_size": 4, "bucket_cap_mb": 1.0}),
    "Accelerate": ("accelerate_way", {"micro_batch_size": 4}),
    "ZeRO-1": ("zero", {"stage": 1}),
    "ZeRO-2 (fully_shard)": ("zero", {"stage": 2}),
    "ZeRO-3 (fully_shard)": ("zero", {"stage": 3}),
    "tensor parallel": ("tensor_parallel", {}),
    "tensor parallel (DTensor)": ("tensor_parallel", {"implementation": "dtensor"}),
    "pipeline, GPipe by hand": ("pipeline_parallel", {"num_micro_batches": 4}),
    "pipeline, GPipe (torch)": ("pipeline_parallel", {"num_micro_batches": 4, "schedule": "gpipe"}),
    "pipeline, 1F1B (torch)": ("pipeline_parallel", {"num_micro_batches": 4, "schedule": "1f1b"}),
}
WARM_UP = 3  # steps: DDP lays out its buckets after the first, torch's pipelines exchange shapes


# --- the methods --------------------------------------------------------------------------------------------
def method_settings(settings: Settings, method: str, options: dict):
    batch = settings.global_batch_size
    return importlib.import_module(method).Settings(
        num_samples=batch * (WARM_UP + settings.num_steps),
        global_batch_size=batch,
        num_train_epochs=1,
        hidden_size=settings.hidden_size,
        **options,
    )


def measure(world: World, settings: Settings, methods: dict, folder: Path) -> None:
    """In each process: every method counted once and timed in rounds. Writes one file a process."""
    torch.set_num_threads(1)
    results, machines = {}, []
    for label, (method, options) in methods.items():
        own = method_settings(settings, method, options)
        own = dataclasses.replace(own, max_train_steps=WARM_UP + 1)
        with Record(measure_memory=True) as record:
            importlib.import_module(method).train(own, world, record)
        step = record.steps[-1]
        sent = {"bytes_sent": sum(size for _, size in step.collectives), "collectives": len(step.collectives)}
        results[label] = {**sent, **step.memory, "seconds": []}
    # Not all rounds of one method and then of the next: what else the machine does meanwhile hits all alike.
    for _ in range(settings.num_rounds):
        machines.append(measure_machine(world, settings))
        for label, (method, options) in methods.items():
            own, record = method_settings(settings, method, options), Record()
            dist.barrier()
            importlib.import_module(method).train(own, world, record)  # no `with`: counting takes time
            results[label]["seconds"].append(statistics.median(step.seconds for step in record.steps[WARM_UP:]))
            results[label]["notes"] = record.notes
    results["machine"] = machines
    if world.size == 1:
        results["threads"] = measure_threads(settings)
    (folder / f"{world.size}_{world.rank}.json").write_text(json.dumps(results))


def median_seconds(action: Callable[[], object], repeats: int = 9) -> float:
    action()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


FEW = 4  # samples of the smaller of two micro-batches, between which time is taken to grow in a straight line


def measure_machine(world: World, settings: Settings) -> dict[str, float]:
    """The seconds that the cost model rests on, all processes working at the same time."""
    own = method_settings(settings, "problem", {})
    data, model = problem.make_data(own), problem.make_model(own)
    optimizer = problem.make_optimizer(model.parameters(), own)

    def forward_and_backward(samples: int) -> float:
        tokens, labels = data.batch(list(range(samples)), world.device)
        return median_seconds(lambda: problem.loss_sum(model(tokens), labels).backward())

    small, large = torch.zeros(1), torch.zeros(2**20)
    return {
        "few": forward_and_backward(FEW),
        "many": forward_and_backward(own.global_batch_size),
        "optimizer": median_seconds(optimizer.step),
        "small": median_seconds(lambda: dist.all_reduce(small), 30),
        "large": median_seconds(lambda: dist.all_reduce(large)),
    }


def machine_of(rounds: list[dict[str, float]], settings: Settings, num_processes: int) -> Machine:
    """From the quickest round of each measurement, as for the methods themselves."""
    best = {key: min(measured[key] for measured in rounds) for key in rounds[0]}
    per_sample = (best["many"] - best["few"]) / (settings.global_batch_size - FEW)
    sent = 2 * 2**22 * (num_processes - 1) / num_processes or float("inf")  # alone: nothing has to be sent
    return Machine(
        pass_seconds=best["few"] - FEW * per_sample,
        sample_seconds=per_sample,
        optimizer_seconds=best["optimizer"],
        latency=best["small"],
        bandwidth=sent / max(best["large"] - best["small"], 1e-9),
    )


def measure_threads(settings: Settings) -> dict[str, float]:
    """DataParallel's third move: two replicas' forward passes in threads, and one after the other."""
    own = method_settings(settings, "problem", {})
    replicas = [problem.make_model(own) for _ in range(2)]
    tokens, _ = problem.make_data(own).batch(list(range(own.global_batch_size)), torch.device("cpu"))
    chunks = tokens.chunk(2)

    def quickest(use_threads: bool) -> float:  # of five rounds, as everywhere
        forward = partial(parallel_apply, replicas, chunks, use_threads)
        return min(median_seconds(forward, 5) for _ in range(5))

    return {"in_threads": quickest(True), "one_after_the_other": quickest(False)}


# --- idle time ----------------------------------------------------------------------------------------------
# A stage here sleeps instead of computing: 40 ms forward, 80 ms backward. Sleeping stages do not compete for
# cores, so that the order of the work can be seen even on a busy laptop with fewer cores than stages.
FORWARD_SECONDS, BACKWARD_SECONDS = 0.04, 0.08
NUM_STAGES, MICRO_BATCHES = 4, (1, 2, 4, 8, 16)
SCHEDULES = {"GPipe by hand": "by_hand", "GPipe (torch)": "gpipe", "1F1B (torch)": "1f1b"}


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, stage: "SleepingStage") -> Tensor:
        ctx.stage, ctx.micro_batch = stage, stage.num_forward
        stage.num_forward += 1
        stage.sleep("forward", ctx.micro_batch, FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.stage.sleep("backward", ctx.micro_batch, BACKWARD_SECONDS)
        return grad, None


class SleepingStage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.weight, self.events = index, nn.Parameter(torch.ones(())), []
        self.num_forward = 0

    def sleep(self, kind: str, micro_batch: int, seconds: float) -> None:
        start = time.perf_counter()  # one clock for all processes of a machine
        time.sleep(seconds)
        self.events.append((self.index, kind, micro_batch, start, time.perf_counter()))

    def start(self) -> None:
        self.events, self.num_forward = [], 0

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self)


def measure_schedules(world: World, folder: Path) -> None:
    """Every schedule with every number of micro-batches: when did this process's stage work on which?"""
    torch.set_num_threads(1)
    stage, timelines = SleepingStage(world.rank), []
    for name, kind in SCHEDULES.items():
        for m in MICRO_BATCHES:
            if kind == "1f1b" and m < world.size:
                continue
            x = torch.ones(m, 1)
            schedule = None
            if kind != "by_hand":
                schedule = torch_schedule(kind, stage, m, lambda y, target: y.sum(), world)
            for _ in range(2):  # the first time torch's stages tell each other the shapes
                stage.start()
                dist.barrier()
                if schedule is None:
                    gpipe(stage, x.split(1), x.split(1), lambda y, target: y.sum(), (1,), world)
                else:
                    schedule.step(*[x] * (world.rank == 0), target=x, losses=[])
            parts = [None] * world.size
            dist.all_gather_object(parts, stage.events)
            timelines.append({"schedule": name, "micro_batches": m, "events": [e for part in parts for e in part]})
    if world.rank == 0:
        (folder / "timelines.json").write_text(json.dumps(timelines))


def model_parallel_timeline() -> dict:
    stages = [SleepingStage(index) for index in range(NUM_STAGES)]
    Stages(stages, [torch.device("cpu")] * NUM_STAGES)(torch.ones(1, 1)).sum().backward()
    events = [event for stage in stages for event in stage.events]
    return {"schedule": "model parallel", "micro_batches": 1, "events": events}


def with_idle_shares(timeline: dict) -> dict:
    """Adds for each stage the part of the step, first start to last end, in which it did not work."""
    events = timeline["events"]
    first, last = min(event[3] for event in events), max(event[4] for event in events)
    busy = [sum(end - start for index, *_, start, end in events if index == stage) for stage in range(NUM_STAGES)]
    idle = [1 - seconds / (last - first) for seconds in busy]
    return {**timeline, "idle": idle, "theory": pipeline_idle(NUM_STAGES, timeline["micro_batches"])}


# --- the table ----------------------------------------------------------------------------------------------
def make_rows(settings: Settings, folder: Path) -> tuple[list[dict], dict]:
    """One row a method: the slowest or fullest process's measurement beside the prediction."""
    n, rows, machines, threads = settings.num_processes, [], {}, {}
    activations = 0
    for size, methods in ((1, ALONE), (n, TOGETHER)):
        parts = [json.loads((folder / f"{size}_{rank}.json").read_text()) for rank in range(size)]
        machine = machine_of([measured for part in parts for measured in part["machine"]], settings, size)
        machines[size] = dataclasses.asdict(machine)
        threads = threads or parts[0].get("threads", {})
        activations = activations or parts[0]["plain loop"]["activations"] // settings.global_batch_size
        for label, (method, options) in methods.items():
            own = method_settings(settings, method, options)
            devices = size if size > 1 else len(options.get("devices", [""]))
            predicted = predict(method, own, model_of(own, activations), machine, devices)
            keys = ("bytes_sent", "collectives", *MEMORY)
            measured = {key: max(part[label][key] for part in parts) for key in keys}
            rounds = zip(*(part[label]["seconds"] for part in parts), strict=True)
            measured["seconds"] = min(map(max, rounds))  # the slowest process of the quickest round
            notes = parts[0][label]["notes"]
            rows.append(
                {"method": label, "script": f"{method}.py", "processes": size, "measured": measured}
                | {"predicted": dataclasses.asdict(predicted), "notes": notes}
            )
    return rows, {"machine": machines, "data_parallel_forward": threads}


def markdown(rows: list[dict], timelines: list[dict]) -> str:
    def memory(numbers: dict) -> float:
        return sum(numbers[key] for key in MEMORY) / 1e6

    lines = [
        "| method | processes | ms a step | predicted | collectives | KB sent | predicted "
        f"| {' | '.join(MEMORY)} | sum, MB | predicted |",
        "|---|" + "--:|" * 13,
    ]
    for row in rows:
        m, p = row["measured"], row["predicted"]
        stored = " | ".join(f"{m[key] / 1e6:.2f}" for key in MEMORY)
        lines.append(
            f"| {row['method']} | {row['processes']} | {m['seconds'] * 1e3:.0f} | {p['seconds'] * 1e3:.0f} "
            f"| {m['collectives']} | {m['bytes_sent'] / 1e3:,.1f} | {p['bytes_sent'] / 1e3:,.1f} "
            f"| {stored} | {memory(m):.2f} | {memory(p):.2f} |"
        )
    lines += [
        "",
        f"| schedule, {NUM_STAGES} stages | micro-batches | idle, each stage | mean | theory |",
        "|---|--:|---|--:|--:|",
    ]
    for timeline in timelines:
        each = " ".join(f"{share:.0%}" for share in timeline["idle"])
        lines.append(
            f"| {timeline['schedule']} | {timeline['micro_batches']} | {each} "
            f"| {statistics.mean(timeline['idle']):.1%} | {timeline['theory']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main(settings: Settings) -> None:
    start = time.perf_counter()
    folder = Path(settings.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("accelerate", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)  # once here, and not in each process and each measurement
    with tempfile.TemporaryDirectory() as temporary:
        raw = Path(temporary)
        launch(measure, 1, settings, ALONE, raw)
        launch(measure, settings.num_processes, settings, TOGETHER, raw)
        launch(measure_schedules, NUM_STAGES, raw)
        rows, about = make_rows(settings, raw)
        timelines = [model_parallel_timeline(), *json.loads((raw / "timelines.json").read_text())]
    timelines = [with_idle_shares(timeline) for timeline in timelines]
    about |= {"torch": torch.__version__, "cores": os.cpu_count(), "settings": dataclasses.asdict(settings)}
    table = markdown(rows, timelines)
    (folder / "table.md").write_text(table)
    content = {"about": about, "methods": rows, "timelines": timelines}
    (folder / "table.json").write_text(json.dumps(content, indent=1))
    pictures = write_pictures(folder, rows, timelines)
    write_report(folder / "report.html", rows, timelines, about, pictures)
    print(table)
    print(f"Wrote {folder} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    try:
        main(read_settings(Settings, __doc__))
    except UserError as error:
        print(f"compare_methods.py: {error}", file=sys.stderr)
        sys.exit(2)
