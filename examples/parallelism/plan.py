"""Says before a run what it needs: memory of each process, seconds on the wire, the largest micro-batch, the profile.

    python plan.py --model bert-large-uncased --gpus 8 --gpu_memory 24 --nodes 2        # or: make plan MODEL=...

Reads a model's configuration only: no weights are loaded, no device is needed, a minute is enough. Activations are
counted in a forward and backward pass on tensors without storage (FakeTensorMode), as the CPU computes: a GPU's fused
attention keeps less. Parameters, gradients and AdamW's two moments are float32, as in the templates.
"""

import argparse
import json
import math
import os
import sys
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from cost_model import BYTES, pipeline_idle, zero_bytes_sent, zero_stored

GIB = 2**30
USABLE = 0.9  # of a GPU's memory: the rest is the driver's context, the libraries' work space, and gaps
LARGE = 32  # samples of the larger of two passes, between which memory is taken to grow in a straight line
MOST_GPU_MEMORY = 1024  # GB; no GPU has more, so a larger number is in MB
LATENCY = 20e-6  # seconds: of one hop of a collective
BUCKET = 25 * 2**20  # bytes: of DDP's buckets
WIRE = {1: 20.0, 2: 1.25}  # GB/s if not given: PCI Express within a node; 10 Gbit Ethernet between nodes

# What the hub's config.json of these says, so that no network is needed: (class, what differs from its defaults).
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
KNOWN = {
    "bert-base-uncased": ("BertConfig", {}),
    "bert-base-cased": ("BertConfig", {"vocab_size": 28996}),
    "bert-large-uncased": ("BertConfig", BERT_LARGE),
    "bert-large-cased": ("BertConfig", BERT_LARGE | {"vocab_size": 28996}),
    "distilbert-base-uncased": ("DistilBertConfig", {}),
    "roberta-base": ("RobertaConfig", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "gpt2": ("GPT2Config", {"pad_token_id": 50256}),
}


class UserError(ValueError):
    """A mistake of the user's: one line that names the value and the cure."""


# --- the model ----------------------------------------------------------------------------------------------
def find_model(name: str) -> tuple:
    """Return ("text", a transformers configuration) or ("image", a timm name, keywords of timm.create_model).

    name: a folder with config.json, one of KNOWN, a timm name, or a model on the hub.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise UserError(f"model {name}: the folder has no config.json: it holds no saved model") from None
        except (OSError, ValueError) as error:
            raise UserError(f"model {name}: config.json cannot be read ({error})") from None
        if "architecture" in config:  # as timm writes it
            return "image", config["architecture"], {"num_classes": config.get("num_classes", 1000)}
        return "text", text_config(name, str(folder))
    if folder.is_absolute() or name.startswith(("~", ".")):
        raise UserError(f"model {name}: no such folder")
    if name.removeprefix("google-bert/").removeprefix("FacebookAI/") in KNOWN:
        import transformers

        kind, changes = KNOWN[name.rsplit("/", 1)[-1]]
        return "text", getattr(transformers, kind)(**changes)
    if "/" not in name or name.startswith("timm/"):
        import timm

        short = name.removeprefix("timm/")
        if timm.is_model(short):
            return "image", short, {}
    return "text", text_config(name, name)


def text_config(name: str, place: str):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"model {name}: neither a timm name nor a configuration that can be read ({reason}). Without a network"
            f" give a folder with config.json, a timm name such as resnet50, or one of {', '.join(KNOWN)}"
        ) from None


def make_model(found: tuple):
    """Return a model for classification."""
    if found[0] == "image":
        import timm

        return timm.create_model(found[1], pretrained=False, **found[2])
    from transformers import AutoModelForSequenceClassification

    try:
        return AutoModelForSequenceClassification.from_config(found[1])
    except ValueError:
        kind = found[1].model_type
        raise UserError(
            f"model: transformers has no classifier of type {kind}: give an encoder or a timm name"
        ) from None


def make_meta_model(found: tuple):
    """Return the same on the meta device: shapes without storage."""
    import torch

    with torch.device("meta"):
        return make_model(found)


def become_fake(model) -> None:
    """In a FakeTensorMode: replace the model's meta tensors by such as seem to be on the CPU. Tied ones stay tied."""
    import torch

    made = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if old not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    is_parameter = tensors is module._parameters
                    made[old] = torch.nn.Parameter(new, old.requires_grad) if is_parameter else new
                tensors[name] = made[old]


def repeated_blocks(model) -> list:
    """Return the longest list of equal layers, which is what FSDP wraps and a pipeline cuts; [] if there is none."""
    from torch import nn

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    alike = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    return max(alike, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()), default=[])


