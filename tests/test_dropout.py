"""Dropout depends on (seed, step, sample, layer, place in the sample), never on how a step is split."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kit.dropout import _mix, dropout_notes, exact_dropout

IDS = torch.tensor([7, 900, 31, 2**31 + 5, 12, 0, 5551, 64])
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
SPLITS = {
    "5 + 3": [[0, 1, 2, 3, 4], [5, 6, 7]],
    "one by one": [[i] for i in range(8)],
    "permuted": [[6, 2, 7, 0], [1, 5, 3, 4]],
}


class Text(nn.Module):
    """Embedding, attention with dropout, and a dropout called twice, without a module, and on a residual path."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(50, 24), nn.Linear(24, 72), nn.Linear(24, 3)
        self.dropout = nn.Dropout(0.2)
        self.has_checkpointing, self.num_blocks = False, 2

    def block(self, x, mask):
        q, k, v = self.mix(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        p = 0.3 if self.training else 0.0
        x = x + self.dropout(F.scaled_dot_product_attention(q, k, v, mask[:, None, None], p).transpose(1, 2).flatten(2))
        return x + self.dropout(F.dropout(x, 0.1, self.training))

    def forward(self, input_ids, attention_mask):
        x, mask = self.dropout(self.embed(input_ids)), attention_mask.bool()
        for _ in range(self.num_blocks):
            if self.has_checkpointing:
                x = torch.utils.checkpoint.checkpoint(self.block, x, mask, use_reentrant=False)
            else:
                x = self.block(x, mask)
        return self.head(self.dropout(x[:, 0]))


def text_inputs(rows: list[int]) -> dict:
    """Samples of 3 to 17 tokens, padded to the longest of these rows."""
    draw = torch.Generator().manual_seed(0)
    samples = [torch.randint(1, 50, (3 + 2 * i,), generator=draw) for i in range(8)]
    ids = nn.utils.rnn.pad_sequence([samples[row] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def image_inputs(rows: list[int]) -> dict:
    return {"x": torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))[rows]}


def bert(**options):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes, **options))


def deberta():
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
    return DebertaV2ForSequenceClassification(DebertaV2Config(vocab_size=50, num_labels=3, **sizes, **relative))


def timm_model(name: str, **options):
    import timm

    return timm.create_model(name, num_classes=3, drop_rate=0.2, drop_path_rate=0.4, **options)


def vit():
    return timm_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=48, num_heads=3, attn_drop_rate=0.2, proj_drop_rate=0.2
    )


def swin():
    sizes = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)}
    return timm_model("swin_tiny_patch4_window7_224", attn_drop_rate=0.2, **sizes)


