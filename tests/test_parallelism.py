"""Each method of examples/parallelism trains as the plain loop does, and sends and stores what it says."""

import ast
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

FOLDER = Path(__file__).parent.parent / "examples" / "parallelism"
sys.path.insert(0, str(FOLDER))

import problem
from cost_model import Machine, model_of, predict
from processes import UserError, World, launch, read_settings
from record import Record

METHODS = (
    "gradient_accumulation data_parallel ddp_from_scratch ddp ddp_accumulation model_parallel "
    "pipeline_parallel zero tensor_parallel accelerate_way"
).split()
# the whole model on each process
REPLICATED = ("ddp_from_scratch", "ddp", "ddp_accumulation", "accelerate_way")
# 13 samples in steps of 5: three steps, the last of 3; odd shares, odd micro-batches, fillers.
SMALL = "--num_samples 13 --global_batch_size 5 --hidden_size 12 --num_hidden_layers 2 --num_attention_heads 2"

CASES = {  # number of processes: {name: command line}
    1: {
        "problem": "problem",
        "accumulation": "gradient_accumulation --micro_batch_size 2",
        "accumulation of 9 as 4, 4, 1": (
            "gradient_accumulation --num_samples 9 --global_batch_size 9 --micro_batch_size 4"
        ),
        "accumulation longer than the epoch": (
            "gradient_accumulation --num_samples 3 --global_batch_size 16 --micro_batch_size 2"
        ),
        "data parallel": "data_parallel",
        "data parallel of 7 as 3, 3, 1": (
            "data_parallel --num_samples 7 --global_batch_size 7 --devices ['cpu','cpu','cpu']"
        ),
        "data parallel, fewer samples than devices": (
            "data_parallel --global_batch_size 2 --devices ['cpu','cpu','cpu']"
        ),
        "model parallel": "model_parallel",
        "model parallel, 3 stages": "model_parallel --devices ['cpu','cpu','cpu']",
        "ddp alone": "ddp",
        "accelerate alone": "accelerate_way --micro_batch_size 2",
    },
    2: {
        "ddp from scratch": "ddp_from_scratch",
        "ddp from scratch, 5 samples": "ddp_from_scratch --num_samples 5 --global_batch_size 4",
        "ddp": "ddp",
        "ddp, small buckets": "ddp --bucket_cap_mb 0.004",
        "ddp, fp16": "ddp --comm_hook fp16",
        "ddp, bf16": "ddp --comm_hook bf16",
        "ddp, 5 samples": "ddp --num_samples 5 --global_batch_size 4",
        "ddp, 7 samples": "ddp --num_samples 7 --global_batch_size 4",
        "ddp accumulation": "ddp_accumulation --micro_batch_size 2",
        "ddp accumulation, many": (
            "ddp_accumulation --global_batch_size 12 --micro_batch_size 1 --bucket_cap_mb 0.004"
        ),
        "ddp accumulation, 5 samples": ("ddp_accumulation --num_samples 5 --global_batch_size 4 --micro_batch_size 2"),
        "ddp accumulation, 7 samples": ("ddp_accumulation --num_samples 7 --global_batch_size 4 --micro_batch_size 2"),
        "accelerate": "accelerate_way --micro_batch_size 2",
        "accelerate, 7 samples": "accelerate_way --num_samples 7 --global_batch_size 4 --micro_batch_size 1",
        "zero 1": "zero --stage 1",
        "zero 2": "zero --stage 2",
        "zero 3": "zero --stage 3",
        "tensor parallel": "tensor_parallel",
        "tensor parallel, dtensor": "tensor_parallel --implementation dtensor",
        "pipeline, 1 chunk": "pipeline_parallel --num_micro_batches 1",
        "pipeline, 2 chunks": "pipeline_parallel --num_micro_batches 2",
        "pipeline, 3 chunks": "pipeline_parallel --num_micro_batches 3",
        "pipeline, batch 10 in 4, last of 2": (
            "pipeline_parallel --num_samples 12 --global_batch_size 10 --num_micro_batches 4"
        ),
        "pipeline, batch 3 in 4": ("pipeline_parallel --num_samples 6 --global_batch_size 3 --num_micro_batches 4"),
        "torch gpipe, 1 chunk": "pipeline_parallel --num_micro_batches 1 --schedule gpipe",
        "torch gpipe, batch 10 in 4, last of 2": (
            "pipeline_parallel --num_samples 12 --global_batch_size 10 --num_micro_batches 4 --schedule gpipe"
        ),
        "torch 1f1b, 3 chunks": "pipeline_parallel --num_micro_batches 3 --schedule 1f1b",
        "torch gpipe, 4 equal chunks": "pipeline_parallel --global_batch_size 4 --schedule gpipe",
        "torch 1f1b, 4 equal chunks": "pipeline_parallel --global_batch_size 4 --schedule 1f1b",
        "torch 1f1b, batch 3 in 4": (
            "pipeline_parallel --num_samples 6 --global_batch_size 3 --num_micro_batches 4 --schedule 1f1b"
        ),
    },
    3: {
        "ddp from scratch on 3": "ddp_from_scratch",
        "ddp accumulation on 3": "ddp_accumulation --micro_batch_size 1",
        "accelerate on 3": "accelerate_way --micro_batch_size 1",
        "zero 1 on 3": "zero --stage 1",
        "zero 3 on 3": "zero --stage 3",
        "pipeline of 3, 1 chunk": "pipeline_parallel --num_micro_batches 1",
        "pipeline of 3, 4 chunks": "pipeline_parallel --num_micro_batches 4",
        "torch 1f1b of 3, 4 chunks": "pipeline_parallel --num_micro_batches 4 --schedule 1f1b",
        "tensor parallel of 3": "tensor_parallel --num_attention_heads 3",
        "tensor parallel, 2 heads on 3": "tensor_parallel",
        "torch 1f1b of 3, 2 chunks": "pipeline_parallel --num_micro_batches 2 --schedule 1f1b",
    },
}
REFUSED = {  # what the one line has to say
    "tensor parallel, 2 heads on 3": "--num_attention_heads 2: not a multiple of 3",
    "torch 1f1b of 3, 2 chunks": "--num_micro_batches 2: 1f1b needs one for each of the 3 stages",
}