# --- a pass without storage -----------------------------------------------------------------------------------
def live_bytes():
    """Return a context that counts the bytes of the tensors made in it: `live` now, `peak` at most."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LiveBytes(TorchDispatchMode):
        live = peak = 0

        def __init__(self, outside):
            super().__init__()
            self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in outside}

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.note(tensor.untyped_storage())
            return result

        def note(self, storage) -> None:
            key = storage._cdata
            if key not in self.sizes:  # not a view
                self.sizes[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.forget, key)

        def forget(self, key: int) -> None:
            self.live -= self.sizes.pop(key)

    return LiveBytes


def peaks(found: tuple, samples: int, size: int, precision: str, is_checkpointed: bool) -> tuple[float, float]:
    """Return the peak of a forward and backward pass in bytes, gradients included, parameters not.

    First without gradients at its start, as in a step of one micro-batch; then with those of a micro-batch before it.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = make_meta_model(found).train()
    with FakeTensorMode():
        become_fake(model)
        if is_checkpointed and found[0] == "image":
            model.set_grad_checkpointing(True)
        elif is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if found[0] == "image":
            inputs, outside = (torch.zeros(samples, 3, size, size),), {}
        else:
            tokens = torch.zeros(samples, size, dtype=torch.long)
            inputs, outside = (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        counted, found_peaks = live_bytes()([*model.parameters(), *model.buffers()]), []
        with counted:
            for _ in range(2):
                counted.peak = counted.live
                autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
                with autocast:
                    output = model(*inputs, **outside)
                    loss = (output if found[0] == "image" else output.logits).float().logsumexp(-1).sum()
                loss.backward()
                del output, loss
                found_peaks.append(float(counted.peak))
    return found_peaks[0], found_peaks[1]


@dataclass
class Passes:
    """What forward and backward passes of one kind need: their peaks (bytes) at 1 and at LARGE samples."""

    one: tuple[float, float]
    large: tuple[float, float]
    gradients: float

    def activations(self, samples: int) -> float:
        """Everything but the gradients."""
        return self.one[1] - self.gradients + (samples - 1) * self._slope()

    def with_gradients(self, samples: int, is_first: bool) -> float:
        """Activations and gradients together, which in the only micro-batch of a step grow as the others shrink."""
        if not is_first:
            return self.gradients + self.activations(samples)
        return max(self.one[0], self.large[0] + (samples - LARGE) * self._slope())

    def _slope(self) -> float:
        return (self.large[1] - self.one[1]) / (LARGE - 1)


@dataclass
class Shape:
    """What the arithmetic needs of a model. Bytes in float32."""

    parameters: float
    buffers: float
    block: float  # the largest of the repeated blocks
    num_blocks: int
    outside: float  # all parameters that are in none of them

    @property
    def gathered(self) -> float:
        """Parameters that FSDP has whole at a time: the root's, a block, and the next one, which is on its way."""
        return min(self.parameters, self.outside + 2 * self.block)


def shape_of(found: tuple) -> Shape:
    model = make_meta_model(found)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in repeated_blocks(model)]
    whole, buffers = (sum(tensor.nbytes for tensor in tensors) for tensors in (model.parameters(), model.buffers()))
    return Shape(whole, buffers, max(sizes, default=0), len(sizes), whole - sum(sizes))


# --- memory and time --------------------------------------------------------------------------------------------
STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP2, ZeRO-3": 3}


def memory(method: str, shape: Shape, passes: Passes, n: int, samples: int, num_passes: int = 1, half=False) -> float:
    """Return the bytes that the fullest process needs at its peak, with micro-batches of `samples`.

    n: processes that the method deals the model to. half: parameters are gathered in bfloat16.
    """
    whole = shape.parameters
    if method == "pipeline":  # 1F1B: the first of n stages has n micro-batches in flight, of 1/n of the layers
        stage = shape.outside + math.ceil(shape.num_blocks / n) * shape.block
        return min(whole, stage) * 4 + shape.buffers + passes.activations(samples)
    stage = STAGES[method]
    stored = zero_stored(stage, whole, n, shape.gathered)
    fixed = stored["parameters"] + stored["optimizer"] + shape.buffers
    if stage >= 2:  # a unit's gradients are whole until they are dealt out
        fixed += stored["gathered"] * (0.5 if half else 1) + max(shape.block, shape.outside)
        activations = passes.activations(samples)
        return fixed + activations + (passes.with_gradients(samples, num_passes == 1) - activations) / n
    copies = stored["gradients"] - whole  # stage 1: the gradients of its share, as one tensor
    if stage == 0 and n > 1:
        copies = whole  # DDP's buckets, beside the gradients
    in_backward = passes.with_gradients(samples, is_first=num_passes == 1)
    in_update = whole + stored["optimizer"] / 2  # AdamW over lists of tensors, as on a GPU: a temporary of each
    return fixed + copies + max(in_backward, in_update)


