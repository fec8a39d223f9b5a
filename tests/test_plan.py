"""The plan: what it predicts is what torch's allocator counts; mistakes are one line; any number of processes."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from worlds import process

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
        # DDP's peak varies by a tenth from run to run, with the moment at which it makes its buckets anew.
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


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("name", "count"),  # of the encoder without a head, as its model card or paper has it
    [
        ("bert-base-uncased", 109_482_240),
        ("bert-base-cased", 108_310_272),
        ("bert-large-uncased", 335_141_888),
        ("distilbert-base-uncased", 66_362_880),
        ("roberta-base", 124_645_632),
        ("gpt2", 124_439_808),
    ],
)
def test_a_known_name_has_its_number_of_parameters_without_a_network(name, count):
    import torch
    from transformers import AutoModel

    kind, config = plan.find_model(name)
    with torch.device("meta"):
        assert sum(p.numel() for p in AutoModel.from_config(config).parameters()) == count
    assert kind == "text"


MODEL = ["--model", "bert-base-cased", "--gpu_memory"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([*MODEL, "24000"], "gpu_memory 24000: it is in GB: did you mean 23.4?"),
        ([*MODEL, "0"], "gpu_memory"),
        ([*MODEL, "nan"], "gpu_memory"),
        ([*MODEL, "24", "--gpus", "2", "--nodes", "4"], "nodes 4 but gpus 2"),
        ([*MODEL, "24", "--gpus", "8", "--nodes", "3"], "gpus 8 cannot be dealt evenly to 3 nodes"),
        ([*MODEL, "24", "--size", "1024"], "size 1024: bert-base-cased reads 512 tokens at most"),
        ([*MODEL, "24", "--bandwidth", "0"], "bandwidth"),
        (["--model", "no-such-model", "--gpu_memory", "24"], "Without a network give a folder"),
        (["--model", "./nowhere", "--gpu_memory", "24"], "no such folder"),
        (["--gpu_memory", "24"], "--model"),
    ],
)
def test_a_mistake_is_one_line_with_the_cure(arguments, wanted, offline):
    with pytest.raises(plan.UserError) as caught:
        plan.main(arguments)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_script_exits_2_with_one_line_before_it_imports_torch():
    script = str(FOLDER / "plan.py")
    code = f"import runpy, sys\nsys.path.insert(0, {str(FOLDER)!r}); sys.argv = [{script!r}, *{[*MODEL, '24000']!r}]\n"
    code += f"try: runpy.run_path({script!r}, run_name='__main__')\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: gpu_memory 24000")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("folder", ["empty", "broken", "timm"])
def test_a_folder_is_read_by_its_config(folder, tmp_path):
    if folder == "empty":
        with pytest.raises(plan.UserError, match="holds no saved model"):
            plan.find_model(str(tmp_path))
    elif folder == "broken":
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(plan.UserError, match="cannot be read"):
            plan.find_model(str(tmp_path))
    else:
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "num_classes": 3}))
        kind, name, options = plan.find_model(str(tmp_path))
        assert (kind, name, options) == ("image", "resnet18", {"num_classes": 3})


SHAPE = plan.Shape(parameters=16e9, buffers=0, block=5e8, num_blocks=30, outside=1e9)
PASSES = plan.Passes(one=(16e9, 16e9 + 1e8), large=(16e9 + 32e8, 16e9 + 32e8), gradients=16e9)


def test_up_to_4096_processes_sharding_needs_less_memory_and_the_wire_has_a_limit():
    counts = [2**k for k in range(13)]
    assert counts[-1] == 4096
    for method, stage in plan.STAGES.items():
        needed = [plan.memory(method, SHAPE, PASSES, n, 4) for n in counts[1:]]
        assert needed == sorted(needed, reverse=True)
        assert (needed[-1] < needed[0]) == (stage > 0)
        seconds = [plan.wire_seconds(method, SHAPE, n, 1, 1e10, False) for n in counts]
        assert seconds[0] == 0
        assert seconds == sorted(seconds)
        assert plan.zero_bytes_sent(stage, 16e9, 4096) < (3 if stage == 3 else 2) * 16e9
    each = [plan.memory(method, SHAPE, PASSES, 4096, 4) for method in plan.STAGES]
    assert each == sorted(each, reverse=True)


@pytest.fixture(scope="module")
def counted():
    """plan.peaks that counts each kind of pass once."""
    known = {}

    def peaks(found, *key):
        if (found[0], *key) not in known:
            known[(found[0], *key)] = COUNT(found, *key)
        return known[(found[0], *key)]

    return peaks


COUNT = plan.peaks


@pytest.mark.parametrize(
    ("model", "gpu_memory", "gpus", "wanted"),
    [
        ("resnet18", 4, 8, "DDP"),
        ("resnet18", 4, 4096, "DDP"),
        ("resnet18", 4, 1, "one process"),
        ("resnet18", 0.33, 8, "DDP, bf16"),
        ("resnet18", 0.3, 8, "DDP, bf16, half the size"),
        ("wide", 0.05, 8, "ZeRO-1, bf16, checkpointing"),
        ("wide", 0.001, 8, None),
    ],
)
def test_the_first_way_that_fits_is_taken(model, gpu_memory, gpus, wanted, counted, monkeypatch, capsys):
    """Images of 448 pixels, where activations are most; a BERT, where parameters are. 512 samples a step."""
    monkeypatch.setattr(plan, "find_model", found_of)
    monkeypatch.setattr(plan, "peaks", counted)
    size = "448" if model == "resnet18" else "64"
    options = ["--model", model, "--gpu_memory", str(gpu_memory), "--gpus", str(gpus), "--size", size]
    code = plan.main([*options, "--global_batch_size", "512"])
    printed = capsys.readouterr().out
    print(printed)
    taken = [line for line in printed.splitlines() if line.startswith("take")]
    assert len(taken) == 1
    assert code == (wanted is None)
    assert taken[0].startswith("take       nothing fits" if wanted is None else f"take       {wanted}: profile")