def method_of(name: str) -> str:
    return next(cases[name] for cases in CASES.values() if name in cases).split()[0]


APPROXIMATE = ("ddp, fp16", "ddp, bf16")
TRAINED = [name for cases in CASES.values() for name in cases if name not in (*REFUSED, *APPROXIMATE)]


def settings_of(name: str):
    method, *options = next(cases[name] for cases in CASES.values() if name in cases).split()
    return read_settings(importlib.import_module(method).Settings, method, [*SMALL.split(), *options])


def plain_record(settings: problem.Settings) -> Record:
    with Record(keep_tensors=True) as record:
        return problem.train(settings, World(0, 1, torch.device("cpu")), record)


def train_all(world: World, folder: Path) -> None:
    """In each of the processes: runs every case of as many, and keeps what the tests look at."""
    torch.set_num_threads(1)
    results = {}
    for name in CASES[world.size]:
        module = importlib.import_module(method_of(name))
        buckets = count_buckets(module)
        try:
            with Record(keep_tensors=True, measure_memory=True) as record:
                module.train(settings_of(name), world, record)
            record.finish(world)
            result = {key: getattr(record, key) for key in ("losses", "gradients", "parameters", "samples", "notes")}
            result["weights"] = record.weights
            result["collectives"] = [step.collectives for step in record.steps]
            result["memory"] = [step.memory for step in record.steps]
            result["buckets"] = buckets
        except UserError as error:
            result = {"error": str(error)}
        except Exception:
            result = {"error": traceback.format_exc()}
        results[name] = result
        if "Traceback" in str(result.get("error")):
            break  # the processes may no longer agree on what comes next
    torch.save(results, folder / f"{world.size}_{world.rank}.pt")


