"""The plan: what it predicts is what torch's allocator counts; mistakes are one line; any number of processes."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from worlds import CONTEXT, process

FOLDER = Path(__file__).parent.parent / "examples" / "parallelism"
sys.path.insert(0, str(FOLDER))

import plan

BERT = {"vocab_size": 500, "num_attention_heads": 4, "max_position_embeddings": 128}
BERTS = {
    "narrow": BERT | {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 256},
    "wide": BERT | {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 1024},
    "embeddings": BERT | {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 9000},
}
CASES = {  # model, tokens or pixels, samples of a micro-batch, micro-batches, precision, checkpointing
    1: [
        ("narrow", 64, 8, 1, "no", False),
        ("wide", 64, 1, 1, "no", False),
        ("wide", 64, 16, 2, "no", False),
        ("wide", 64, 16, 1, "no", True),
        ("wide", 32, 8, 1, "bf16", False),
        ("embeddings", 64, 4, 2, "no", False),
        ("resnet18", 64, 8, 1, "no", False),
        ("resnet18", 96, 32, 1, "no", False),
        ("vit_tiny_patch16_224", 224, 2, 1, "no", True),
    ],
    2: [
        ("DDP", "wide", 64, 8, 1, "no", False),
        ("DDP", "embeddings", 64, 4, 2, "no", False),
        ("ZeRO-2", "wide", 64, 4, 1, "no", False),
        ("FSDP2, ZeRO-3", "wide", 64, 4, 1, "no", False),
        ("FSDP2, ZeRO-3", "narrow", 64, 16, 1, "no", True),
    ],
}


def found_of(name: str) -> tuple:
    if name not in BERTS:
        return "image", name, {}
    from transformers import BertConfig

    return "text", BertConfig(**BERTS[name])


def measure(rank: int, n: int, port: int, path: str) -> None:
    """In each process: train two steps of each case; write the peak of the bytes that torch's allocator had out."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.profiler import ProfilerActivity, profile

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if n > 1:
        dist.init_process_group("gloo")
    results = []
    for case in CASES[n]:
        method, name, size, samples, num_passes, precision, is_checkpointed = case if n > 1 else ("DDP", *case)
        found, steps = found_of(name), 2
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            model = plan.make_model(found).train()
            if is_checkpointed and name in BERTS:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            elif is_checkpointed:
                model.set_grad_checkpointing(True)
            if method != "DDP":
                mesh = dist.device_mesh.init_device_mesh("cpu", (n,))
                for block in plan.repeated_blocks(model):
                    fully_shard(block, mesh=mesh, reshard_after_forward=method != "ZeRO-2")
                fully_shard(model, mesh=mesh, reshard_after_forward=False if method == "ZeRO-2" else None)
            elif n > 1:
                model = torch.nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on a GPU
            if name in BERTS:
                batch = {"input_ids": torch.ones(samples, size, dtype=torch.long)}
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            else:
                batch = {"x": torch.zeros(samples, 3, size, size)}
            for _ in range(steps):
                for _ in range(num_passes):
                    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                        output = model(**batch)
                        loss = (output if "x" in batch else output.logits).float().logsumexp(-1).sum()
                    loss.backward()
                    del output, loss
                optimizer.step()
                optimizer.zero_grad()
        live = peak = 0
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        results.append(peak)
        del model, optimizer, batch
    Path(f"{path}.{rank}").write_text(json.dumps(results))
    os._exit(0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[int, list[float]]:
    """Peaks by number of processes, of the fullest one."""
    folder, peaks = tmp_path_factory.mktemp("measured"), {}
    for n in CASES:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = [process(measure, (rank, n, port, str(folder / str(n)))) for rank in range(n)]
        for each in started:
            each.start()
        for each in started:
            each.join(200)
            each.kill()
        parts = [json.loads((folder / f"{n}.{rank}").read_text()) for rank in range(n)]
        peaks[n] = [max(values) for values in zip(*parts, strict=True)]
    return peaks


@pytest.mark.parametrize(("n", "place"), [(n, place) for n in CASES for place in range(len(CASES[n]))])
def test_memory_is_within_15_percent_of_what_the_allocator_counts(n, place, measured):
    case = CASES[n][place]
    method, name, size, samples, num_passes, precision, is_checkpointed = case if n > 1 else ("DDP", *case)
    found = found_of(name)
    shape, key = plan.shape_of(found), (size, precision, is_checkpointed)
    passes = plan.Passes(plan.peaks(found, 1, *key), plan.peaks(found, plan.LARGE, *key), shape.parameters)
    predicted = plan.memory(method, shape, passes, n, samples, num_passes)
    print(f"{n} {case}: predicted {predicted / 1e6:.2f} MB, measured {measured[n][place] / 1e6:.2f} MB")
    assert predicted == pytest.approx(measured[n][place], rel=0.15)
