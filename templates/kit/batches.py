"""Decides which samples form each step. Depends on the seed and the epoch alone, not on processes or workers.

A step is `global_batch_size` samples of the epoch's order. It is dealt to the processes, and each share is cut
into micro-batches. The batch sampler emits micro-batch j of process 0, of process 1, ..., so that Accelerate's own
sharding (batch i goes to process i mod N, `even_batches=False`) hands every process its part, the same number of
micro-batches to each. A process without a sample in a ragged step gets one with weight 0. A sampler that knows its
`process_index` builds the batches of that process alone and emits empty lists for the others, which nobody reads.
"""

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kit.settings import TrainingSettings
from kit.stopping import begin_worker
from kit.world import pins_memory, spare_cores

POOL_STEPS = 64  # like lengths are put together inside shuffled pools of this many steps
LENGTHS_AT_ONCE = 1_000_000


class Sample(NamedTuple):
    """What the sampler asks the dataset for; augmentation may depend on (epoch, index), not on the place in a batch."""

    index: int
    epoch: int
    weight: float  # 1 for a real sample, 0 for a filler that must not count


@dataclass(frozen=True)
class Window:
    """The micro-batches of one step on one process. Iterating tells for each whether it is the last."""

    step: int  # from 1
    num_micro_batches: int
    num_samples: int  # real samples of the whole step, over all processes

    def __iter__(self) -> Iterator[bool]:
        for micro_batch in range(1, self.num_micro_batches + 1):
            yield micro_batch == self.num_micro_batches


class WeightedSamples(Dataset):
    """Give each item of `dataset` (a mapping) its `sample_id` and `weight`.

    Whatever the dataset draws from the global generators (augmentation) is a function of (seed, epoch, sample): the
    same for any number of workers and processes, and after a resume. The generators are left as they were found.
    A `datasets.Dataset` without a transform draws nothing: a batch of it is one read.
    """

    def __init__(self, dataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: Sample) -> dict:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: list[Sample]) -> list[dict]:
        """Return the items of a batch, as a DataLoader asks for them: to keep the generators has its price."""
        if _draws_nothing(self.dataset):
            rows = self.dataset.__getitems__([sample.index for sample in samples])
            return [_with_weight(row, sample) for row, sample in zip(rows, samples, strict=True)]
        with generators_kept():
            return [self._load(sample) for sample in samples]

    def _load(self, sample: Sample) -> dict:
        # Data are loaded on the CPU: the devices' generators have no part in it.
        _seed(torch.default_generator.manual_seed, self.seed, "sample", sample.epoch, sample.index)
        return _with_weight(self.dataset[sample.index], sample)


def _with_weight(row: dict, sample: Sample) -> dict:
    return {**row, "sample_id": sample.index, "weight": sample.weight}


def _draws_nothing(dataset) -> bool:
    """Return whether reading `dataset` is known to use no random numbers: rows of Arrow, and no function on them."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


def build_loader(dataset, sampler: Sampler, collate, settings: TrainingSettings) -> DataLoader:
    """Return the loader of one of the samplers below; `collate` finds `sample_id` and `weight` in each item."""
    num_workers = spare_cores() if settings.num_workers is None else settings.num_workers
    return DataLoader(
        WeightedSamples(dataset, settings.seed),
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        timeout=settings.dataloader_timeout if num_workers else 0,
        worker_init_fn=begin_worker,
        pin_memory=pins_memory(),
        # A loader draws a number when it starts: from the global generator that would move what a step draws.
        generator=torch.Generator(),
    )


def seed_for(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def seed_all(*parts: int | str) -> None:
    """Seed the global generators of Python, NumPy (where it is in use) and PyTorch, all devices, from `parts`."""
    # torch.manual_seed also notes the seed for devices that nobody uses yet, with a stack trace: 80 times the price.
    has_devices = torch.accelerator.is_available()
    _seed(torch.manual_seed if has_devices else torch.default_generator.manual_seed, *parts)


def _seed(seed_torch, *parts: int | str) -> None:
    value = seed_for(*parts)
    random.seed(value)
    seed_torch(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


@contextmanager
def generators_kept():
    """Leave the global generators of Python, NumPy and PyTorch's CPU as they were."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])


def _read_lengths(lengths: Sequence[int] | None) -> torch.Tensor | None:
    """Return the lengths as a tensor, read once. A slice of a data set's column is a list of numbers: take parts."""
    if lengths is None:
        return None
    return torch.cat(
        [torch.as_tensor(lengths[i : i + LENGTHS_AT_ONCE]) for i in range(0, len(lengths), LENGTHS_AT_ONCE)]
    )