def count_buckets(module) -> list[bool]:
    """Has ddp_accumulation.py's DDP report each bucket that it communicates: True for the last of a round."""
    if module.__name__ != "ddp_accumulation":
        return []
    import torch.nn.parallel
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    seen = []

    def hook(state, bucket):
        seen.append(bucket.is_last())
        return allreduce_hook(state, bucket)

    def wrapped(model, **options):
        parallel = torch.nn.parallel.DistributedDataParallel(model, **options)
        parallel.register_comm_hook(None, hook)
        return parallel

    module.DistributedDataParallel = wrapped
    return seen


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[dict]]:
    """What each process has of each case: {case: [process 0's, process 1's, ...]}."""
    for name in (
        "accelerate",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ):
        importlib.import_module(name)  # once here, and not in each of the processes
    folder = tmp_path_factory.mktemp("parallelism")
    collected = {}
    for size, cases in CASES.items():
        launch(train_all, size, folder)
        parts = [torch.load(folder / f"{size}_{rank}.pt", weights_only=False) for rank in range(size)]
        collected.update({name: [part.get(name, {"error": "not reached"}) for part in parts] for name in cases})
    return collected


def assert_equal(found: dict, wanted: dict, where: str) -> None:
    """Within 1e-5 of the largest value of each tensor: float32 sums in another order differ by some 1e-6."""
    for name, tensor in found.items():
        limit = 1e-5 * wanted[name].abs().max()
        assert (tensor - wanted[name]).abs().max() <= limit, f"{where}: {name}"


@pytest.mark.parametrize("name", TRAINED)
def test_losses_gradients_and_weights_after_every_step_are_the_plain_loops(results, name):
    processes, plain = results[name], plain_record(settings_of(name))
    assert "error" not in processes[0], processes[0]["error"]
    losses = torch.stack(plain.losses)
    assert len(losses) >= 2
    for process in processes:
        assert len(process["losses"]) == len(process["gradients"]) == len(process["parameters"]) == len(losses)
        assert_equal({"loss": torch.tensor(process["losses"])}, {"loss": losses}, name)
        for step in range(len(losses)):
            assert_equal(process["gradients"][step], plain.gradients[step], f"gradients of step {step}")
            assert_equal(process["parameters"][step], plain.parameters[step], f"parameters after step {step}")
    for kind, wanted in (("gradients", plain.gradients), ("parameters", plain.parameters)):
        assert {key for process in processes for key in process[kind][0]} == set(wanted[0]), f"{kind} are missing"


@pytest.mark.parametrize("name", [name for name in TRAINED if method_of(name) != "pipeline_parallel"])
def test_processes_stay_bit_equal(results, name):
    first = results[name][0]
    for other in results[name][1:]:
        for step, (parameters, gradients) in enumerate(zip(first["parameters"], first["gradients"], strict=True)):
            assert parameters.keys() == other["parameters"][step].keys()
            assert all(torch.equal(tensor, other["parameters"][step][key]) for key, tensor in parameters.items())
            assert all(torch.equal(tensor, other["gradients"][step][key]) for key, tensor in gradients.items())


@pytest.mark.parametrize("name", TRAINED)
def test_final_weights_load_strictly_in_the_plain_model(results, name):
    model = problem.make_model(settings_of(name))
    model.load_state_dict(results[name][0]["weights"], strict=True)
    last = results[name][0]["parameters"][-1]
    assert all(torch.equal(dict(model.named_parameters())[key], tensor) for key, tensor in last.items())


