"""The pages in docs/: every block runs, and each check of a fault finds it, and finds nothing where it is not."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch.utils.data import Dataset

from conftest import REPOSITORY, TEMPLATES

DOCS = REPOSITORY / "docs"
BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks_of(page: str) -> list[tuple[str, str, str]]:
    """Return (language, name, text) of every fenced block of a page."""
    found = BLOCK.findall((DOCS / page).read_text("utf-8"))
    assert len(found) > 10
    return found


# ------------------------------------------------------------------------------------------------------ bring your own

PAGE = blocks_of("bring_your_own.md")
OWN = sorted({name for language, name, _ in PAGE if language in ("python", "diff")} - {"imports", "plain", "changed"})


def text_of(language: str, name: str) -> str:
    return "\n".join(text for kind, label, text in PAGE if (kind, label) == (language, name))


def with_changes(source: str, diff: str) -> str:
    """Apply a diff without line numbers: lines with - must be there once; those with + replace them."""
    lines = source.splitlines()
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", diff, re.MULTILINE):
        before, after = ([line[1:] for line in part.splitlines()] for part in (old, new))
        places = [i for i in range(len(lines)) if lines[i : i + len(before)] == before]
        assert len(places) == 1, f"{len(places)} times in blank.py: {before}"
        lines[places[0] : places[0] + len(before)] = after
    return "\n".join(lines) + "\n"


def blank_with(name: str | None) -> types.ModuleType:
    """Return blank.py as a module, changed by the blocks of that name."""
    source = with_changes((TEMPLATES / "blank.py").read_text("utf-8"), text_of("diff", name) if name else "")
    module = types.ModuleType("changed_blank")
    sys.modules[module.__name__] = module
    exec(compile(source, "changed_blank.py", "exec"), module.__dict__)
    exec(text_of("python", "imports"), module.__dict__)
    if name:
        exec(compile(text_of("python", name), f"{name}.py", "exec"), module.__dict__)
    return module


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with data/ as the page has it; Accelerate's global state is new."""
    from accelerate.state import AcceleratorState, GradientState
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    draw = random.Random(0)
    for split, count in (("train", 50), ("validation", 9)):
        rows = [[draw.uniform(-1, 1) for _ in range(8)] for _ in range(count)]
        text = ",".join([*(f"x{i}" for i in range(1, 9)), "y"]) + "\n"
        text += "".join(",".join(map(str, [*row, sum(row)])) + "\n" for row in rows)
        for name, colour in (("cat", (200, 40, 40)), ("dog", (40, 40, 200))):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(count // 2):
                Image.new("RGB", (40, 30), colour).save(tmp_path / "data" / split / name / f"{number}.jpg")
        (tmp_path / "data" / f"{split}.csv").write_text(text, "utf-8")
    yield tmp_path
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def train(module, folder: Path, **changed) -> list[dict]:
    """Run `main` of a module; return the lines of its metrics.jsonl."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    settings = {"global_batch_size": 20, "micro_batch_size": 8, "num_train_epochs": 2, "logging_steps": 1}
    module.main(module.Settings(output_dir=str(folder / "run"), **settings | changed))
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_there_is_a_block_for_each_thing_that_people_bring():
    assert {"csv", "images", "hub", "model", "loss", "tokens", "metric", "groups", "optimizers", "frozen"} == set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_what_you_bring_trains(name, workplace):
    module = blank_with(name)
    if "load_data" not in text_of("python", name):
        module.load_data = lambda settings: (module.OwnDataset(50, seed=0), module.OwnDataset(9, seed=1), None)
    rows = train(module, workplace)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 6
    assert losses[-1] != losses[0]
    evaluation = rows[-1]
    count = 8 if name == "images" else 9
    assert evaluation["eval_samples"] == count
    assert evaluation["eval_loss"] > 0
    if name == "metric":
        assert {"eval_mae", "eval_worst"} <= set(evaluation)
        evaluated = {row["step"]: row["eval_mae"] for row in rows if "eval_mae" in row}
        results = json.loads((workplace / "run" / "run.json").read_text("utf-8"))["results"]
        assert results["best_mae"] == min(evaluated.values()) == evaluated[results["best_step"]]
    if name == "images":
        assert evaluation["eval_accuracy"] in [right / 8 for right in range(9)]
    saved = {path.name for path in (workplace / "run" / "checkpoints" / "step_00000006").iterdir()}
    if name == "optimizers":
        parts = {"body_optimizer.safetensors", "head_optimizer.safetensors", "body_schedule.json", "head_schedule.json"}
        assert parts <= saved
    if name == "frozen":
        from safetensors.torch import load_file

        module.seed_all(42, "model")
        before, after = module.OwnModel().state_dict(), load_file(workplace / "run" / "final" / "model.safetensors")
        moved = {key for key in after if not after[key].equal(before[key])}
        assert moved == {"head.weight", "head.bias"}, "nor did the statistics of BatchNorm move"


def test_several_optimizers_go_on_after_a_crash_as_if_nothing_had_happened(workplace, monkeypatch):
    module = blank_with("optimizers")
    module.load_data = lambda settings: (module.OwnDataset(50, seed=0), module.OwnDataset(9, seed=1), None)
    unbroken = train(module, workplace / "unbroken", checkpointing_steps=2)

    def crash(*_):
        raise KeyError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "note_evaluation", crash)  # after step 3: the next start goes on from step 2
        with pytest.raises(KeyError, match="planted"):
            train(module, workplace / "broken", checkpointing_steps=2)
    broken = train(module, workplace / "broken", checkpointing_steps=2)
    assert json.loads((workplace / "broken" / "run" / "run.json").read_text("utf-8"))["resumes"] == [2]
    for rows in (unbroken, broken):
        for row in rows:
            row.pop("samples_per_second", None)
    assert broken == unbroken


def test_a_loss_weighted_by_tokens_is_the_mean_over_the_tokens_of_the_step(workplace):
    module = blank_with("tokens")
    module.load_data = lambda settings: (module.OwnDataset(50, seed=0), module.OwnDataset(9, seed=1), None)
    rows = {size: train(module, workplace / str(size), micro_batch_size=size) for size in (20, 8, 3)}
    for size in (8, 3):
        for row, other in zip(rows[20], rows[size], strict=True):
            for key in set(row) - {"samples_per_second"}:
                assert row[key] == pytest.approx(other[key], rel=1e-5), (size, key)
    sampler = module.build_sampler(module.Settings(global_batch_size=20), 50, 1)
    train_set = module.OwnDataset(50, seed=0)
    batch = {name: torch.stack([train_set[i][name] for i in sampler.samples(1)]) for name in ("inputs", "label")}
    module.seed_all(42, "model")
    mean = F.cross_entropy(module.OwnModel()(batch["inputs"]).transpose(1, 2), batch["label"], ignore_index=-100)
    assert rows[20][0]["loss"] == pytest.approx(mean.item(), rel=1e-6)


def test_the_five_lines_make_the_plain_loop_independent_of_the_split(workplace):
    blank = blank_with(None)
    weights = {}
    for name, block, micro_batch_size in (("plain", "plain", 32), ("16", "changed", 16), ("5", "changed", 5)):
        blank.seed_all(0)
        train_set, total_steps = blank.OwnDataset(101, seed=0), 40
        settings = blank.Settings(global_batch_size=32, micro_batch_size=micro_batch_size, num_train_epochs=10)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.Dropout(0.05),
            torch.nn.GELU(),
            torch.nn.Dropout(0.05),
            torch.nn.Linear(16, 1),
            torch.nn.Flatten(0),
        )
        before = F.mse_loss(model(train_set.inputs), train_set.label).item()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
        accelerator = blank.build_accelerator(settings)
        model, optimizer = accelerator.prepare(model, optimizer)
        names = {"train": train_set, "model": model, "optimizer": optimizer, "schedule": schedule}
        names |= {"accelerator": accelerator, "settings": settings}
        exec(text_of("python", block), {**blank.__dict__, **names})
        after = F.mse_loss(model(train_set.inputs), train_set.label).item()
        assert after < 0.9 * before, name
        weights[name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.allclose(weights["16"], weights["5"], rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------------- faults of copied scripts

CHECKS = {name: text for language, name, text in blocks_of("faults_of_copied_scripts.md") if language == "python"}
SAMPLES = torch.arange(27.0).reshape(9, 3).sin()


def gradient_with(divide):
    def gradient(micro_batches):
        weight = torch.ones(3, requires_grad=True)
        total = sum(len(part) for part in micro_batches)
        for part in micro_batches:
            loss = (part @ weight - 1).square()
            divide(loss, len(micro_batches), total).backward()
        return weight.grad

    return gradient


def epoch_with(drops_the_tail: bool, clips_each: bool = False):
    def train_one_epoch(num_micro_batches: int, accumulation: int) -> int:
        weight, steps = torch.ones(3, requires_grad=True), 0
        for number in range(1, num_micro_batches + 1):
            (weight * number).sum().backward()
            is_step = number % accumulation == 0 or (number == num_micro_batches and not drops_the_tail)
            if clips_each or is_step:
                torch.nn.utils.clip_grad_norm_([weight], 1.0)
            if is_step:
                steps, weight.grad = steps + 1, None
        return steps

    return train_one_epoch


def order_of(epoch_counts: bool, shares: bool):
    def order(epoch: int, rank: int) -> list[int]:
        seed = epoch if epoch_counts else 0
        ids = random.Random(seed if shares else seed + 100 * rank).sample(range(40), 40)
        return ids[rank::2]

    return order


class Draws(Dataset):
    def __init__(self, is_shared: bool):
        self.shared = np.random.default_rng(0) if is_shared else None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return (self.shared or np.random.default_rng([0, index])).random()


def split_drawing(is_own: bool):
    def split(files, seed):
        if not is_own:
            return random.sample(files, 3)
        return random.Random(seed).sample(sorted(files), 3)

    return split


def predictions_of(drops: bool):
    def gather_predictions(num_samples: int, batch_size: int, num_processes: int) -> list[int]:
        filled = -(-num_samples // (batch_size * num_processes)) * batch_size * num_processes
        ids = [place % num_samples for place in range(filled)]
        return ids[:num_samples] if drops else ids

    return gather_predictions


def evaluate_with(is_weighted: bool):
    losses = torch.arange(13.0)

    def evaluate(batch_size: int) -> float:
        parts = losses.split(batch_size)
        if is_weighted:
            return sum(part.sum().item() for part in parts) / len(losses)
        return sum(part.mean().item() for part in parts) / len(parts)

    return evaluate


def ids_with(same_order: bool):
    def ids(stop_at):
        if stop_at is None:
            return random.Random(0).sample(range(20), 20)
        after = random.Random(0 if same_order else 1).sample(range(20), 20)
        return random.Random(0).sample(range(20), 20)[:stop_at] + after[stop_at:]

    return ids


def prune_by(key):
    def prune(folder: Path, keep: int) -> None:
        for path in sorted(folder.iterdir(), key=key)[:-keep]:
            path.rmdir()

    return prune


def newest_of(is_careful: bool):
    def newest(folder: Path) -> Path:
        (folder / "step_8").mkdir()
        (folder / "step_8" / "model.safetensors").write_bytes(b"x")
        found = sorted(folder.iterdir(), key=lambda path: int(path.name[5:]))
        return [path for path in found if not is_careful or (path / "model.safetensors").stat().st_size][-1]

    return newest


def job(tmp_path: Path, saves: bool) -> dict:
    """A process that waits for its signal, and saves when it comes or not."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w').close(), sys.exit(75)))" if saves else ""
    code = f"import signal, sys, time\n{handler}\nprint('ready', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return {"process": process, "saved": (tmp_path / "saved").exists}


NAMES = ["cat", "dog", "emu", "fox"]
GUARDED = "if accelerator.is_main_process:\n    folder.mkdir()\n    {}\n"
LATE, COSINE = [1.0] * 10, [0.5 * (1 + np.cos(np.pi * step / 10)) for step in range(1, 11)]


def cases(tmp_path: Path) -> dict:
    """Return for each check the names of a script that has the fault, and of one that has not."""
    one = {"accelerator": SimpleNamespace(num_processes=1, mixed_precision="no"), "intended": 1}
    tensor = torch.ones(2)
    return {
        "accumulation": (
            {"gradient": gradient_with(lambda loss, parts, total: loss.mean() / parts), "samples": SAMPLES},
            {"gradient": gradient_with(lambda loss, parts, total: loss.sum() / total), "samples": SAMPLES},
        ),
        "tail": ({"train_one_epoch": epoch_with(True)}, {"train_one_epoch": epoch_with(False)}),
        "global_batch": ({"samples_in_a_step": lambda n: 32 * n}, {"samples_in_a_step": lambda n: n * (32 // n)}),
        "order": ({"order": order_of(False, True)}, {"order": order_of(True, True)}),
        "augmentation": ({"dataset": Draws(True)}, {"dataset": Draws(False)}),
        "split": (
            {"split": split_drawing(False), "files": NAMES * 3},
            {"split": split_drawing(True), "files": NAMES * 3},
        ),
        "labels": (
            {"script": f"print({{name: i for i, name in enumerate(set({NAMES}))}})"},
            {"script": f"print({{name: i for i, name in enumerate(sorted(set({NAMES})))}})"},
        ),
        "schedule": ({"rates": LATE, "total_steps": 10}, {"rates": COSINE, "total_steps": 10}),
        "clipping": ({"train_one_epoch": epoch_with(False, True)}, {"train_one_epoch": epoch_with(False)}),
        "processes": (one | {"intended": 2}, one),
        "precision": (one | {"accelerator": SimpleNamespace(mixed_precision="fp16")}, one),
        "duplicates": ({"gather_predictions": predictions_of(False)}, {"gather_predictions": predictions_of(True)}),
        "eval_loss": ({"evaluate": evaluate_with(False)}, {"evaluate": evaluate_with(True)}),
        "memory": (
            {"evaluate_and_return_what_is_kept": lambda: [tensor.clone().requires_grad_() * 2]},
            {"evaluate_and_return_what_is_kept": lambda: [tensor]},
        ),
        "resume": ({"ids": ids_with(False)}, {"ids": ids_with(True)}),
        "torn": ({"newest": newest_of(False)}, {"newest": newest_of(True)}),
        "prune": ({"prune": prune_by(lambda path: path.name)}, {"prune": prune_by(lambda path: int(path.name[5:]))}),
        "names": ({"exported": {"module.head.weight": tensor}}, {"exported": {"head.weight": tensor}}),
        "pickles": (
            {"source": "state = torch.load(path, map_location='cpu')"},
            {"source": "state = torch.load(path, weights_only=True)"},
        ),
        "signal": (lambda folder: job(folder, False), lambda folder: job(folder, True)),
        "main_only": (
            {"source": GUARDED.format("accelerator.save_state(folder)")},
            {"source": GUARDED.format("print(folder)") + "accelerator.save_state(folder)\n"},
        ),
        "lonely": ({"steps_of_each_process": [10, 9]}, {"steps_of_each_process": [10, 10]}),
        "yaml": ({"recipe": "learning_rate: 1e-3\nseed: 1\n"}, {"recipe": "learning_rate: 1.0e-3\nname: e-mail\n"}),
    }


def test_there_is_a_case_for_each_check(tmp_path):
    assert set(CHECKS) == set(cases(tmp_path))


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_finds_its_fault_and_nothing_where_there_is_none(name, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    libraries = {"torch": torch, "os": os, "sys": sys, "re": re, "random": random, "yaml": yaml}
    libraries |= {"subprocess": subprocess, "signal": signal}
    assert len(CHECKS[name].strip().splitlines()) <= 5, "a few lines"
    check = compile(CHECKS[name], f"check {name}", "exec", flags=0)
    for kind, names in zip(("faulty", "right"), cases(tmp_path)[name], strict=True):
        (tmp_path / kind).mkdir()
        random.seed(0)
        here = {**libraries, "folder": tmp_path / kind, **(names(tmp_path / kind) if callable(names) else names)}
        if kind == "faulty":
            with pytest.raises(AssertionError):
                exec(check, here)
        else:
            exec(check, here)