def largest_micro_batch(limit: float, most: int, need) -> int:
    """Return the largest number of samples, at most `most`, for which need(samples) <= limit; 0 if there is none."""
    fits, fails = 0, most + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if need(middle) <= limit else (fits, middle)
    return fits


def wire_seconds(method: str, shape: Shape, n: int, num_passes: int, bandwidth: float, half: bool) -> float:
    """Return the seconds that a step's collectives take if nothing overlaps. bandwidth: bytes/s of the slowest link."""
    if n == 1:
        return 0.0
    stage = STAGES[method]
    sent = zero_bytes_sent(stage, shape.parameters, n, num_passes, 0.5 if half and stage == 3 else 1)
    count = shape.parameters / BUCKET if stage < 2 else (shape.num_blocks + 1) * (2 * num_passes + 1)
    return sent / bandwidth + math.ceil(count) * LATENCY * math.ceil(math.log2(n))


# --- the plan ---------------------------------------------------------------------------------------------------
@dataclass
class Way:
    """One way to train: a rung of the usual order."""

    name: str
    profile: str
    micro_batch_size: int  # the largest that fits; 0: none does
    bytes: float  # at that size, or at 1
    seconds: float  # on the wire, each step
    idle: float = 0.0
    advice: str = ""


def make_plan(options, found: tuple) -> tuple[Shape, list[Way]]:
    """Return the model's shape and the ways to train it, in the order in which to try them."""
    n, share = options.gpus, max(1, math.ceil(options.global_batch_size / options.gpus))
    limit, bandwidth = options.gpu_memory * GIB * USABLE, options.bandwidth * 1e9
    shape, known = shape_of(found), {}

    def passes_of(size: int, precision: str, is_checkpointed: bool) -> Passes:
        key = (size, precision, is_checkpointed)
        if key not in known:
            known[key] = Passes(peaks(found, 1, *key), peaks(found, LARGE, *key), shape.parameters)
        return known[key]

    def way(name, profile, method, advice="", size=options.size, precision="no", is_checkpointed=False) -> Way:
        passes, half = passes_of(size, precision, is_checkpointed), precision == "bf16"

        def need(samples: int) -> float:
            return memory(method, shape, passes, n, samples, math.ceil(share / samples), half)

        fits = largest_micro_batch(limit, share, need)
        seconds = wire_seconds(method, shape, n, math.ceil(share / max(1, fits)), bandwidth, half)
        return Way(name, profile, fits, need(max(1, fits)), seconds, advice=advice)

    plain = "single_gpu" if n == 1 else "multi_node" if options.nodes > 1 else "multi_gpu"
    half = {"precision": "bf16"}
    full = half | {"is_checkpointed": True}
    smaller, less = ("max_length" if found[0] == "text" else "image_size"), options.size // 2
    with_bf16, with_both = "PRECISION=bf16", "PRECISION=bf16 and gradient_checkpointing: true"
    if found[0] == "image":
        with_both = "PRECISION=bf16 and set_grad_checkpointing in build_model"
    name = "DDP" if n > 1 else "one process"
    ways = [
        way(name, plain, "DDP"),
        way(f"{name}, bf16", plain, "DDP", with_bf16, **half),
        way(f"{name}, bf16, half the size", plain, "DDP", f"{with_bf16} and {smaller}: {less}", size=less, **half),
        way(f"{name}, bf16, checkpointing", plain, "DDP", with_both, **full),
    ]
    if n > 1:
        ways += [
            way("ZeRO-1, bf16, checkpointing", "deepspeed_zero2 with zero_stage: 1", "ZeRO-1", with_both, **full),
            way("ZeRO-2, bf16, checkpointing", "deepspeed_zero2", "ZeRO-2", with_both, **full),
            way("FSDP2 or ZeRO-3, the same", "fsdp (or deepspeed_zero3)", "FSDP2, ZeRO-3", with_both, **full),
        ]
    if n > 1 and shape.num_blocks > 1:
        ways.append(pipeline(shape, passes_of(options.size, "bf16", True), options, share, limit, bandwidth))
    return shape, ways


