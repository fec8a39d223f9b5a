"""What a method did: losses, gradients and weights after each step, and what it sent, stored and waited for.

Nothing is taken from a formula: collectives are counted as torch dispatches them (also those that
DistributedDataParallel, fully_shard, DTensor and torch.distributed.pipelining start), memory by the tensors'
storages.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

# What a process sends for a collective on a tensor of `size` bytes among n processes, by the ring algorithms
# (nccl's, say). The size is the whole tensor's: the output of a gather, the input of a reduce-scatter. The
# counters of the loopback interface agree within 2 % on gloo, but for reduce_scatter: it sends an all-reduce.
BYTES_SENT: dict[str, Callable[[float, int], float]] = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) / n,
    "all_gather": lambda size, n: size * (n - 1) / n,
    "reduce_scatter": lambda size, n: size * (n - 1) / n,
    "broadcast": lambda size, n: size * (n - 1) / n,  # on average
    "scatter": lambda size, n: size * (n - 1) / n,
    "send": lambda size, n: size,
}
# Operators of torch -> the collective. What only waits or receives is not listed.
OPERATORS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
    "c10d::scatter_": "scatter",
    "c10d::send": "send",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
}
SILENT = ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


def tensors_in(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def num_bytes(tensors) -> int:
    """Bytes of memory under the tensors; what two of them share counts once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in map(local, tensors)}
    return sum(storages.values())


@dataclasses.dataclass
class Step:
    """One optimizer step as one process saw it. Bytes; seconds of wall clock."""

    indices: list[int]
    seconds: float
    collectives: list[tuple[str, int]]  # (name, bytes this process sends), in order
    memory: dict[str, int]  # parameters, gradients, optimizer; at their peak: activations, gathered parameters


