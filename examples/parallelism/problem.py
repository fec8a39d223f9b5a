"""The problem that every method here solves, and the plain loop on one device that all are compared with.

    python examples/parallelism/problem.py

A small transformer learns to name the group that most tokens of a sequence come from. Expected: the loss
falls from 1.4 (chance among 4 groups) to about 0.2 in two epochs of 8 steps, in a second.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

# Threads that wait asleep and not spinning: on two busy cores a step takes 20 ms and not 1,600. Before torch
# is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn

from processes import UserError, World, run
from record import Record

NUM_LABELS = 4
NUM_TOKENS = 32  # tokens 0-7 belong to group 0, 8-15 to group 1, ...
SEQUENCE_LENGTH = 12
FILLER = -1  # where a process has no sample left in a step: weight 0 in the loss, so no gradient sees it
IGNORED = -100  # the label of a filler


# --- settings -----------------------------------------------------------------------------------------------
@dataclass
class Settings:
    """What every script takes; some add a setting or two of their own.

    Args:
        num_samples: samples in the training set
        global_batch_size: samples in one optimizer step, over all processes and micro-batches
        num_train_epochs: passes over the training set
        max_train_steps: stop after this many optimizer steps
        learning_rate: of AdamW
        seed: of the data, the first weights and the order of the samples
        hidden_size: width of the transformer
        num_hidden_layers: transformer blocks; an embedding stands before them and a classifier after
        num_attention_heads: must divide hidden_size
        output_dir: where model.safetensors and record.json go; outputs/<script> if not given
    """

    num_samples: int = 253
    global_batch_size: int = 32
    num_train_epochs: int = 2
    max_train_steps: int | None = None
    learning_rate: float = 0.003
    seed: int = 0
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    output_dir: str | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "seed" and isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise UserError(f"--{name} {value}: must be greater than 0")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"--hidden_size {self.hidden_size} cannot be cut into {self.num_attention_heads} equal heads"
            )


# --- data ---------------------------------------------------------------------------------------------------
@dataclass
class Data:
    tokens: Tensor  # (num_samples, SEQUENCE_LENGTH), int64
    labels: Tensor  # (num_samples,), int64

    def batch(self, indices: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens (batch, SEQUENCE_LENGTH) and labels (batch,); a FILLER has the label IGNORED."""
        index = torch.tensor(indices)
        labels = self.labels[index.clamp(min=0)].masked_fill(index == FILLER, IGNORED)
        return self.tokens[index.clamp(min=0)].to(device), labels.to(device)


def make_data(settings: Settings) -> Data:
    generator = torch.Generator().manual_seed(settings.seed)
    labels = torch.randint(NUM_LABELS, (settings.num_samples,), generator=generator)
    size = (settings.num_samples, SEQUENCE_LENGTH)
    group = NUM_TOKENS // NUM_LABELS
    own = labels[:, None] * group + torch.randint(group, size, generator=generator)
    noise = torch.randint(NUM_TOKENS, size, generator=generator)
    return Data(torch.where(torch.rand(size, generator=generator) < 0.5, own, noise), labels)


@dataclass
class Share:
    """What one process gets of one optimizer step."""

    indices: list[int]  # as many on every process, filled up with FILLER
    num_samples: int  # real samples of the whole step, over all processes: what the summed loss is divided by

    def micro_batches(self, size: int) -> list[list[int]]:
        return [self.indices[start : start + size] for start in range(0, len(self.indices), size)]


class StepSampler:
    """Cuts each epoch into steps and deals each step's samples to the processes.

    The order is a function of (seed, epoch) alone: equal on every process, another one in each epoch. Every
    process gets as many samples, hence as many micro-batches: nobody waits for a peer that has finished.
    """

    def __init__(self, settings: Settings, rank: int = 0, num_processes: int = 1) -> None:
        self.settings, self.rank, self.num_processes, self.epoch = settings, rank, num_processes, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Share]:
        settings = self.settings
        generator = torch.Generator().manual_seed(1_000_003 * settings.seed + self.epoch)
        order = torch.randperm(settings.num_samples, generator=generator).tolist()
        steps = range(0, settings.num_samples, settings.global_batch_size)
        if settings.max_train_steps is not None:
            steps = steps[: max(settings.max_train_steps - self.epoch * len(steps), 0)]
        for start in steps:
            samples = order[start : start + settings.global_batch_size]
            dealt = samples[self.rank :: self.num_processes]
            longest = -(-len(samples) // self.num_processes)
            yield Share(dealt + [FILLER] * (longest - len(dealt)), len(samples))


# --- model --------------------------------------------------------------------------------------------------
class Embedding(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, hidden_size)
        self.positions = nn.Parameter(0.1 * torch.randn(SEQUENCE_LENGTH, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> (batch, length, hidden)
        return self.tokens(tokens) + self.positions


class Attention(nn.Module):
    """No bias in q, k, v: the one of k has no gradient but rounding noise, which Adam would blow up."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        # -1: as many heads as there are rows of q here (tensor_parallel.py leaves each process some of the
        # heads).
        q, k, v = (part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) * self.head_size**-0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden_size, bias=False), Attention(hidden_size, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(hidden_size, bias=False), MLP(hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(hidden_size, bias=False), nn.Linear(hidden_size, NUM_LABELS)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, hidden) -> (batch, NUM_LABELS)
        return self.linear(self.norm(x).mean(1))


def make_model(settings: Settings) -> nn.Sequential:
    """A plain list of layers, so that a method can cut it anywhere; the same weights on every process."""
    hidden_size = settings.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        blocks = [Block(hidden_size, settings.num_attention_heads) for _ in range(settings.num_hidden_layers)]
        return nn.Sequential(Embedding(hidden_size), *blocks, Classifier(hidden_size))


def make_optimizer(parameters, settings: Settings) -> torch.optim.Optimizer:
    # eps is larger than the usual 1e-8: Adam divides a gradient by its own size, so that one of nothing but
    # rounding noise would move its weight as far as any other, and no two ways of adding up would give the
    # same weights.
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, eps=1e-4)


# --- loss ---------------------------------------------------------------------------------------------------
def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over the samples, never averaged: it is divided once, by the number of samples of the step."""
    return nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


def cut(num_layers: int, num_stages: int) -> list[slice]:
    """The layers of each stage: consecutive, as equal in number as they can be."""
    if num_stages > num_layers:
        raise UserError(f"{num_stages} stages, but the model has only {num_layers} layers (--num_hidden_layers + 2)")
    edges = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


# --- train --------------------------------------------------------------------------------------------------
def train(settings: Settings, world: World, record: Record) -> Record:
    # data
    data, sampler = make_data(settings), StepSampler(settings)

    # model and optimizer
    model = make_model(settings).to(world.device)
    optimizer = make_optimizer(model.parameters(), settings)
    record.begin(model, optimizer)

    # loop
    for epoch in range(settings.num_train_epochs):
        sampler.set_epoch(epoch)
        for share in sampler:
            tokens, labels = data.batch(share.indices, world.device)
            loss = loss_sum(model(tokens), labels) / share.num_samples
            loss.backward()
            optimizer.step()
            record.end_step(share.indices, loss)
            optimizer.zero_grad()

    # result
    record.weights = model.state_dict()
    return record


if __name__ == "__main__":
    run(train, Settings, __doc__, most_processes=1)