class TimeFirst(nn.Module):
    """torch's own encoder on [time, batch, channel], with as many times as samples and with a multiple of them."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.2)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.layers(x.flatten(1)[:, : 8 * 12].unflatten(1, (8, 12)).transpose(0, 1)).mean(0))


class Others(nn.Module):
    """Every other dropout of torch, stochastic depth of torchvision, a layer left out now and then."""

    def __init__(self):
        from torchvision.ops import StochasticDepth

        super().__init__()
        self.head = nn.Linear(32, 3)
        layers = nn.Dropout1d(0.2), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), StochasticDepth(0.2, "row")
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = nn.functional.dropout2d(x, 0.2).unsqueeze(1)
        x = torch.dropout(nn.functional.dropout3d(x, 0.2), 0.2, True).squeeze(1).mean(2)
        for layer in self.layers:
            if torch.rand(()) > 0.3:
                x = layer(x)
        return self.head(x.mean(1) * torch.bernoulli(torch.full_like(x[:, :1, 0], 0.8)))


MODELS = {
    "text": (Text, text_inputs),
    "bert": (bert, text_inputs),
    "bert eager": (lambda: bert(attn_implementation="eager"), text_inputs),
    "deberta": (deberta, text_inputs),
    "vit": (vit, image_inputs),
    "swin": (swin, image_inputs),
    "convnext": (lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 8, 8, 8)), image_inputs),
    "time first": (TimeFirst, image_inputs),
    "others": (Others, image_inputs),
}


def build(name: str):
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def step(model, inputs, parts=([*range(8)],), seed=1, step=3, precision=None) -> tuple[float, torch.Tensor]:
    """Return the summed loss of one step and all its gradients as one vector."""
    model.zero_grad()
    total = 0.0
    for rows in parts:
        arguments = inputs(rows)
        with exact_dropout(model, IDS[rows], seed, step):
            with torch.autocast("cpu", precision, enabled=precision is not None):
                logits = model(**arguments)
            logits = getattr(logits, "logits", logits).float()
            loss = F.cross_entropy(logits, LABELS[rows], reduction="sum")
            loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same(one, other, rounding=2e-5):  # sums of float32 in another order
    assert one[0] == pytest.approx(other[0], rel=rounding)
    assert (one[1] - other[1]).norm() < rounding * one[1].norm()


def masks(num_samples=8, shape=(40, 50), p=0.5, steps=(1,), layers=1, seed=1) -> torch.Tensor:
    """Return what is kept as 0 and 1: [steps, layers, num_samples, *shape]."""
    model, x = nn.Dropout(p).train(), torch.ones(num_samples, *shape)
    kept = []
    for number in steps:
        with exact_dropout(model, torch.arange(num_samples), seed, number):
            kept.append(torch.stack([(model(x) > 0).float() for _ in range(layers)]))
    return torch.stack(kept)


# ------------------------------------------------------------------------------------------------ the same run


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("error::UserWarning:kit")
def test_a_split_step_is_the_whole_step(name):
    model, inputs = build(name), MODELS[name][1]
    whole = step(model, inputs)
    for parts in SPLITS.values():
        assert_same(whole, step(model, inputs, parts))
    assert abs(whole[0] - step(model, inputs, step=4)[0]) > 1e-4, "dropout is off, or every step has the same masks"
    assert abs(whole[0] - step(model, inputs, seed=2)[0]) > 1e-4


def test_each_attention_of_transformers_gives_the_same_step():
    assert_same(step(build("bert"), text_inputs), step(build("bert eager"), text_inputs))


@pytest.mark.parametrize("name", ["text", "bert", "vit"])
def test_gradient_checkpointing_draws_the_same_again(name):
    model, inputs = build(name), MODELS[name][1]
    plain = step(model, inputs)
    if name == "text":
        model.has_checkpointing = True
    elif name == "bert":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.set_grad_checkpointing()
    again = step(model, inputs)
    assert again[0] == plain[0]
    assert torch.equal(again[1], plain[1])
    assert_same(plain, step(model, inputs, SPLITS["5 + 3"]))


def test_a_step_needs_no_step_before_it():
    model = build("text")
    first = step(model, text_inputs)
    torch.manual_seed(99)
    step(model, text_inputs, step=1)
    again = step(model, text_inputs)
    assert again[0] == first[0]
    assert torch.equal(again[1], first[1])


def test_bf16_drops_what_float32_drops():
    model, x = nn.Dropout(0.3).train(), torch.ones(4, 30)
    kept = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with exact_dropout(model, IDS[:4], 1, 1):
            kept.append(model(x.to(dtype)) > 0)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])
    model = build("text")
    whole, parts = (step(model, text_inputs, p, precision=torch.bfloat16) for p in ([[*range(8)]], SPLITS["5 + 3"]))
    assert_same(whole, parts, rounding=2e-2)  # bf16 has 8 bits


@pytest.mark.parametrize(("backend", "num_blocks"), [("eager", 1), ("aot_eager", 0)])  # tracing takes seconds
def test_a_compiled_model_draws_what_it_draws_uncompiled(backend, num_blocks):
    torch.compiler.reset()
    model = build("text")
    model.num_blocks = num_blocks
    compiled = copy.deepcopy(model)
    compiled.compile(backend=backend, dynamic=True, fullgraph=True)
    for number in (3, 4):
        plain = step(model, text_inputs, step=number)
        assert_same(plain, step(compiled, text_inputs, step=number))
        assert_same(plain, step(compiled, text_inputs, SPLITS["5 + 3"], step=number))


def test_draws_of_other_kinds_go_on_and_outside_the_context_nothing_changes():
    after = []
    for layers in (1, 5):
        torch.manual_seed(3)
        masks(layers=layers)
        after.append(torch.rand(4))
    assert torch.equal(*after), "the state of the generator follows what was drawn inside"
    torch.manual_seed(3)
    assert not torch.equal(torch.rand(4), after[0]), "two micro-batches in a row would begin with the same state"
    model = build("text")
    x = torch.ones(8, 100)
    torch.manual_seed(3)
    expected = F.dropout(x)
    torch.manual_seed(3)
    with exact_dropout(model.eval(), IDS, 1, 1):
        assert torch.equal(F.dropout(x), expected), "an evaluation is left alone"


# ------------------------------------------------------------------------------------------------- the masks


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_kept_is_the_one_asked_for(p):
    kept = masks(num_samples=32, shape=(100, 100), p=p)
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * deviation
    of_samples = (kept.mean((0, 1, 3, 4)) - (1 - p)) / (p * (1 - p) / 10_000) ** 0.5
    assert of_samples.abs().max() < 4.5  # 32 normal numbers
    assert 0.4 < of_samples.std() < 1.6


def test_masks_of_samples_layers_steps_and_seeds_have_nothing_in_common():
    kept = masks(num_samples=6, shape=(50, 80), steps=(1, 2, 3, 1001), layers=4)
    rows = torch.cat([kept.flatten(0, 2), masks(num_samples=6, shape=(50, 80), seed=2)[0, 0]]).flatten(1)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 5.5 / 4000**0.5  # about 5,000 pairs of 4,000 numbers: 5.5 deviations
    assert correlation.std() == pytest.approx(4000**-0.5, rel=0.1)


def test_places_of_a_sample_have_nothing_in_common():
    kept = masks(num_samples=2000, shape=(5, 12))[0, 0].flatten(1).T
    correlation = torch.corrcoef(kept) - torch.eye(60)
    assert correlation.abs().max() < 5 / 2000**0.5
    neighbours = masks(num_samples=1, shape=(2000, 2000))[0, 0, 0] - 0.5
    for other in (neighbours.roll(1, 0), neighbours.roll(1, 1), neighbours.roll((1, 1), (0, 1)), neighbours.T):
        assert abs((neighbours * other).mean()) < 5 * 0.25 / 4e6**0.5 + 0.5 / 2000  # the diagonal meets itself


def test_runs_of_kept_places_have_the_lengths_of_chance():
    kept = masks(num_samples=64, shape=(64, 64))[0, 0].reshape(-1, 4)
    counts = torch.bincount((kept @ torch.tensor([1.0, 2, 4, 8])).long(), minlength=16).float()
    expected = len(kept) / 16
    assert ((counts - expected) ** 2 / expected).sum() < 44  # chi-square with 15 degrees of freedom: one in 10,000


@pytest.mark.parametrize("size", [1, 7, 16, 1003])
def test_the_hash_is_that_of_plain_integers(size):
    def lowbias32(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    numbers = [(i * 2654435761 + 3) % 2**32 for i in range(size)]
    mixed = _mix(torch.tensor(numbers, dtype=torch.int64).to(torch.int32))
    assert [n % 2**32 for n in mixed.tolist()] == [lowbias32(n) for n in numbers]


def test_the_masks_are_those_of_every_machine():
    kept = masks(num_samples=2, shape=(3, 10), seed=42, steps=(7,), layers=2).int().reshape(-1, 10)
    assert ["".join(map(str, row)) for row in kept.tolist()] == [
        *("0100010001", "0111010111", "1010110010", "0011111101", "1101000000", "1110110100"),
        *("1100010110", "1001010001", "0111001001", "0011011100", "0100100100", "1000000110"),
    ]


# ------------------------------------------------------------------------------------------------- the layers


def forward(function, *arguments):
    with exact_dropout(nn.Identity().train(), IDS[: len(arguments[0])], 1, 1):
        return function(*arguments)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_what_is_kept_is_scaled(p):
    x = torch.randn(8, 50)
    for y in (forward(F.dropout, x, p), forward(lambda x: F.dropout(x, p, inplace=True), x.clone())):
        assert torch.equal(y[y != 0], (x / (1 - p) if p < 1 else x)[y != 0]) or torch.allclose(
            y[y != 0], x[y != 0] / (1 - p)
        )
        assert (y == 0).float().mean() == pytest.approx(p, abs=0.1)


def test_whole_channels_and_whole_samples_are_dropped():
    from timm.layers.drop import drop_path
    from torchvision.ops import stochastic_depth

    for function, size in ((F.dropout1d, (9,)), (F.dropout2d, (5, 5)), (F.dropout3d, (3, 3, 3))):
        y = forward(function, torch.ones(8, 60, *size), 0.5).flatten(2)
        assert torch.equal(y.amin(2), y.amax(2))
        assert (y[..., 0] > 0).float().mean() == pytest.approx(0.5, abs=0.1)
    x = torch.ones(8, 6, 4)
    for scale in (True, False):
        y = forward(lambda x, scale=scale: torch.stack([drop_path(x, 0.5, True, scale) for _ in range(50)], 1), x)
        assert set(y.unique().tolist()) == {0.0, 2.0 if scale else 1.0}
        assert torch.equal(y.flatten(2).amin(2), y.flatten(2).amax(2))
        assert (y > 0).float().mean() == pytest.approx(0.5, abs=0.1)
    with pytest.warns(UserWarning, match="one mask for all samples"):
        y = forward(lambda x: stochastic_depth(x, 0.5, "batch"), x)
    assert len(y.unique()) == 1


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.randn(8, 20_000, generator=torch.Generator().manual_seed(0))
    y = forward(lambda x: F.alpha_dropout(x, 0.3, training=True), x)
    assert abs(y.mean()) < 0.02
    assert y.var() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_without_luck_is_that_of_torch(dtype):
    """With a probability that drops nothing, what stands in for torch's attention gives the same numbers."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16, generator=draw).to(dtype) for heads, n in ((4, 7), (2, 9), (2, 9)))
    allowed = torch.rand(2, 1, 7, 9, generator=draw) > 0.5
    allowed[0, 0, 3] = False  # a row that sees nothing is zero, not NaN
    added = torch.randn(2, 1, 7, 9, generator=draw).to(dtype)
    for options in ({}, {"attn_mask": allowed}, {"attn_mask": added}, {"is_causal": True}, {"scale": 0.7}):
        options = options | {"enable_gqa": True}
        ours = forward(lambda q, o=options: F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9, **o), q)
        theirs = F.scaled_dot_product_attention(q, k, v, **options)
        assert ours.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # bf16 has 8 bits
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    dropped = forward(lambda q: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True), q)
    assert not torch.allclose(dropped, F.scaled_dot_product_attention(q, k, v, enable_gqa=True), atol=0.1)