def pipeline(shape: Shape, passes: Passes, options, share: int, limit: float, bandwidth: float) -> Way:
    """Return a pipeline over as few GPUs of a node as do, at most one for each block; data parallel over the rest."""
    per_node = options.gpus // options.nodes
    counts = [p for p in range(2, min(per_node, shape.num_blocks) + 1) if options.gpus % p == 0] or [options.gpus]
    for stages in counts:
        samples = share * stages  # of a step, in one pipeline
        most = max(1, samples // (4 * stages))  # four micro-batches a stage, or it idles too long

        def need(count: int, stages=stages) -> float:
            return memory("pipeline", shape, passes, stages, count)

        if fits := largest_micro_batch(limit, most, need):
            break
    micro_batches = math.ceil(samples / max(1, fits))
    replicas = options.gpus // stages
    sent = zero_bytes_sent(0, shape.parameters / stages, replicas)
    advice = "no profile of the templates: see examples/parallelism/pipeline_parallel.py"
    return Way(
        f"pipeline of {stages} stages, the same",
        "none",
        fits,
        need(max(1, fits)),
        sent / bandwidth,
        pipeline_idle(stages, micro_batches),
        advice,
    )


def describe(options, found: tuple, shape: Shape, ways: list[Way]) -> tuple[list[str], bool]:
    """Return the plan as lines, and whether there is a way that fits."""
    share = max(1, math.ceil(options.global_batch_size / options.gpus))
    unit = "tokens" if found[0] == "text" else "pixels a side"
    lines = [
        f"model      {options.model}: {shape.parameters / BYTES:,.0f} parameters, {shape.parameters / GIB:.2f} GB in"
        f" fp32, {shape.num_blocks} equal blocks",
        f"step       {options.global_batch_size} samples of {options.size} {unit}: {share} on each of {options.gpus}"
        f" processes, {options.nodes} node{'s' if options.nodes > 1 else ''}",
        f"budget     {options.gpu_memory * USABLE:.1f} of {options.gpu_memory:g} GB on each GPU;"
        f" {options.bandwidth:g} GB/s on the slowest link",
        "",
        f"{'way':<34} {'GB':>7} {'micro-batch':>12} {'accumulation':>13} {'wire, s':>8} {'idle':>5}",
    ]
    for way in ways:
        accumulation = math.ceil(share / way.micro_batch_size) if way.micro_batch_size else 0
        lines.append(
            f"{way.name:<34} {way.bytes / GIB:>7.2f} {way.micro_batch_size or 'none fits':>12}"
            f" {accumulation or '':>13} {way.seconds:>8.3f} {f'{way.idle:.0%}' if way.idle else '':>5}"
        )
    if options.gpus > options.global_batch_size:
        lines.append(f"note       {options.gpus} processes share {options.global_batch_size} samples: some have none")
    chosen = next((way for way in ways if way.micro_batch_size), None)
    lines.append("")
    if chosen is None:
        lines.append("take       nothing fits: a smaller model, or GPUs with more memory")
        return lines, False
    before = ways[: ways.index(chosen)]
    why = "data parallel fits: nothing simpler does more" if not before else f"{before[-1].name} does not fit"
    lines.append(f"take       {chosen.name}: profile {chosen.profile}{f', {chosen.advice}' if chosen.advice else ''}")
    lines.append(f"           micro_batch_size: {chosen.micro_batch_size}")
    lines.append(f"why        {why}")
    return lines, True


# --- command line -------------------------------------------------------------------------------------------------
def positive(kind, text: str):
    value = kind(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def read_options(arguments: list[str]):
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            raise UserError(f"{message} (--help lists the options)")

    def count(text: str) -> int:
        return positive(int, text)

    def number(text: str) -> float:
        return positive(float, text)

    parser = Parser("plan.py", allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with config.json, a timm name, or a model on the hub")
    parser.add_argument("--gpus", type=count, default=1, help="over all nodes")
    parser.add_argument("--gpu_memory", type=number, required=True, help="GB of one GPU")
    parser.add_argument("--nodes", type=count, default=1)
    parser.add_argument("--bandwidth", type=number, help="GB/s of the slowest link: `make doctor LAUNCH=1` measures it")
    parser.add_argument("--global_batch_size", type=count, default=32, help="samples in one step")
    parser.add_argument("--size", type=count, help="max_length (128) or image_size (224)")
    options = parser.parse_args(arguments)
    if options.gpu_memory > MOST_GPU_MEMORY:
        gigabytes = options.gpu_memory / 1024
        raise UserError(f"gpu_memory {options.gpu_memory:g}: it is in GB: did you mean {gigabytes:.3g}?")
    if options.nodes > options.gpus:
        raise UserError(
            f"nodes {options.nodes} but gpus {options.gpus}: gpus counts those of all nodes; give more of them"
        )
    if options.gpus % options.nodes:
        raise UserError(f"gpus {options.gpus} cannot be dealt evenly to {options.nodes} nodes: give a multiple")
    if options.bandwidth is None:
        options.bandwidth = WIRE[min(options.nodes, 2)]
    return options


def main(arguments: list[str]) -> int:
    options = read_options(arguments)
    warnings.simplefilter("ignore")  # of the libraries, about how a model is built
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found = find_model(options.model)
    if options.size is None:
        options.size = 128 if found[0] == "text" else 224
    longest = getattr(found[1], "max_position_embeddings", None)
    if longest and options.size > longest:
        raise UserError(f"size {options.size}: {options.model} reads {longest} tokens at most")
    lines, is_possible = describe(options, found, *make_plan(options, found))
    print("\n".join(lines))
    return 0 if is_possible else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
