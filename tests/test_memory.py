"""`micro_batch_size: auto` finds what fits; a run that runs out of memory goes on with half the micro-batch."""

import json
import re

import pytest
import torch

from kit.memory import is_out_of_memory
from worlds import World, largest_difference, lines, numbers, run


@pytest.fixture(scope="module")
def still(tiny, tiny_settings) -> dict:
    return tiny_settings | {"model_name_or_path": str(tiny / "bert_still"), "checkpointing_steps": 2}


@pytest.fixture(scope="module")
def plain(still, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("plain") / "run"
    run(1, still | {"output_dir": str(output_dir), "micro_batch_size": 8})
    return output_dir


def auto(settings, output_dir, **fault) -> tuple[dict, dict]:
    settings = settings | {"output_dir": str(output_dir), "micro_batch_size": "auto"}
    return settings, {"patches": ["faults:limited_memory"], "environment": {"FAULT": json.dumps(fault)}}


@pytest.mark.parametrize(("num_processes", "limit", "found"), [(1, 5, 5), (1, 100, 8), (2, 3, 3), (2, 1, 1)])
def test_auto_finds_the_largest_that_fits(num_processes, limit, found, still, plain, tmp_path):
    settings, options = auto(still, tmp_path / "run", limit=limit)
    world = run(num_processes, settings, **options)
    assert f"micro-batches of {found} fit" in world.output()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["batch"]["micro_batch_size"] == found
    assert largest_difference(numbers(plain), numbers(tmp_path / "run")) <= 1e-5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_in_the_search_on_one_process(where, rank, still, plain, tmp_path):
    """DDP must not wait for what never comes."""
    settings, options = auto(still, tmp_path / "run", where=where, rank=rank, call=1)
    options["patches"] = ["faults:out_of_memory"]
    world = run(2, settings, **options)
    assert "micro-batches of 3 fit" in world.output(0)
    assert largest_difference(numbers(plain), numbers(tmp_path / "run")) <= 1e-5


@pytest.mark.parametrize(("num_processes", "rank", "where"), [(1, 0, "forward"), (2, 0, "backward"), (2, 1, "forward")])
def test_out_of_memory_in_a_step_ends_all_and_the_same_command_goes_on_with_half(
    num_processes, rank, where, still, plain, tmp_path
):
    settings = still | {"output_dir": str(tmp_path / "run"), "micro_batch_size": 4}
    fault = {"where": where, "rank": rank, "call": 3 if num_processes == 2 else 6}  # in step 3, mid-window on one
    options = {"patches": ["faults:out_of_memory"], "environment": {"FAULT": json.dumps(fault)}}
    world = World(num_processes, settings, **options)
    assert world.wait(60) == [75] * num_processes, world.output()
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "stopped"
    words = r"out of memory \(CUDA out of memory \(planted\)\) with micro-batches of 4; the next start takes 2"
    assert re.search(words, facts["cause"]), facts["cause"]
    assert world.output(0).count("the next start takes 2") == 1
    assert "Traceback" not in world.output(rank)
    world = run(num_processes, settings)
    assert "resume     " in world.output(0) and "step_00000002" in world.output(0)
    assert "micro-batches of 2 are taken: more ran out of memory" in world.output(0)
    assert largest_difference(numbers(plain), numbers(tmp_path / "run")) <= 1e-5
    assert json.loads((tmp_path / "run" / "run.json").read_text())["memory"]["asked"] == 4


def test_a_resumed_run_does_not_search_again(still, plain, tmp_path):
    settings, options = auto(still, tmp_path / "run", limit=3)
    options["patches"].append("faults:die_in_window")
    options["environment"]["FAULT"] = json.dumps({"limit": 3, "call": 15})
    world = World(1, settings, **options)
    assert world.wait() == [-9], world.output()
    world = run(1, settings)  # with all the memory in the world a search would find 8
    assert "micro-batches of 3 fit" in world.output()
    assert largest_difference(numbers(plain), numbers(tmp_path / "run")) <= 1e-5


def test_when_not_even_one_fits_it_says_what_to_try_in_order(still, tmp_path):
    for size in ("auto", 1):
        settings, options = auto(still, tmp_path / f"run {size}", limit=0)
        world = run(1, settings | {"micro_batch_size": size}, expected=1, **options)
        words = ["gradient checkpointing", "max_length", "a smaller model"]
        places = [world.output().rindex(word) for word in words]
        assert places == sorted(places)
        assert "CUDA out of memory (planted)" in world.output() or size == "auto"
        assert not lines(tmp_path / f"run {size}")


def test_an_evaluation_that_does_not_fit_names_its_own_cure(still, tmp_path):
    settings = still | {"output_dir": str(tmp_path / "run")}
    options = {"patches": ["faults:out_of_memory_in_evaluation"]}
    world = run(1, settings, expected=1, **options)
    assert "give a smaller --eval_batch_size" in world.output()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: ..."),
            True,
        ),
        (torch.OutOfMemoryError("HIP out of memory"), True),
        (MemoryError(), True),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_only_out_of_memory_is_taken_for_it(error, expected):
    assert is_out_of_memory(error) == expected
