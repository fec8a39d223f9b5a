"""Which samples form which step, and which gradient follows."""

import json
import random
import socket

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard

import worlds
from kit import batches as kit_batches
from kit.batches import EvaluationSampler, Sample, StepSampler, WeightedSamples, build_loader, seed_all, seed_for
from kit.settings import TrainingSettings

SHAPES = [(101, 16, 5, 2), (37, 8, 3, 3), (3, 16, 2, 1), (1, 8, 8, 3), (7, 2, 1, 3), (10, 10, 10, 1), (9, 9, 4, 2)]


def sampler(num_samples, global_batch_size, micro_batch_size, num_processes, **changed) -> StepSampler:
    steps = 3 * -(-num_samples // global_batch_size) + 1
    options = {"seed": 0, "total_steps": steps} | changed
    return StepSampler(num_samples, global_batch_size, micro_batch_size, num_processes, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [False, True])
def test_every_epoch_has_every_sample_once_and_every_step_the_same_on_any_topology(shape, lengths):
    lengths = [i * 7 % 5 for i in range(shape[0])] if lengths else None
    split, whole = sampler(*shape, lengths=lengths), sampler(shape[0], shape[1], shape[1], 1, lengths=lengths)
    batches = list(split)
    assert len(batches) == len(split)
    place = 0
    for step in range(1, split.total_steps + 1):
        window = split.window(step)
        mine = batches[place : place + window.num_micro_batches * split.num_processes]
        place += len(mine)
        real = [sample for batch in mine for sample in batch if sample.weight]
        assert sorted(sample.index for sample in real) == sorted(whole.samples(step))
        assert len(real) == window.num_samples
        assert {sample.epoch for batch in mine for sample in batch} == {split.epoch_of(step)}
        for process in range(split.num_processes):
            share = [s.index for batch in mine[process :: split.num_processes] for s in batch if s.weight]
            assert share == split.share(step, process)
        assert all(0 < len(batch) <= split.micro_batch_size for batch in mine)
    assert place == len(batches)
    for epoch in range(3):
        steps = range(epoch * split.steps_per_epoch + 1, (epoch + 1) * split.steps_per_epoch + 1)
        assert sorted(index for step in steps for index in split.samples(step)) == list(range(shape[0]))


@pytest.mark.parametrize("shape", SHAPES)
def test_it_can_start_after_any_step(shape):
    batches = list(sampler(*shape))
    for start_step in range(sampler(*shape).total_steps + 1):
        rest = sampler(*shape, start_step=start_step)
        assert len(rest) == len(list(rest))
        assert list(rest) == batches[len(batches) - len(rest) :]


def test_epochs_and_seeds_have_other_orders():
    orders = [tuple(sampler(37, 37, 37, 1, seed=seed).samples(step)) for seed in (0, 1) for step in (1, 2, 3)]
    assert len(set(orders)) == 6


def test_like_lengths_come_together_and_the_ragged_step_is_a_random_one():
    draw = random.Random(0)
    lengths = [draw.randint(1, 100) for _ in range(1003)]
    grouped = sampler(1003, 10, 10, 1, lengths=lengths)
    spans = [max(part) - min(part) for part in ([lengths[i] for i in grouped.samples(step)] for step in range(1, 101))]
    assert sum(spans) / len(spans) < 5, "random steps of 10 span about 80"
    firsts = [lengths[grouped.samples(step)[0]] for step in range(1, 101)]
    assert firsts != sorted(firsts), "the steps are shuffled"
    tails = {tuple(sorted(grouped.samples(step))) for step in (101, 202, 303)}
    assert len(tails) == 3


@pytest.mark.parametrize(("count", "size", "processes"), [(13, 4, 1), (13, 4, 2), (13, 4, 3), (1, 4, 3), (12, 4, 3)])
def test_evaluation_hands_out_every_sample_once_in_the_same_batches(count, size, processes):
    batches = list(EvaluationSampler(count, size, processes))
    assert len(batches) == len(EvaluationSampler(count, size, processes))
    assert len(batches) % processes == 0
    real = [[s.index for s in batch if s.weight] for batch in batches]
    assert [batch for batch in real if batch] == [list(range(i, min(i + size, count))) for i in range(0, count, size)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [False, True])
def test_a_sampler_of_one_process_deals_its_batches_through_accelerate(shape, lengths):
    num_samples, _, size, num_processes = shape
    lengths = [i * 7 % 5 for i in range(num_samples)] if lengths else None
    for make in (
        lambda **one: sampler(*shape, lengths=lengths, min_micro_batch_size=3, **one),
        lambda **one: EvaluationSampler(num_samples, size, num_processes, lengths, **one),
    ):
        whole = list(make())
        for process in range(num_processes):
            own = make(process_index=process)
            shard = BatchSamplerShard(own, num_processes, process, even_batches=False)
            assert list(shard) == whole[process::num_processes]
            assert len(own) == len(whole)


def test_a_step_costs_a_process_its_own_share_whatever_the_number_of_processes(monkeypatch):
    made = []
    monkeypatch.setattr(kit_batches, "Sample", lambda *values: made.append(values) or Sample(*values))
    for num_processes in (1, 8, 4096):
        made.clear()
        steps = StepSampler(200_000, 16 * num_processes, 8, num_processes, 0, 3, process_index=num_processes - 1)
        assert len(steps) == len(list(steps)) == 6 * num_processes
        assert len(made) == 3 * 16


def test_evaluation_begins_without_building_all_batches(monkeypatch):
    made = []
    monkeypatch.setattr(kit_batches, "Sample", lambda *values: made.append(values) or Sample(*values))
    first = next(iter(EvaluationSampler(10_000_000, 32, 8)))
    assert [sample.index for sample in first] == list(range(32))
    assert len(made) <= 33


@pytest.mark.parametrize("num_samples", [1, 37, 100_003])
def test_the_order_of_an_epoch_is_that_of_earlier_versions(num_samples):
    generator = torch.Generator().manual_seed(seed_for(5, "order", 1))
    expected = torch.randperm(num_samples, generator=generator, dtype=torch.int64)
    steps = StepSampler(num_samples, num_samples, 1, 1, seed=5, total_steps=2)
    assert steps.samples(2) == expected.tolist()


class Drawing(torch.utils.data.Dataset):
    """A data set that augments from the global generators, as people's do."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        import numpy

        return {"draw": torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_augmentation_follows_epoch_and_sample_whatever_the_workers(num_processes):
    found = {}
    for workers in (0, 2):
        steps = sampler(20, 4, 2, num_processes)
        loader = build_loader(Drawing(), steps, None, TrainingSettings(num_workers=workers, seed=1))
        torch.manual_seed(workers)
        seen = [
            (batch["sample_id"][i].item(), *batch["draw"][i].tolist())
            for batch in loader
            for i in range(len(batch["weight"]))
            if batch["weight"][i]
        ]
        found[workers] = seen
    assert found[0] == found[2]
    assert len(set(found[0])) == len(found[0]), "no draw is repeated among workers, processes or epochs"


def test_drawing_a_sample_leaves_the_generators_as_they_were():
    import numpy

    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    expected = (random.random(), numpy.random.rand(), torch.rand(()).item())
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    WeightedSamples(Drawing(), seed=0)[Sample(4, 0, 1.0)]
    assert (random.random(), numpy.random.rand(), torch.rand(()).item()) == expected
    assert seed_for(0, 1) != seed_for(1, 0)


def test_a_batch_of_arrow_rows_is_one_read_and_a_transform_still_draws_by_sample(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(20)]})
    samples = [Sample(7, 0, 1.0), Sample(3, 1, 0.0), Sample(7, 0, 1.0)]
    expected = [{"text": f"row {s.index}", "sample_id": s.index, "weight": s.weight} for s in samples]
    with monkeypatch.context() as patch:
        patch.setattr(kit_batches, "_seed", None)  # nothing is seeded where nothing is drawn
        patch.setattr(datasets.Dataset, "__getitem__", None)
        patch.setattr(datasets.Dataset, "__getitems__", lambda self, keys: self.select(keys).to_list())
        assert WeightedSamples(rows, seed=0).__getitems__(samples) == expected

    def draw(batch: dict) -> dict:
        return {"draw": [(random.random(), torch.rand(()).item()) for _ in batch["text"]]}

    augmented = WeightedSamples(rows.with_transform(draw), seed=0)
    first, other, again = (row["draw"] for row in augmented.__getitems__(samples))
    assert first == again != other
    assert augmented[samples[1]]["draw"] == other


@pytest.mark.parametrize("has_devices", [False, True])
def test_a_step_seeds_every_generator_and_notes_nothing_for_devices_that_are_not_there(has_devices, monkeypatch):
    import numpy

    def draws() -> tuple:
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    value, of_devices = seed_for(1, "step", 2), []
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.manual_seed(value)
    expected, original = draws(), torch.manual_seed
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_devices)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: of_devices.append(seed) or original(seed))
    seed_all(1, "step", 2)
    assert draws() == expected
    assert of_devices == [value] * has_devices


@pytest.mark.parametrize(
    ("device", "asks_for_cpu", "expected"),
    [("cuda", "false", True), ("xpu", "false", True), ("mps", "false", False), (None, "false", False)]
    + [("cuda", "true", False)],
)
def test_memory_is_pinned_where_a_device_gains_by_it(device, asks_for_cpu, expected, monkeypatch):  # report 86
    monkeypatch.setenv("ACCELERATE_USE_CPU", asks_for_cpu)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: device and torch.device(device)
    )
    assert build_loader(Drawing(), sampler(20, 4, 2, 1), None, TrainingSettings()).pin_memory == expected


def test_lengths_of_a_data_set_are_read_once():
    import datasets

    column = datasets.Dataset.from_dict({"length": list(range(20))})["length"]
    assert torch.equal(StepSampler(20, 4, 2, 1, 0, 5, column).lengths, torch.arange(20))
    assert torch.equal(EvaluationSampler(20, 4, 1, column).lengths, torch.arange(20))
    assert list(EvaluationSampler(20, 4, 1, column))


def test_a_container_has_the_cores_that_its_group_grants(tmp_path):
    from kit.world import visible_cores

    free = visible_cores(tmp_path / "nothing")
    for text, expected in (("max 100000", free), ("100000 100000", 1), ("50000 100000", 1), ("99900000 100000", free)):
        (tmp_path / "cpu.max").write_text(text)
        assert visible_cores(tmp_path / "cpu.max") == expected


def test_the_first_of_each_node_prepares_though_nodes_share_a_cache(monkeypatch):
    from kit.world import FirstOnNode

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("GROUP_RANK", "0")
    first = FirstOnNode("data")  # keeps its lock until all have met
    monkeypatch.setenv("GROUP_RANK", "1")
    second = FirstOnNode("data")
    for node in (first, second):
        with node:
            pass


# -- a loss that divides by tokens ----------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset):
    """Sequences of 1 to 9 tokens of 11 kinds, padded with -100."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        draw = random.Random(index)
        count = draw.randint(1, 9)
        return {"tokens": torch.tensor([draw.randrange(11) for _ in range(count)] + [-100] * (9 - count))}


def train_by_tokens(micro_batch_size: int) -> list[float]:
    """A loop whose loss is a mean over tokens: the rule is the same, only the count has to travel."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = sampler(23, 8, micro_batch_size, accelerator.num_processes)
    loader = build_loader(Tokens(), steps, None, TrainingSettings(seed=0))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches, losses = iter(loader), []
    for step in range(1, steps.total_steps + 1):
        window = [next(batches) for _ in range(steps.window(step).num_micro_batches)]
        counts = [((batch["tokens"] >= 0).sum(1) * batch["weight"]).sum() for batch in window]
        num_tokens = accelerator.reduce(torch.stack(counts).sum())
        total = torch.zeros(())
        for i, batch in enumerate(window):
            with accelerator.no_sync(model) if i < len(window) - 1 else torch.enable_grad():
                labels = batch["tokens"]
                inputs = labels.clamp(min=0).roll(1, dims=1)
                each = torch.nn.functional.cross_entropy(
                    model(inputs).flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100
                ).view(labels.shape)
                loss = (each.sum(1) * batch["weight"]).sum()
                accelerator.backward(loss * accelerator.num_processes / num_tokens)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(total).item() / num_tokens.item())
    return losses


def _rank(rank: int, world: int, port: int, micro_batch_size: int, path: str) -> None:
    import os

    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    losses = train_by_tokens(micro_batch_size)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(losses, file)


def test_a_loss_over_tokens_obeys_the_same_rule(tmp_path):
    found = {}
    for world, micro_batch_size in ((1, 8), (1, 3), (2, 4), (2, 3), (3, 1)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        path = tmp_path / f"{world}_{micro_batch_size}.json"
        ranks = [worlds.process(_rank, (r, world, port, micro_batch_size, str(path))) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
            assert process.exitcode == 0
        found[world, micro_batch_size] = json.loads(path.read_text())
    assert len(found[1, 8]) == 10
    for losses in found.values():
        assert losses == pytest.approx(found[1, 8], rel=1e-5)