def build_sampler(
    settings: TrainingSettings,
    num_samples: int,
    num_processes: int,
    lengths=None,
    min_micro_batch_size: int = 1,
    process_index: int | None = None,
) -> "StepSampler":
    """Return the batch sampler of a training run over `num_samples` samples (the others: see `StepSampler`)."""
    steps_per_epoch = -(-num_samples // settings.global_batch_size)
    return StepSampler(
        num_samples=num_samples,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=1 if settings.micro_batch_size == "auto" else settings.micro_batch_size,
        num_processes=num_processes,
        seed=settings.seed,
        total_steps=settings.max_train_steps or settings.num_train_epochs * steps_per_epoch,
        lengths=lengths,
        min_micro_batch_size=min_micro_batch_size,
        process_index=process_index,
    )


@dataclass
class StepSampler(Sampler):
    """Batch sampler of a whole training run: steps 1 to `total_steps`, of `global_batch_size` samples each.

    The last step of an epoch holds the samples that are left. `lengths` (one per sample) puts samples of like length
    into the same step. A micro-batch of fewer than `min_micro_batch_size` is filled up with samples of weight 0, of its
    step and then of others: BatchNorm needs company, and no sample is lost whatever the number of processes.
    Set `start_step` to the number of steps already done before iterating: nothing is replayed. While `rehearsed_size`
    is set, iterating gives each process one micro-batch of that size, of the samples that take most memory.
    With `process_index` a step costs what that process's share costs, however many processes there are.
    """

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    num_processes: int
    seed: int
    total_steps: int
    lengths: Sequence[int] | None = None
    min_micro_batch_size: int = 1
    process_index: int | None = None
    start_step: int = 0
    rehearsed_size: int | None = None

    def __post_init__(self):
        assert self.num_samples > 0 and self.global_batch_size > 0 and self.micro_batch_size > 0
        self.lengths = _read_lengths(self.lengths)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int32)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def epoch_of(self, step: int) -> int:
        """Return the epoch (from 0) in which a step (from 1) lies."""
        return (step - 1) // self.steps_per_epoch

    def window(self, step: int) -> Window:
        """Return the number of micro-batches of a step (from 1) on each process, and its real samples over all."""
        place = (step - 1) % self.steps_per_epoch
        num_samples = min(self.global_batch_size, self.num_samples - place * self.global_batch_size)
        largest_share = -(-num_samples // self.num_processes)
        return Window(step, -(-largest_share // self.micro_batch_size), num_samples)

    @property
    def largest_share(self) -> int:
        """The most samples that one process has in a step."""
        return -(-min(self.global_batch_size, self.num_samples) // self.num_processes)

    def samples(self, step: int) -> list[int]:
        """Return the indices of all samples of a step (from 1), over all processes."""
        return self._samples(step).tolist()

    def _samples(self, step: int) -> torch.Tensor:
        start = (step - 1) % self.steps_per_epoch * self.global_batch_size
        return self._epoch_order(self.epoch_of(step))[start : start + self.global_batch_size]

    def share(self, step: int, process: int) -> list[int]:
        """Return the indices of the samples of a step (from 1) that fall to one process; may be empty."""
        return self._samples(step)[process :: self.num_processes].tolist()

    def _heaviest(self, count: int) -> list[Sample]:
        """Return the samples that take most memory: the longest, where lengths are known."""
        count = max(count, self._filled_up_to)
        order = range(self.num_samples)[:count]
        if self.lengths is not None:
            order = self.lengths.argsort(descending=True, stable=True)[:count].tolist()
        return [Sample(index, 0, 1.0) for index in order]

    @property
    def _filled_up_to(self) -> int:
        """Never beyond what `auto` has found to fit."""
        return min(self.min_micro_batch_size, max(2, self.micro_batch_size))

    def num_fillers(self, step: int) -> int:
        """Return how many samples of weight 0 a step (from 1) is filled up with, over all processes."""
        window, size = self.window(step), self.micro_batch_size
        share, num_larger = divmod(window.num_samples, self.num_processes)  # so many processes have one more
        fillers = 0
        for num_processes, samples in ((num_larger, share + 1), (self.num_processes - num_larger, share)):
            sizes = [min(max(samples - number * size, 0), size) for number in range(window.num_micro_batches)]
            fillers += num_processes * sum(max(self._filled_up_to - real, 0) for real in sizes)
        return fillers

    def describe(self) -> dict:
        """Return the batch arithmetic, for the banner and run.json."""
        window, size = self.window(1), min(self.largest_share, self.micro_batch_size)
        parts = [
            (self.num_processes, "process", "processes"),
            (window.num_micro_batches, "micro-batch", "micro-batches"),
        ]
        counted = " x ".join(f"{number} {one if number == 1 else many}" for number, one, many in parts)
        is_even = window.num_samples == self.num_processes * window.num_micro_batches * size
        return {
            "arithmetic": f"{window.num_samples} = {counted} x {'' if is_even else 'up to '}{size}",
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "micro_batches_per_step": window.num_micro_batches,
            "steps_per_epoch": self.steps_per_epoch,
            "samples_in_last_step_of_epoch": self.window(self.steps_per_epoch).num_samples,
            "total_steps": self.total_steps,
        }

    def __len__(self) -> int:
        """Return the number of micro-batches from `start_step` on, over all processes."""
        if self.rehearsed_size:
            return self.num_processes
        return self.num_processes * (self._micro_batches(self.total_steps) - self._micro_batches(self.start_step))

    def _micro_batches(self, step: int) -> int:
        """Return the micro-batches of one process in steps 1 to `step`."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        full, last = self.window(1).num_micro_batches, self.window(self.steps_per_epoch).num_micro_batches
        return epochs * ((self.steps_per_epoch - 1) * full + last) + rest * full

    def __iter__(self) -> Iterator[list[Sample]]:
        if self.rehearsed_size:
            yield from [self._heaviest(self.rehearsed_size)] * self.num_processes
            return
        built = _built_processes(self)
        for step in range(self.start_step + 1, self.total_steps + 1):
            epoch = self.epoch_of(step)
            shares = [self.share(step, process) for process in built]
            for start in range(0, self.window(step).num_micro_batches * self.micro_batch_size, self.micro_batch_size):
                yield from repeat([], built.start)
                for share in shares:
                    real = share[start : start + self.micro_batch_size]
                    filler = self._fillers(step, real)
                    yield [Sample(i, epoch, 1.0) for i in real] + [Sample(i, epoch, 0.0) for i in filler]
                yield from repeat([], self.num_processes - built.stop)

    def _fillers(self, step: int, real: list[int]) -> list[int]:
        """Return the samples that fill up a micro-batch: of the same step, then of the steps after it, in a circle."""
        missing = self._filled_up_to - len(real)
        if missing <= 0:
            return []
        start = (step - 1) % self.steps_per_epoch * self.global_batch_size
        near = torch.arange(start, start + min(missing + len(real), self.num_samples)) % self.num_samples
        others = [index for index in self._epoch_order(self.epoch_of(step))[near].tolist() if index not in real] or real
        return (others * missing)[:missing]

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        """Return the order of an epoch, a tensor of integers [num_samples]; the last one is kept."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_for(self.seed, "order", epoch))
            # The same numbers as in int64, in half of the memory.
            dtype = torch.int32 if self.num_samples <= torch.iinfo(torch.int32).max else torch.int64
            order = torch.randperm(self.num_samples, generator=generator, dtype=dtype)
            if self.lengths is not None:
                order = self._group_like_lengths(order, generator)
            self._epoch, self._order = epoch, order
        return self._order

    def _group_like_lengths(self, order: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Sort inside pools, cut into steps, shuffle the steps. The ragged last step is drawn first, so at random."""
        lengths = self.lengths
        full = self.num_samples // self.global_batch_size * self.global_batch_size
        pools = order[:full].split(POOL_STEPS * self.global_batch_size)
        pools = [pool[lengths[pool].argsort(stable=True)] for pool in pools]
        steps = torch.cat(pools).view(-1, self.global_batch_size) if pools else order[:0].view(0, 1)
        tail = order[full:]
        tail = tail[lengths[tail].argsort(stable=True)]
        return torch.cat([steps[torch.randperm(len(steps), generator=generator)].flatten(), tail])


@dataclass
class EvaluationSampler(Sampler):
    """Batch sampler that hands out every sample exactly once with weight 1.

    The batches are cut before they are dealt to the processes, so each is the same on any number of processes; a
    process without a batch in the last round gets one filler of weight 0. `lengths` puts like lengths together.
    `process_index`: see `StepSampler`.
    """

    num_samples: int
    eval_batch_size: int
    num_processes: int
    lengths: Sequence[int] | None = None
    process_index: int | None = None

    def __post_init__(self):
        self.lengths = _read_lengths(self.lengths)

    def __len__(self) -> int:
        batches = -(-self.num_samples // self.eval_batch_size)
        return -(-batches // self.num_processes) * self.num_processes

    def __iter__(self) -> Iterator[list[Sample]]:
        order = None if self.lengths is None else self.lengths.argsort(stable=True)
        filler = Sample(0 if order is None else int(order[0]), 0, 0.0)
        built = _built_processes(self)
        for first in range(0, len(self), self.num_processes):
            yield from repeat([], built.start)
            for number in range(first + built.start, first + built.stop):
                places = range(self.num_samples)[number * self.eval_batch_size : (number + 1) * self.eval_batch_size]
                indices = places if order is None else order[places.start : places.stop].tolist()
                yield [Sample(index, 0, 1.0) for index in indices] or [filler]
            yield from repeat([], self.num_processes - built.stop)


def _built_processes(sampler: StepSampler | EvaluationSampler) -> range:
    """Return the processes whose batches are built: all, or the one whose sampler it is."""
    index = sampler.process_index
    return range(sampler.num_processes) if index is None else range(index, index + 1)