class Record(TorchDispatchMode):
    """Filled by a method's train(): begin() before the loop, end_step() after each step, then weights.

    As a context manager it counts collectives. keep_tensors: gradients and parameters of each step, whole and
    by the plain model's names. measure_memory: also the peak of what autograd keeps for the backward pass,
    and of what fully_shard has gathered.
    """

    def __init__(self, keep_tensors: bool = False, measure_memory: bool = False) -> None:
        super().__init__()
        self.keep_tensors, self.measure_memory = keep_tensors, measure_memory
        self.losses: list = []
        self.steps: list[Step] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: list[dict[str, Tensor]] = []
        self.weights: dict[str, Tensor] = {}
        self.samples: list[list[list[int]]] = []  # after finish(): step, process, sample
        self.notes: list[str] = []  # what a method has to say about itself
        self._collectives: list[tuple[str, int]] = []
        self._live_bytes = self._peak_bytes = self._gathered_bytes = 0
        self._hooks = saved_tensors_hooks(self._save_activation, self._use_activation)

    # --- filled by a method ---------------------------------------------------------------------------------
    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        whole: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
        gradients: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        """model: with the plain names. whole: makes a shard whole. gradients: if .grad has them not."""
        self._model, self._optimizer, self._whole = model, optimizer, whole
        self._gradients = gradients or (
            lambda: {name: whole(name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
        )
        self._sharded = [name for name, p in model.named_parameters() if local(p) is not p]
        self._weights = self._weight_storages()
        self._collectives = []  # those before the loop, of which DDP has a few, are no step's
        self._start = time.perf_counter()

    def end_step(self, indices: list[int], loss: Tensor) -> None:
        """loss: this process's part of the step's loss; the parts add up. No .item() here: it would wait."""
        self.losses.append(loss.detach())
        seconds, collectives, self._collectives = time.perf_counter() - self._start, self._collectives, []
        self.steps.append(Step(indices, seconds, collectives, self._memory() if self.measure_memory else {}))
        if self.keep_tensors:
            self.gradients.append({name: grad.detach().clone() for name, grad in self._gradients().items()})
            parameters = self._model.named_parameters()
            self.parameters.append({name: self._whole(name, p.detach()).clone() for name, p in parameters})
        self._peak_bytes, self._gathered_bytes = self._live_bytes, 0
        self._collectives = []  # keeping tensors may have gathered them: not part of the method
        self._start = time.perf_counter()

    # --- counted --------------------------------------------------------------------------------------------
    def __enter__(self):
        if self.measure_memory:
            self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        if self.measure_memory:
            self._hooks.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor turns it into operators on local tensors, which come here again
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name
            if name in OPERATORS:
                kind = OPERATORS[name]
                sizes = [tensor.nbytes for tensor in tensors_in(args) + tensors_in(result)]
                # the same tensor is there as input and output, or the parts and the whole: the largest is the
                # whole, unless the parts come as a list
                lists = [sum(t.nbytes for t in tensors_in(arg)) for arg in args if isinstance(arg, (list, tuple))]
                size = max(sizes + lists)
                self._collectives.append((kind, round(BYTES_SENT[kind](size, dist.get_world_size()))))
            elif not name.endswith(SILENT):
                raise NotImplementedError(f"a collective that record.py cannot count: {name}")
        return result

    def _save_activation(self, tensor: Tensor) -> "_Saved":
        self._look_at_gathered()
        return _Saved(self, tensor)

    def _use_activation(self, saved: "_Saved") -> Tensor:
        self._look_at_gathered()
        return saved.tensor

    def _weight_storages(self) -> set[int]:
        return {local(p).untyped_storage()._cdata for p in self._model.parameters()}

    def _look_at_gathered(self) -> None:
        """While fully_shard has gathered a layer, its parameters are plain tensors and no DTensors."""
        parameters = dict(self._model.named_parameters()) if self._sharded else {}
        now = num_bytes(parameters[name] for name in self._sharded if local(parameters[name]) is parameters[name])
        self._gathered_bytes = max(self._gathered_bytes, now)

    def _memory(self) -> dict[str, int]:
        parameters = list(self._model.parameters())
        states = [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"]]
        gradients += [p.grad for p in parameters]
        return {
            "parameters": num_bytes(parameters),
            "gradients": num_bytes(grad for grad in gradients if grad is not None),
            "optimizer": num_bytes(state for state in states if state.dim() > 0),  # not Adam's step counters
            "activations": self._peak_bytes,
            "gathered": self._gathered_bytes,
        }

    # --- result ---------------------------------------------------------------------------------------------
    def finish(self, world) -> None:
        """Once, by every process: adds up the parts of the losses and collects who had which samples."""
        losses = torch.stack([loss.to(world.device) for loss in self.losses])
        shares = [None] * world.size
        dist.all_reduce(losses)
        dist.all_gather_object(shares, [step.indices for step in self.steps])
        self.losses = losses.tolist()
        self.samples = [list(step) for step in zip(*shares, strict=True)]

    def report(self) -> None:
        for number, (loss, step) in enumerate(zip(self.losses, self.steps, strict=True), 1):
            sent = sum(size for _, size in step.collectives)
            print(
                f"step {number}  loss {loss:.4f}  {step.seconds * 1e3:.0f} ms  "
                f"{len(step.collectives)} collectives  {sent:,} bytes sent"
            )
        fillers = [sum(index < 0 for share in step for index in share) for step in self.samples]
        if any(fillers):
            print(
                f"Tail: {sum(map(bool, fillers))} step(s) could not be dealt evenly; {sum(fillers)} place(s) "
                "were filled with samples of weight 0: the gradient is that of the real ones."
            )
        for note in self.notes:
            print(note)

    def save(self, folder: Path, settings) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, folder / "model.safetensors")
        content = {
            "settings": dataclasses.asdict(settings),
            "losses": self.losses,
            "samples": self.samples,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "notes": self.notes,
        }
        (folder / "record.json").write_text(json.dumps(content, indent=1))
        print(f"Wrote {folder / 'model.safetensors'} and {folder / 'record.json'}")


class _Saved:
    """A tensor that autograd keeps for the backward pass, counted while it is kept."""

    def __init__(self, record: Record, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()
        weights = record._weight_storages() if record._sharded else record._weights
        self.tensor, self.record = tensor, record
        self.size = 0 if storage._cdata in weights else tensor.nbytes
        record._live_bytes += self.size
        record._peak_bytes = max(record._peak_bytes, record._live_bytes)

    def __del__(self) -> None:
        self.record._live_bytes -= self.size