# ------------------------------------------------------------------------------------------- what is not exact


class Odd(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = nn.Sequential(nn.Dropout(0.5)), draw

    def forward(self, x):
        return self.draw(self, x)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda m, x: x + torch.randn_like(x), "the model draws with randn_like, by process and micro-batch"),
        (lambda m, x: m.inner(x.reshape(-1, 5)), "inner.0 takes what it draws for several rows of each sample"),
        (lambda m, x: m.inner(x[:3]), "inner.0 draws one mask for all samples"),
        (lambda m, x: nn.LSTM(5, 5, 2, dropout=0.5)(x)[0], "draws with lstm, by process and micro-batch"),
    ],
)
def test_what_is_not_exact_is_said_once(draw, expected):
    model = Odd(draw).train()
    for times in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with exact_dropout(model, IDS, 1, 1):
                model(torch.ones(8, 20, 5))
        lines = [str(warning.message) for warning in caught if "split" in str(warning.message)]
        assert len(lines) == times
        assert all(expected in line and "\n" not in line for line in lines)


def test_what_is_known_beforehand_is_told_in_notes():
    import timm

    assert dropout_notes(build("text")) == []
    assert dropout_notes(build("bert")) == []
    assert "rnn: " in dropout_notes(nn.ModuleDict({"rnn": nn.LSTM(3, 3, 2, dropout=0.1)}))[0]
    assert dropout_notes(nn.LSTM(3, 3, 2)) == []
    assert dropout_notes(timm.create_model("resnet10t", drop_block_rate=0.1)) == []
    model = build("bert")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert dropout_notes(model) == []
    model.compile(backend="eager")
    assert "gradient checkpointing" in dropout_notes(model)[0]
    model = build("bert")
    model.config._attn_implementation_internal = "flash_attention_2"
    assert "flash_attention_2" in dropout_notes(model)[0]


@pytest.mark.parametrize("couple_channels", [True, False])
def test_drop_block_scales_each_sample_by_what_is_kept_of_it(couple_channels):
    from timm.layers import drop

    block = drop.DropBlock2d(drop_prob=0.3, block_size=3, couple_channels=couple_channels).train()
    x, ids, original = torch.rand(8, 4, 12, 12) + 1, torch.arange(100, 108), drop.drop_block_2d

    def dropped(part: slice) -> torch.Tensor:
        with exact_dropout(block, ids[part], seed=1, step=5):
            return block(x[part])

    whole = dropped(slice(None))
    assert drop.drop_block_2d is original, "nothing outlives the context"
    assert torch.equal(whole, torch.cat([dropped(slice(0, 3)), dropped(slice(3, 8))]))
    assert torch.equal(whole, torch.cat([dropped(slice(i, i + 1)) for i in range(8)]))
    kept = whole != 0
    shares = kept.float().mean((1, 2, 3))
    assert 0.2 < shares.min() < shares.max() < 1 and len(set(shares.tolist())) > 1
    assert torch.allclose(whole, x * kept / shares.view(-1, 1, 1, 1))