@pytest.mark.parametrize("name", [name for name in TRAINED if method_of(name) in REPLICATED])
def test_shards_are_disjoint_and_complete_and_every_epoch_has_its_own_order(results, name):
    settings = settings_of(name)
    steps = results[name][0]["samples"]
    per_epoch = -(-settings.num_samples // settings.global_batch_size)
    epochs = [steps[:per_epoch], steps[per_epoch:]]
    orders = []
    for epoch in epochs:
        assert all(len({len(share) for share in step}) == 1 for step in epoch), "some process has more to do"
        orders.append([index for step in epoch for share in step for index in share if index != problem.FILLER])
        assert sorted(orders[-1]) == list(range(settings.num_samples))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_cannot_work_are_refused_in_one_line_with_the_numbers(results, name):
    for process in results[name]:
        assert process["error"].startswith(REFUSED[name])
        assert "\n" not in process["error"]


@pytest.mark.parametrize("name", ["ddp accumulation", "ddp accumulation, many"])
def test_accumulation_communicates_once_a_step(results, name):
    """Rounds by DDP's hook, buckets by the collectives: neither grows with the number of micro-batches."""
    for process in results[name]:
        num_steps = len(process["losses"])
        assert process["buckets"].count(True) == num_steps
        # DDP lays out its buckets anew after the first step
        steady = [[kind for kind, _ in step] for step in process["collectives"][2:]]
        num_buckets = len(steady[0])
        assert all(step == ["all_reduce"] * num_buckets for step in steady)
        assert len(process["buckets"]) == len(process["collectives"][0]) + num_buckets * (num_steps - 1)
    assert (num_buckets > 1) == (name == "ddp accumulation, many")


def test_ddp_sends_buckets_and_ddp_from_scratch_a_parameter_at_a_time(results):
    names = [len(results[name][0]["collectives"][-1]) for name in ("ddp", "ddp, small buckets", "ddp from scratch")]
    num_parameters = len(results["ddp"][0]["parameters"][0])
    assert names[0] == 1
    assert 1 < names[1] < num_parameters
    assert names[2] == num_parameters
    assert (
        len({sum(size for _, size in results[name][0]["collectives"][-1]) for name in ("ddp", "ddp, small buckets")})
        == 1
    )


@pytest.mark.parametrize(
    "name",
    [
        *("ddp from scratch", "ddp", "ddp accumulation", "accelerate", "zero 1", "zero 2", "zero 3"),
        *("tensor parallel", "tensor parallel, dtensor", "pipeline, 2 chunks"),
    ],
)
def test_what_is_sent_and_stored_is_what_the_cost_model_predicts(results, name):
    settings = settings_of(name)
    nothing = Machine(0, 0, 0, 0, 1)
    predicted = predict(method_of(name), settings, model_of(settings, activations=0), nothing, 2)
    step = 4  # of 5 samples, and DDP has laid out its buckets
    sent = [sum(size for _, size in process["collectives"][step]) for process in results[name]]
    assert max(sent) == pytest.approx(predicted.bytes_sent, abs=8)
    assert max(len(process["collectives"][step]) for process in results[name]) == predicted.collectives
    if method_of(name) != "pipeline_parallel":  # whose stages differ in size
        for kind in ("parameters", "gradients", "optimizer"):
            stored = max(process["memory"][step][kind] for process in results[name])
            assert stored == pytest.approx(getattr(predicted, kind), rel=0.01), kind


@pytest.mark.parametrize("name", APPROXIMATE)
def test_compression_halves_the_bytes_and_keeps_the_processes_equal(results, name):
    whole, half = (sum(size for _, size in results[key][0]["collectives"][-1]) for key in ("ddp", name))
    assert half == whole / 2
    first, second = (process["gradients"][-1] for process in results[name])
    exact = results["ddp"][0]["gradients"][-1]
    assert all(torch.equal(gradient, second[key]) for key, gradient in first.items())
    errors = [(first[key] - exact[key]).abs().max() / exact[key].abs().max() for key in exact]
    assert 1e-5 < max(errors) < 3e-2  # not exact: so the hook was at work


def test_zero_stores_its_share(results):
    """Optimizer state from stage 1, gradients from 2: half on each of two processes."""
    whole = results["ddp"][0]["memory"][-1]
    for name, halved in (
        ("zero 1", ("optimizer",)),
        ("zero 2", ("optimizer", "gradients", "parameters")),
        ("zero 3", ("optimizer", "gradients", "parameters")),
    ):
        parts = [process["memory"][-1] for process in results[name]]
        for kind in halved:
            assert sum(part[kind] for part in parts) == pytest.approx(whole[kind], rel=0.01)
            assert max(part[kind] for part in parts) <= 0.6 * whole[kind]


def test_1f1b_keeps_fewer_micro_batches_than_gpipe(results):
    """On the first of two stages 2 of 4 at a time (and a little that both keep)."""
    gpipe, one_f_one_b = (
        max(step["activations"] for step in results[f"torch {schedule}, 4 equal chunks"][0]["memory"])
        for schedule in ("gpipe", "1f1b")
    )
    assert one_f_one_b < 0.7 * gpipe


def test_more_stages_than_layers_are_refused_with_the_numbers():
    assert problem.cut(6, 4) == [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6)]
    with pytest.raises(UserError, match="4 stages, but the model has only 3 layers"):
        problem.cut(3, 4)


