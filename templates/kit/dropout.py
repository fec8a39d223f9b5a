"""Dropout that depends on (seed, step, sample, layer, place in the sample) alone, however a step is split.

torch draws each mask from a generator, so that the numbers follow the micro-batch and the process. Here a mask is an
integer hash of indices: nothing has to be saved to resume, and one process draws what eight draw together.
"""

import functools
import sys
import warnings
import weakref
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, redispatch_function

CHANNEL_DROPOUTS = {F.dropout1d: (3,), F.dropout2d: (3, 4), F.dropout3d: (5,), F.feature_alpha_dropout: (3, 4, 5)}
DROPOUTS = {F.dropout, F.alpha_dropout, torch.dropout, torch.alpha_dropout, *CHANNEL_DROPOUTS}
ALPHA_DROPOUTS = {F.alpha_dropout, torch.alpha_dropout, F.feature_alpha_dropout}
UNIFORM = {torch.rand, torch.rand_like, torch.Tensor.uniform_}
BERNOULLI = {torch.Tensor.bernoulli_, torch.Tensor.bernoulli, torch.bernoulli}
# They run Python that draws in turn, such as a layer computed again in the backward pass: the mode stays on inside.
CALLERS = {F.multi_head_attention_forward, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
OTHER_DRAWS = {torch.randn, torch.randn_like, torch.normal, torch.randint, torch.randint_like, torch.randperm}
OTHER_DRAWS |= {torch.multinomial, torch.poisson, F.gumbel_softmax, torch.Tensor.normal_, torch.Tensor.exponential_}
OTHER_DRAWS |= {torch.Tensor.random_, torch.Tensor.multinomial}

_FACTS = weakref.WeakKeyDictionary()  # model -> (is time before batch, shapes of its weights, what was warned about)


@contextmanager
def exact_dropout(model: torch.nn.Module, sample_ids: torch.Tensor, seed: int, step: int):
    """Make every dropout in the forward and backward pass of one micro-batch a function of its sample and place.

    `sample_ids`: int64 [batch], in the order of the inputs. Covers all dropouts of torch, attention and stochastic
    depth; a layer that draws in another way is named in a warning, once. Evaluation needs no such context.
    """
    if not model.training:
        yield
        return
    device = next((parameter.device for parameter in model.parameters()), sample_ids.device)
    generator = torch.default_generator
    start = int(torch.randint(2**48, (), generator=generator, device="cpu"))  # what draws by itself goes on from here
    state = generator.get_state()
    generator.manual_seed(start)
    mode = SampleDropout(model, sample_ids.to(device), seed, step, start)
    try:
        with mode, _drop_block_by_sample():
            yield
    finally:
        mode.warn()
        generator.set_state(state)


@contextmanager
def _drop_block_by_sample():
    """Let timm's DropBlock scale each sample by what is kept of it, not of the whole micro-batch."""
    drop = sys.modules.get("timm.layers.drop")
    if drop is None:
        yield
        return
    original = drop.drop_block_2d

    def by_sample(x, *, with_noise=False, scale_by_keep=True, inplace=False, **options):
        if with_noise or not scale_by_keep:
            return original(x, with_noise=with_noise, scale_by_keep=scale_by_keep, inplace=inplace, **options)
        with torch.no_grad():
            keep = original(torch.ones_like(x), scale_by_keep=False, **options)
            share = keep.float().mean((1, 2, 3), keepdim=True).clamp(min=1e-7)
            keep = keep * (1 / share).to(keep.dtype)
        return x.mul_(keep) if inplace else x * keep

    drop.drop_block_2d = by_sample
    try:
        yield
    finally:
        drop.drop_block_2d = original


def dropout_notes(model: torch.nn.Module) -> list[str]:
    """Return one line for each way this model draws that depends on how a step is split."""
    notes = []
    modules = dict(model.named_modules())
    is_compiled = any(module._compiled_call_impl or hasattr(module, "_orig_mod") for module in modules.values())
    flags = ("gradient_checkpointing", "grad_checkpointing")  # of transformers, of timm
    if is_compiled and any(getattr(module, flag, False) for module in modules.values() for flag in flags):
        notes.append("compiled, gradient checkpointing draws dropout by process and micro-batch: use one of them")
    for name, module in modules.items():
        if isinstance(module, torch.nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
            notes.append(f"{name}: dropout between recurrent layers is drawn inside torch, by process and micro-batch")
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention not in (None, "eager", "sdpa", "flex_attention"):
        notes.append(f"attn_implementation {attention} draws its own dropout, by process and micro-batch: use sdpa")
    return notes


class SampleDropout(TorchFunctionMode):
    """Replaces what draws in one micro-batch; a draw is known by its number since the beginning of the pass."""

    def __init__(self, model: torch.nn.Module, sample_ids: torch.Tensor, seed: int, step: int, start: int):
        if model not in _FACTS:
            shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim == 2}
            _FACTS[model] = any(getattr(m, "batch_first", True) is False for m in model.modules()), shapes, set()
        self.is_time_first, self.weight_shapes, self.warned = _FACTS[model]
        keys = F.pad(sample_ids, (0, 1), value=-1).to(torch.int32)
        for number in (seed, seed >> 32, step):
            keys = _mix(keys + _signed((number + 1) * 0x9E3779B9))
        self.keys, self.common_key = keys[:-1], keys[-1]  # of each sample; of what all samples share
        self.model, self.start, self.num_compiled, self.notes = model, start, 0, {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return self.dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention and _dropout_p(*args, **kwargs) > 0:
            return self.attention(*args, **kwargs)
        if func in UNIFORM and kwargs.get("generator") is None:
            low, high = _bounds(*args, **kwargs) if func is torch.Tensor.uniform_ else (0.0, 1.0)
            out = func(*args, **kwargs)
            with torch.no_grad():
                return out.copy_(low + (high - low) * self.uniform(out.shape, out.device))
        if func in BERNOULLI and kwargs.get("generator") is None:
            out = func(*args, **kwargs)
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if func is torch.Tensor.bernoulli_ else args[0])
            with torch.no_grad():
                return out.copy_(self.uniform(out.shape, out.device) < p)
        if func in CALLERS:
            with self:
                return redispatch_function(func, types, args, kwargs)
        is_recurrent = func in RECURRENT and self.model.training and any(type(a) is float and a > 0 for a in args)
        if func in OTHER_DRAWS or is_recurrent or kwargs.get("generator") is not None:
            self.note(f"draws with {func.__name__}, by process and micro-batch")
        return func(*args, **kwargs)

    def dropout(self, func, x, p=0.5, training=None, inplace=False, *, train=None):
        training = train if training is None else training
        training = func not in (F.alpha_dropout, F.feature_alpha_dropout) if training is None else training
        if not training or p == 0:
            return x
        shape = x.shape
        if func in CHANNEL_DROPOUTS:  # whole channels of [batch, channel, ...]
            if x.ndim not in CHANNEL_DROPOUTS[func]:
                self.note(f"draws with {func.__name__} of {x.ndim} dimensions, by process and micro-batch")
                return func(x, p, training, inplace)
            shape = (*shape[:2], *(1,) * (x.ndim - 2))
        keep = self.keep(shape, p, x.device)
        if func in ALPHA_DROPOUTS:  # Klambauer et al. 2017: what is dropped goes to the floor of SELU, then mean and
            floor = -1.7580993408473766  # variance are put back
            scale = ((1 + floor**2 * p) * (1 - p)) ** -0.5 if p < 1 else 0.0
            y = torch.where(keep, x, floor) * scale - scale * floor * p
            return x.copy_(y) if inplace else y
        scale = 1 / (1 - p) if p < 1 else 0.0
        return x.mul_(keep).mul_(scale) if inplace else x * keep * scale

    def attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        """Attention written out, as torch computes it where no fused kernel fits: memory [batch, heads, query, key]."""
        if enable_gqa:
            key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
        scores = query * (query.size(-1) ** -0.5 if scale is None else scale) @ key.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch.softmax(scores, -1) if attn_mask is None else torch.ops.aten._safe_softmax(scores, -1)
        return self.dropout(F.dropout, weights, dropout_p, True).to(value.dtype) @ value

    def keep(self, shape, p: float, device) -> torch.Tensor:
        """Return a bool mask of `shape` that is False with probability p."""
        if p >= 1:
            return torch.zeros(shape, dtype=torch.bool, device=device)
        return self.bits(shape, device) >= int(p * 2**32) - 2**31

    def uniform(self, shape, device) -> torch.Tensor:
        return ((self.bits(shape, device) >> 8) & 0xFFFFFF) * 2.0**-24  # exact in float32, on every device

    def bits(self, shape, device) -> torch.Tensor:
        """Return int32 random bits, a function of (key of the sample, number of the draw, indices in the sample)."""
        batch = self.batch_dim(shape)
        coordinates = _coordinates if torch.compiler.is_compiling() else _cached_coordinates
        x = (self.common_key if batch is None else self.keys).to(device) + _signed(self.next_number() * 0x9E3779B9)
        if batch is not None:  # a sample may have several rows, such as windows or tokens
            rows = coordinates(shape[batch] // len(self.keys), batch, device)
            x = (x.unsqueeze(1) + rows).view([-1 if dim == batch else 1 for dim in range(len(shape))])
        for dim, size in enumerate(shape):
            if dim != batch:
                x = x + coordinates(size, dim, device).view([-1 if d == dim else 1 for d in range(len(shape))])
        return _mix(x)

    def batch_dim(self, shape) -> int | None:
        """Return the dimension that holds the samples, None where all samples share what is drawn."""
        batch, ndim = len(self.keys), len(shape)
        if ndim == 0:
            return None
        if ndim > 1 and shape[1] == batch and (self.is_time_first or (ndim == 3 and shape[0] != batch)):
            return 1  # [time, batch, ...]
        if shape[0] == batch or (ndim == 4 and shape[2] == shape[3] and shape[0] % batch == 0):
            return 0  # or attention inside windows: [batch * windows, heads, place, place]
        if ndim == 2 and any(shape[0] == n and shape[1] == m for n, m in self.weight_shapes):
            return None  # dropout of a weight, such as DeBERTa's embeddings of relative positions
        if shape[0] % batch == 0:
            self.note("takes what it draws for several rows of each sample, one sample after another")
            return 0
        self.note("draws one mask for all samples of a micro-batch")
        return None

    def next_number(self) -> int:
        """Count the draws of this pass.

        The count lives in the seed of torch's generator for the CPU: gradient checkpointing puts that back before it
        computes a layer again, so that the layer draws what it drew before. A compiled model counts while it is traced.
        """
        if torch.compiler.is_compiling():
            self.num_compiled += 1
            return self.num_compiled
        seed = torch.default_generator.initial_seed() + 1
        torch.default_generator.manual_seed(seed)
        return seed - self.start

    def note(self, text: str) -> None:
        """Remember to warn of the layer that runs, once for each kind of layer."""
        if text in self.warned or text in self.notes:
            return
        self.notes[text] = "a compiled layer"
        if not torch.compiler.is_compiling():
            names = {module: name for name, module in self.model.named_modules()}
            frame = sys._getframe()
            while frame and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
                frame = frame.f_back
            self.notes[text] = (frame and names.get(frame.f_locals["self"])) or "the model"

    def warn(self) -> None:
        for text, layer in self.notes.items():
            warnings.warn(f"{layer} {text}: the run may depend on how a step is split", stacklevel=5)
        self.warned.update(self.notes)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int32 in place: lowbias32 of Chris Wellons' hash-prospector. Integers wrap alike on every device."""
    shifted = torch.empty_like(x)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2 ** (32 - shift) - 1))  # the shift copies the sign: clear it
        if factor != 1:
            x.mul_(_signed(factor))
    return x


def _coordinates(size: int, dim: int, device) -> torch.Tensor:
    """Return a random int32 for each index of a dimension."""
    return _mix(torch.arange(size, dtype=torch.int32, device=device) + _signed((dim + 1) * 0x9E3779B9))


_cached_coordinates = functools.lru_cache(maxsize=1024)(_coordinates)  # on a GPU, each small kernel costs a launch


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def _dropout_p(query, key, value, attn_mask=None, dropout_p=0.0, *_, **__) -> float:
    return dropout_p


def _bounds(x, low=0.0, high=1.0, **kwargs):
    return kwargs.get("from", low), kwargs.get("to", high)
