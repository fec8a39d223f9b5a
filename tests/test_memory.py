"""`micro_batch_size: auto` finds what fits, keeps the global batch, and goes on when memory runs out in mid-run."""

import json

import pytest

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


@pytest.mark.parametrize(("num_processes", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_out_of_memory_in_mid_run_halves_it_and_goes_on_with_the_same_step(num_processes, rank, still, plain, tmp_path):
    fault = {"limit": 4, "then": 2, "after": 6, "rank": rank}
    settings, options = auto(still | {"eval_batch_size": 2}, tmp_path / "run", **fault)
    world = run(num_processes, settings, **options)
    assert "ran out at step" in world.output(0)
    assert largest_difference(numbers(plain), numbers(tmp_path / "run")) <= 1e-5


def test_out_of_memory_in_mid_window_on_one_process_only(still, plain, tmp_path):
    fault = {"limit": 2, "then": 1, "after": 7, "rank": 1}  # in the first of two passes; the last has one sample
    still = still | {"eval_batch_size": 1, "global_batch_size": 6}
    run(1, still | {"output_dir": str(tmp_path / "plain"), "micro_batch_size": 6})
    settings, options = auto(still, tmp_path / "run", **fault)
    world = run(2, settings, **options)
    assert "ran out at step" in world.output(0)
    assert largest_difference(numbers(tmp_path / "plain"), numbers(tmp_path / "run")) <= 1e-5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [1, 6])
def test_out_of_memory_inside_a_pass_of_one_process(call, where, rank, still, plain, tmp_path):
    """At call 1 in the search, at call 6 in a step: DDP must not wait for what never comes."""
    settings, options = auto(still, tmp_path / "run", where=where, rank=rank, call=call)
    options["patches"] = ["faults:out_of_memory"]
    world = run(2, settings, **options)
    assert ("again with micro-batches of 2" in world.output(0)) == (call == 6), world.output(0)
    assert f"micro-batches of {4 if call == 6 else 3} fit" in world.output(0)
    assert largest_difference(numbers(plain), numbers(tmp_path / "run")) <= 1e-5


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
    settings, options = auto(still, tmp_path / "run", limit=0)
    world = run(1, settings, expected=1, **options)
    words = ["gradient_checkpointing", "max_length", "FSDP or DeepSpeed profile", "pipeline"]
    places = [world.output().rindex(word) for word in words]
    assert places == sorted(places)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(tmp_path / "run")


def test_a_fixed_micro_batch_that_does_not_fit_fails_with_the_cure(still, tmp_path):
    settings, options = auto(still, tmp_path / "run", limit=4)
    world = run(1, settings | {"micro_batch_size": 8}, expected=1, **options)
    assert "give a smaller --micro_batch_size" in world.output()