def test_data_parallel_cuts_7_samples_into_3_3_1():
    from data_parallel import gather, scatter

    devices = [torch.device("cpu")] * 3
    logits, labels = torch.randn(7, problem.NUM_LABELS), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    chunks = scatter(logits, devices)
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]
    assert torch.equal(problem.loss_sum(gather(chunks, devices[0]), labels), problem.loss_sum(logits, labels))


def test_the_plain_loop_learns():
    with Record() as record:
        problem.train(problem.Settings(hidden_size=32), World(0, 1, torch.device("cpu")), record)
    assert sum(record.losses[-4:]) < 0.5 * sum(record.losses[:4])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--num_samples", "0"], "--num_samples 0"),
        (["--global_batch_size", "-1"], "--global_batch_size -1"),
        (["--micro_batch_size", "0"], "--micro_batch_size 0"),
        (["--num_train_epochs", "-3"], "--num_train_epochs -3"),
        (["--learning_rate", "fast"], "learning_rate"),
        (["--hidden_size", "10"], "--hidden_size 10 cannot be cut into 4 equal heads"),
        (["--num_sampl", "3"], "--num_sampl"),
        (["--gradient_accumulation_steps", "2"], "--gradient_accumulation_steps"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(options, wanted):
    import gradient_accumulation

    with pytest.raises(UserError) as caught:
        read_settings(gradient_accumulation.Settings, "one line", options)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["problem", *METHODS])
def test_in_one_process_a_script_trains_or_says_in_one_line_why_not(method, tmp_path, monkeypatch, capfd):
    """Never exit status 0 with nothing done."""
    script = str(FOLDER / f"{method}.py")
    monkeypatch.setattr(
        sys, "argv", [script, "--num_samples", "5", "--hidden_size", "8", "--output_dir", str(tmp_path)]
    )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if method in ("pipeline_parallel", "tensor_parallel"):
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(script, run_name="__main__")
        assert caught.value.code == 2
        err = capfd.readouterr().err
        assert re.fullmatch(rf"{method}.py: needs 2 processes, not 1: torchrun --nproc_per_node 2 .*\n", err)
        return
    runpy.run_path(script, run_name="__main__")
    out = capfd.readouterr().out
    assert out.startswith(f"{method}.py: 1 process(es), ")
    assert len(json.loads((tmp_path / "record.json").read_text())["losses"]) == 2
    if method in ("data_parallel", "model_parallel"):
        assert "on the CPU" in out
    elif method in (*REPLICATED, "zero"):
        assert "One process has nobody to talk to" in out


def test_a_script_of_one_process_refuses_two(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "data_parallel.py")])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert caught.value.code == 2
    assert "runs in one process, found 2" in capfd.readouterr().err


