"""A small cost model: what each method should send, store and wait for, before it is run.

compare_methods.py puts it beside what was measured, plan.py applies it to any model. Bytes, collectives and the idle
share are arithmetic; seconds rest on the machine's few numbers (Machine) and assume that nothing overlaps.
"""

from dataclasses import dataclass

BYTES = 4  # of a float32


@dataclass
class Machine:
    """Measured by compare_methods.py while as many processes work as in the comparison. Seconds, bytes."""

    pass_seconds: float  # forward and backward of a micro-batch, whatever its size: launching some 500 operators
    sample_seconds: float  # and for each sample in it
    optimizer_seconds: float
    latency: float  # of a collective of a few bytes
    bandwidth: float  # bytes a process sends in a second

    def compute(self, samples: float, passes: int = 1, share: float = 1) -> float:
        """Forward and backward of `samples`, cut into `passes` micro-batches, of `share` of the layers."""
        return share * (passes * self.pass_seconds + samples * self.sample_seconds)


@dataclass
class Model:
    """Sizes in bytes."""

    num_layers: int  # blocks
    num_tensors: int
    parameters: int
    activations: int  # what a sample leaves for the backward pass
    between_layers: int  # activations of a sample at the border of two layers


@dataclass
class Prediction:
    seconds: float
    bytes_sent: float  # by a process, in a step
    collectives: int  # that a process takes part in (for a pipeline: messages that it sends)
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0  # parameters that are whole for a while
    idle: float = 0  # of a stage


def pipeline_idle(num_stages: int, num_micro_batches: int) -> float:
    """GPipe and 1F1B alike: of m+p-1 turns a stage works in m (Huang et al. 2019, Narayanan et al. 2021)."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def ring(n: int) -> float:
    """The part of a tensor that a gather or a reduce-scatter among n sends; an all-reduce sends both."""
    return (n - 1) / n


def zero_bytes_sent(stage: int, whole: float, n: int, passes: int = 1, factor: float = 1) -> float:
    """Bytes that a process sends in a step of ZeRO stage 0 (DDP) to 3 over n processes, of parameters of `whole` bytes.

    Gradients go out once a step. Stage 3 gathers the parameters forward and backward in each of `passes`
    micro-batches, the others once. factor: what a number has on the wire, of its size in float32.
    """
    return ((2 * passes if stage == 3 else 1) + 1) * ring(n) * whole * factor


def zero_stored(stage: int, whole: float, n: int, gathered: float) -> dict[str, float]:
    """Bytes that a process stores with Adam in ZeRO stage 0 (DDP) to 3; gathered: whole for a while, in stage 3."""
    sharded = whole / n
    return {
        "parameters": whole if stage < 2 else sharded,
        "gradients": {0: whole, 1: whole + sharded}.get(stage, sharded),
        "optimizer": 2 * (whole if stage == 0 else sharded),
        "gathered": {2: whole, 3: gathered}.get(stage, 0),
    }


def model_of(settings, activations: int) -> Model:
    """settings: those of a method's script."""
    import problem  # here: plan.py uses the arithmetic alone

    parameters = list(problem.make_model(settings).parameters())
    return Model(
        num_layers=settings.num_hidden_layers,
        num_tensors=len(parameters),
        parameters=sum(p.numel() for p in parameters) * BYTES,
        activations=activations,
        between_layers=problem.SEQUENCE_LENGTH * settings.hidden_size * BYTES,
    )


def predict(method: str, settings, model: Model, machine: Machine, n: int) -> Prediction:
    """method: the script's name; settings: its own; n: processes (or devices of a method of one process)."""
    batch, whole, variant = settings.global_batch_size, model.parameters, vars(settings)
    share = -(-batch // n)  # samples of a process where they are dealt out
    micro = variant.get("micro_batch_size", share)

    def at(samples: float, passes: int, sent: float, collectives: int, alive: float, **memory: float) -> Prediction:
        """Every process has all layers and `samples` of the step; `alive` of them in memory at a time."""
        seconds = machine.compute(samples, passes) + machine.optimizer_seconds
        seconds += collectives * machine.latency + sent / machine.bandwidth
        stored = {"parameters": whole, "gradients": whole, "optimizer": 2 * whole, **memory}
        return Prediction(seconds, sent, collectives, activations=alive * model.activations, **stored)

    if method == "problem":
        return at(batch, 1, 0, 0, batch)
    if method == "gradient_accumulation":
        return at(batch, -(-batch // micro), 0, 0, micro)
    if method == "data_parallel":  # on one CPU: the replicas' passes one after the other, nothing on a wire
        return at(batch, n, 0, 0, batch)
    if method == "model_parallel":
        prediction = at(batch, 1, 0, 0, batch)
        prediction.idle = pipeline_idle(n, 1)
        return prediction
    if method == "ddp_from_scratch":
        return at(share, 1, zero_bytes_sent(0, whole, n), model.num_tensors, share)
    if method in ("ddp", "ddp_accumulation", "accelerate_way"):
        factor = 0.5 if variant.get("comm_hook", "none") != "none" else 1
        buckets = -(-whole // int(variant.get("bucket_cap_mb", 25) * 2**20))
        sent = zero_bytes_sent(0, whole, n, factor=factor)
        return at(share, -(-share // micro), sent, buckets, micro)
    if method == "zero":
        units = model.num_layers + 2
        gathers = {1: 1, 2: 1, 3: 2}[settings.stage]  # of the parameters; and one reduce-scatter of the gradients
        collectives = 2 if settings.stage == 1 else (gathers + 1) * units
        memory = zero_stored(settings.stage, whole, n, gathered=whole / model.num_layers)  # one block at a time
        prediction = at(share, 1, zero_bytes_sent(settings.stage, whole, n), collectives, share, **memory)
        prediction.seconds -= machine.optimizer_seconds * ring(n)
        return prediction
    if method == "tensor_parallel":
        # By hand two all-reduces for each block forward, two backward; DTensor sums q's, k's and v's apart.
        collectives = model.num_layers * (4 if settings.implementation == "by_hand" else 6)
        sent = collectives * 2 * ring(n) * batch * model.between_layers
        # of a block all but the norms and the second biases
        cut_in_block = 12 * settings.hidden_size**2 + 4 * settings.hidden_size
        cut = model.num_layers * cut_in_block * BYTES * ring(n)
        stored = {"parameters": whole - cut, "gradients": whole - cut, "optimizer": 2 * (whole - cut)}
        # Of 16 activations of a block 4 are whole everywhere: the norms' inputs and outputs.
        prediction = at(batch, 1, sent, collectives, batch * (4 + 12 / n) / 16, **stored)
        prediction.seconds -= machine.sample_seconds * batch * ring(n) + machine.optimizer_seconds * ring(n)
        return prediction
    if method == "pipeline_parallel":
        m = settings.num_micro_batches
        sent, alive = batch * model.between_layers, m if settings.schedule != "1f1b" else min(n, m)
        seconds = (m + n - 1) * (machine.compute(batch / m, share=1 / n) + machine.latency)
        seconds += 2 * sent / m / machine.bandwidth + machine.optimizer_seconds / n
        activations = alive / m * batch * model.activations / n
        stored = (whole / n, whole / n, 2 * whole / n, activations)
        return Prediction(seconds, sent, m, *stored, idle=pipeline_idle(n, m))
    raise ValueError(f"no cost model of {method}")
