"""The promise: one recipe and one seed give the same run on any number of processes, with any micro-batch."""

import pytest

import worlds
from worlds import largest_difference, numbers, run, same_weights


@pytest.fixture(scope="module")
def plain(tiny_settings, tmp_path_factory):
    """The run that all others are compared with: one process, each step in one forward pass."""
    output_dir = tmp_path_factory.mktemp("plain") / "run"
    run(1, tiny_settings | {"output_dir": str(output_dir), "micro_batch_size": 8})
    return output_dir


@pytest.mark.parametrize(("num_processes", "micro_batch_size"), [(1, 3), (1, 1), (2, 4), (2, 3), (3, 2)])
def test_any_split_of_a_step_is_the_same_run(num_processes, micro_batch_size, tiny_settings, plain, tmp_path):
    output_dir = tmp_path / "run"
    run(num_processes, tiny_settings | {"output_dir": str(output_dir), "micro_batch_size": micro_batch_size})
    assert len(numbers(output_dir)) == 10 + 2 + 1
    # Rounding differs with the order of sums; 1e-5 relative is 100 times the rounding of fp32.
    assert largest_difference(numbers(plain), numbers(output_dir)) <= 1e-5
    for kind in ("eval_accuracy", "eval_f1", "test_accuracy", "test_f1", "eval_samples", "test_samples"):
        assert [row[kind] for row in worlds.lines(plain, kind)] == [row[kind] for row in worlds.lines(output_dir, kind)]
    for name, value in worlds.weights(plain / "final").items():
        assert value.allclose(worlds.weights(output_dir / "final")[name], rtol=1e-4, atol=1e-6), name


def test_the_same_command_twice_is_the_same_run_bit_for_bit(tiny_settings, tmp_path):
    for name in ("first", "second"):
        run(2, tiny_settings | {"output_dir": str(tmp_path / name), "num_workers": 2 * (name == "second")})
    assert numbers(tmp_path / "first") == numbers(tmp_path / "second")
    assert same_weights(tmp_path / "first" / "best", tmp_path / "second" / "best")