def torchrun(*arguments: object, folder: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        *map(str, arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_started_by_torchrun_as_a_user_would_from_another_folder(tmp_path):
    from safetensors.torch import load_file

    done = torchrun(FOLDER / "ddp_accumulation.py", "--num_samples", 7, "--global_batch_size", 4, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ddp_accumulation.py: 2 process(es), cpu (gloo), 1 thread(s) each") == 1
    assert "could not be dealt evenly; 2 place(s) were filled with samples of weight 0" in done.stdout
    folder = tmp_path / "outputs" / "ddp_accumulation"
    record = json.loads((folder / "record.json").read_text())
    plain = plain_record(problem.Settings(num_samples=7, global_batch_size=4))
    assert record["losses"] == pytest.approx([loss.item() for loss in plain.losses], rel=1e-5)
    problem.make_model(problem.Settings()).load_state_dict(load_file(folder / "model.safetensors"), strict=True)


def train_with_a_broken_sample(world: World) -> None:
    import ddp_from_scratch

    batch = problem.Data.batch

    def broken(self, indices, device):
        if world.rank == 1 and 3 in indices:
            raise OSError("sample 3 cannot be read")
        return batch(self, indices, device)

    problem.Data.batch = broken
    ddp_from_scratch.train(problem.Settings(num_samples=9, global_batch_size=9), world, Record())


@pytest.mark.timeout(50)  # seconds; the process group's own limit is 60
def test_a_process_that_fails_ends_the_others_that_wait_for_it_and_its_error_is_seen(capfd):
    with pytest.raises(ProcessRaisedException):
        launch(train_with_a_broken_sample, 2)
    assert "OSError: sample 3 cannot be read" in capfd.readouterr().err


def test_the_scripts_have_the_same_sections_in_the_same_order_and_stay_short():
    assert len(METHODS) == 10
    for method in METHODS:
        text = (FOLDER / f"{method}.py").read_text()
        assert re.findall(r"^# --- (\w+)", text, re.M) == ["settings", "method", "train"], method
        train = text[text.index("def train(") :]
        found = re.findall(r"^    # (data|model and optimizer|loop|result)\b", train, re.M)
        assert found == ["data", "model and optimizer", "loop", "result"], method
        assert len(text.splitlines()) <= 150, method
        assert ast.get_docstring(ast.parse(text)).count("\n\n") == 2, f"{method}: what, command, expected"


def test_stages_idle_as_theory_says_and_the_report_shows_it(tmp_path, monkeypatch):
    import compare_methods
    import pictures

    monkeypatch.setattr(compare_methods, "MICRO_BATCHES", (1, 4))
    launch(compare_methods.measure_schedules, compare_methods.NUM_STAGES, tmp_path)
    timelines = [compare_methods.model_parallel_timeline()]
    timelines += json.loads((tmp_path / "timelines.json").read_text())
    timelines = [compare_methods.with_idle_shares(timeline) for timeline in timelines]
    assert [(timeline["schedule"], timeline["micro_batches"]) for timeline in timelines] == [
        ("model parallel", 1),
        *((name, m) for name in ("GPipe by hand", "GPipe (torch)") for m in (1, 4)),
        ("1F1B (torch)", 4),  # needs a micro-batch for each stage
    ]
    for timeline in timelines:
        assert len(timeline["events"]) == 2 * compare_methods.NUM_STAGES * timeline["micro_batches"]
        for idle in timeline["idle"]:  # never less; more by what a busy machine takes to wake up
            assert timeline["theory"] - 0.01 <= idle <= timeline["theory"] + 0.15
    numbers = dict.fromkeys(("seconds", "bytes_sent", "collectives", *pictures.MEMORY), 1)
    row = {"method": "a <method>", "processes": 2, "measured": numbers, "predicted": numbers, "notes": []}
    about = {"settings": {"hidden_size": 1, "global_batch_size": 1}, "cores": 2, "torch": "2"}
    about["data_parallel_forward"] = {"in_threads": 1, "one_after_the_other": 1}
    drawn = pictures.write_pictures(tmp_path, [row], timelines)
    pictures.write_report(tmp_path / "report.html", [row], timelines, about, drawn)
    report = (tmp_path / "report.html").read_text()
    assert report.count("data:image/png;base64,") == len(drawn) == 4
    assert "a &lt;method&gt;" in report
    assert re.findall(r"https?://", report) == []


def test_the_readme_names_every_script_and_shows_small_pictures_that_are_there():
    text = (FOLDER / "README.md").read_text()
    assert [method for method in METHODS if f"{method}.py" not in text and f"`{method}`" not in text] == []
    pictures = re.findall(r"\]\((pictures/\w+\.png)\)", text)
    assert len(pictures) == 4
    assert all((FOLDER / picture).stat().st_size < 300_000 for picture in pictures)


def test_the_backend_follows_the_devices():
    """No script names a backend; processes.py asks for nccl only where each process has a GPU."""
    assert [path.name for path in sorted(FOLDER.glob("*.py")) if '"nccl"' in path.read_text()] == ["processes.py"]
