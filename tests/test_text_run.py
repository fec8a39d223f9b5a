"""The text template from end to end: what it trains, scores, exports and leaves behind."""

import csv
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

import worlds
from tiny import write_pairs
from worlds import World, lines, numbers, run, same_weights, weights


@pytest.fixture(scope="module")
def finished(tiny_settings, tmp_path_factory) -> Path:
    """The run directory of a run on two processes, with two workers."""
    output_dir = tmp_path_factory.mktemp("finished run") / "run"
    world = run(2, tiny_settings | {"output_dir": str(output_dir), "num_workers": 2, "num_train_epochs": 3})
    (output_dir / "screen.txt").write_text(world.output())
    return output_dir


def test_the_run_directory_is_as_promised(finished):
    facts = json.loads((finished / "run.json").read_text("utf-8"))
    assert facts["status"] == "done"
    for name in ("versions", "git_commit", "profile", "world", "data", "batch", "seconds", "peak_memory_gb", "results"):
        assert name in facts, name
    assert facts["batch"]["total_steps"] == 15
    assert facts["data"]["rows"] == {"train": 37, "validation": 13, "test": 11}
    training = lines(finished, "loss")
    assert [row["step"] for row in training] == list(range(1, 16)), "announced and done are the same"
    assert set(training[0]) >= {"step", "epoch", "loss", "learning_rate", "grad_norm", "samples_per_second"}
    assert training[-1]["learning_rate"] == 0.0, "the schedule ends where the run ends"
    evaluations = lines(finished, "eval_loss")
    assert [row["step"] for row in evaluations] == [5, 10, 15]
    assert {row["eval_samples"] for row in evaluations} == {13}
    assert lines(finished, "test_loss")[0]["test_samples"] == 11
    assert not list(finished.glob(".failed*"))
    assert "accuracy" in (finished / "README.md").read_text()


def test_the_screen_says_everything_once(finished):
    screen = (finished / "screen.txt").read_text()
    assert screen.count("2 processes on 1 node, gloo, cpu") == 1
    assert screen.count("8 = 2 processes x 2 micro-batches x up to 3") == 1
    assert screen.count("\nstep ") <= 15 + 3 + 1
    assert "forked" not in screen
    assert "Warning" not in screen, screen


def test_the_exported_model_loads_in_plain_transformers_and_scores_the_same(finished, tiny_settings):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    facts = json.loads((finished / "run.json").read_text("utf-8"))
    model, report = AutoModelForSequenceClassification.from_pretrained(finished / "best", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not [name for name in weights(finished / "best") if "module." in name or "_orig_mod" in name]
    assert model.config.id2label == {0: "0", 1: "1"}
    tokenizer = AutoTokenizer.from_pretrained(finished / "best")
    rows = [json.loads(line) for line in Path(tiny_settings["test_file"]).read_text().splitlines()]
    right = 0
    for row in rows:
        encoded = tokenizer(row["sentence1"], row["sentence2"], truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            right += model(**encoded).logits.argmax().item() == row["label"]
    assert right / len(rows) == facts["results"]["test_accuracy"]


def test_the_card_names_no_path_and_its_call_reads_a_long_text(finished, tiny_settings, monkeypatch, capsys):
    card = (finished / "README.md").read_text("utf-8")
    assert "# bert fine-tuned on train.jsonl" in card
    assert str(Path(tiny_settings["train_file"]).parent) not in card
    call = card.split("```python\n")[1].split("```")[0]
    call = call.replace("The first sentence.", "alpha cat " * 500)
    monkeypatch.chdir(finished)
    exec(call, {})
    assert "'score'" in capsys.readouterr().out


def test_what_the_run_says_of_each_label_is_what_its_predictions_say(finished):
    results = json.loads((finished / "run.json").read_text("utf-8"))["results"]
    rows = list(csv.DictReader((finished / "predictions_test.csv").open(encoding="utf-8")))
    assert len(rows) == 11 and {"sentence1", "sentence2", "label", "prediction", "p_0", "p_1"} <= rows[0].keys()
    right = sum(row["label"] == row["prediction"] for row in rows) / len(rows)
    assert right == results["test_accuracy"] == results["test"]["accuracy"]["value"]
    for number, name in enumerate("01"):
        row = [sum(r["label"] == name and r["prediction"] == other for r in rows) for other in "01"]
        assert results["test"]["confusion"][number] == row
    assert results["validation"]["accuracy"]["value"] == results["best_accuracy"]
    page = (finished / "report.html").read_text("utf-8")
    assert ("Confusion" in page and "<svg" in page) or "data:image" in page


@pytest.mark.parametrize("kind", ["hidden", "absent"])
def test_a_test_split_without_labels_gets_predictions_in_its_order(kind, tiny, tiny_settings, tmp_path):
    rows = [json.loads(line) for line in write_pairs(tmp_path / "test.jsonl", 11).read_text().splitlines()]
    for row in rows:
        row["label"] = -1
        if kind == "absent":
            del row["label"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for num_processes in (1, 2):
        output_dir = tmp_path / f"run{num_processes}"
        settings = tiny_settings | {"test_file": str(tmp_path / "test.jsonl"), "output_dir": str(output_dir)}
        still = {"model_name_or_path": str(tiny / "bert_still"), "max_train_steps": 2}
        world = run(num_processes, settings | still)
        assert not lines(output_dir, "test_loss")
        assert "test_accuracy" not in world.output()
        found[num_processes] = list(csv.DictReader((output_dir / "predictions_test.csv").open()))
    assert [row["index"] for row in found[1]] == [str(i) for i in range(11)]
    assert [row["sentence2"] for row in found[1]] == [row["sentence2"] for row in rows]
    assert {row["label"] for row in found[1]} == {""}
    assert [row["prediction"] for row in found[1]] == [row["prediction"] for row in found[2]]


@pytest.mark.parametrize("count", [3, 2])
def test_fewer_samples_than_a_step_or_than_processes_still_train(count, tiny, tiny_settings, tmp_path):
    write_pairs(tmp_path / "train.jsonl", count)
    settings = tiny_settings | {"train_file": str(tmp_path / "train.jsonl"), "global_batch_size": 16}
    for num_processes in (1, 2, 3):
        output_dir = tmp_path / f"run{num_processes}"
        still = {"model_name_or_path": str(tiny / "bert_still"), "micro_batch_size": 2, "output_dir": str(output_dir)}
        run(num_processes, settings | still | {"warmup_ratio": 0.0})
        assert [row["step"] for row in lines(output_dir, "loss")] == [1, 2]
        assert worlds.largest_difference(numbers(tmp_path / "run1"), numbers(output_dir)) <= 1e-5
    before, after = weights(tiny / "bert_still"), weights(tmp_path / "run1" / "final")
    assert not torch.equal(before["classifier.weight"], after["classifier.weight"])


def test_a_step_limit_in_mid_epoch_ends_at_once_and_is_still_scored(tiny_settings, tmp_path):
    for num_processes in (1, 2):
        output_dir = tmp_path / f"run{num_processes}"
        world = run(num_processes, tiny_settings | {"output_dir": str(output_dir), "max_train_steps": 3})
        assert "3 steps, 5 an epoch" in world.output(0)
        assert [row["step"] for row in lines(output_dir, "loss")] == [1, 2, 3]
        assert lines(output_dir, "eval_loss")[0]["step"] == 3


def test_evaluation_is_the_same_for_every_batch_size(tiny, tiny_settings, tmp_path):
    losses = []
    for size in (1, 4, 13):
        settings = {"output_dir": str(tmp_path / str(size)), "eval_batch_size": size, "max_train_steps": 1}
        run(1, tiny_settings | settings)
        losses.append(lines(tmp_path / str(size), "eval_loss")[0]["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_the_profile_decides_the_precision_unless_the_script_does(tiny_settings, tmp_path):
    for name, mine, expected in (("profile", {}, "bf16"), ("script", {"mixed_precision": "no"}, "no")):
        settings = tiny_settings | {"output_dir": str(tmp_path / name), "max_train_steps": 2} | mine
        world = run(1, settings, environment={"ACCELERATE_MIXED_PRECISION": "bf16"})
        assert f"precision {expected}" in world.output()
        assert json.loads((tmp_path / name / "run.json").read_text())["world"]["mixed_precision"] == expected
    dtypes = {value.dtype for value in weights(tmp_path / "profile" / "final").values()}
    assert dtypes == {torch.float32}, "weights stay in fp32"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no weights", "cannot be loaded"),
        ("torn weights", "cannot be loaded"),
        ("torn configuration", "cannot be loaded"),
        ("no tokenizer", "has no tokenizer: save one there"),
        ("no configuration", "has no config.json: it holds no saved model"),
        ("weights of another model", "its weights are of another model: "),
        ("no padding token", "its tokenizer has no padding token"),
        ("another tokenizer", "its tokenizer has 31 tokens, the model knows 24"),
    ],
)
def test_a_model_folder_that_is_not_whole_is_one_line(fault, words, tiny, tiny_settings, tmp_path):
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(tiny / "bert", folder)
    if fault == "no tokenizer":
        for path in [*folder.glob("tokenizer*"), *folder.glob("vocab*"), *folder.glob("special*")]:
            path.unlink()
    elif fault == "weights of another model":
        state = {f"student.{name}": value for name, value in worlds.weights(folder).items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    elif fault == "no padding token":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = None
        tokenizer.save_pretrained(folder)
    elif fault == "another tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([f"new{number}" for number in range(7)])
        tokenizer.save_pretrained(folder)
    else:
        path = folder / ("model.safetensors" if fault.endswith("weights") else "config.json")
        data = path.read_bytes()
        path.unlink()
        if fault.startswith("torn"):
            path.write_bytes(data[: len(data) // 2])
    settings = tiny_settings | {"model_name_or_path": str(folder), "output_dir": str(tmp_path / "run")}
    world = run(1, settings, expected=2)
    (line,) = [line for line in world.output().splitlines() if line.startswith("error: ")]
    assert line.startswith("error: model_name_or_path"), line
    assert "Traceback" not in world.output()
    assert words in line
    assert str(folder) in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_length": 65}, "it reads 64 tokens at most: set max_length to that or less, not 65"),
        (
            {"torch_compile": True, "torch_compile_backend": "inductr"},
            "torch_compile_backend: no such backend: inductr. There are ",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(changed, words, tiny_settings, tmp_path):
    world = run(1, tiny_settings | changed | {"output_dir": str(tmp_path / "run")}, expected=2)
    (line,) = world.output().strip().splitlines()
    assert words in line


def test_fp16_without_a_gpu_is_one_line(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run")}
    world = run(1, settings, expected=2, environment={"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert world.output().strip().startswith("error: mixed_precision fp16 needs a GPU")
    assert len(world.output().strip().splitlines()) == 1


def test_tokenizing_is_done_once_and_again_when_something_changes(tiny_settings, tmp_path):
    def units(name: str, **changed) -> list[str]:
        """Return rank and number of rows of each piece of work."""
        counter = tmp_path / f"{name}.txt"
        settings = tiny_settings | {"output_dir": str(tmp_path / name), "max_train_steps": 1} | changed
        environment = {"COUNTER": str(counter), "CACHE": str(tmp_path / "cache")}
        run(2, settings, patches=["faults:count_tokenizing"], environment=environment)
        return counter.read_text().split("\n")[:-1] if counter.exists() else []

    once = ["0 37", "0 13", "0 11"]
    assert units("first") == once, "train, validation and test, by one of the two processes"
    assert units("second") == []
    assert units("other", max_length=32) == once


def test_jobs_that_share_a_cache_do_not_disturb_each_other(tiny_settings, tmp_path):
    settings = tiny_settings | {"max_train_steps": 2}
    jobs = [World(1, settings | {"output_dir": str(tmp_path / f"job{i}")}) for i in range(4)]
    jobs.append(World(2, settings | {"output_dir": str(tmp_path / "job4")}))
    for job in jobs:
        assert set(job.wait()) == {0}, job.output()
    assert not list(Path(os.environ["HF_HOME"]).glob("metrics/**/*"))


def test_two_runs_in_one_folder_at_once_are_refused(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run")}
    first = World(1, settings, patches=["faults:slow_steps"])
    first.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    (tmp_path / "run.log0").rename(tmp_path / "first.log")
    second = World(1, settings)
    assert second.wait() == [2], second.output()
    assert "another run is writing into" in second.output()
    assert first.wait() == [0]


def test_the_best_model_is_the_first_when_it_gets_worse(tiny_settings, tmp_path):
    settings = tiny_settings | {
        "output_dir": str(tmp_path / "run"),
        "num_train_epochs": 4,
        "early_stopping_patience": 2,
    }
    world = run(2, settings | {"metric_for_best_model": "loss"}, patches=["faults:worse_each_time"])
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["results"]["best_step"] == 5
    assert lines(tmp_path / "run", "loss")[-1]["step"] == 15, "patience 2: stopped after the third evaluation, on both"
    first = tmp_path / "first"
    run(2, settings | {"output_dir": str(first), "max_train_steps": 5, "metric_for_best_model": "loss"})
    assert not same_weights(tmp_path / "run" / "best", tmp_path / "run" / "final")
    assert "the model with the best loss is in best/" in world.output(0)


def test_a_metric_that_is_not_a_number_never_makes_a_best_model(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "max_train_steps": 2}
    world = run(1, settings, patches=["faults:no_number"])
    assert "the last model is taken as the best" in world.output()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["results"]["best_step"] is None
    assert same_weights(tmp_path / "run" / "best", tmp_path / "run" / "final")


def test_labels_as_words_are_kept_with_the_model(tiny_settings, tmp_path):
    files = {
        f"{split}_file": str(write_pairs(tmp_path / f"{split}.jsonl", 20, labels=("yes", "no")))
        for split in ("train", "test")
    }
    settings = (
        tiny_settings | files | {"validation_file": None, "output_dir": str(tmp_path / "run"), "max_train_steps": 1}
    )
    world = run(1, settings)
    assert json.loads((tmp_path / "run" / "best" / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes"}
    assert "no validation split: 10 % of train (2 of 20 rows), stratified by label, seed 42" in world.output()
    assert "f1 is that of yes" in world.output()


def test_evaluation_keeps_predictions_only(tmp_path):
    """Memory: what 200 batches leave alive is what is returned."""
    import gc

    import text_classification

    class Accelerator:
        num_processes = 1

    class Run:
        is_stopped = False

        def evaluation_batches(self, loader):
            for number, batch in enumerate(loader, 1):
                if number in (10, 200):
                    counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
                yield batch

    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x):
            return Output(self.layer(x))

    class Loader:
        dataset = range(200)

        def __iter__(self):
            return map(self.batch, range(200))

        def batch(self, i):
            ids = torch.tensor([i])
            return {"inputs": {"x": torch.ones(1, 4)}, "label": ids * 0, "sample_id": ids, "weight": torch.ones(1)}

    counts: list[int] = []
    criterion = torch.nn.CrossEntropyLoss(reduction="none")
    predicted = text_classification.predict(Accelerator(), Model(), criterion, Loader(), Run())
    assert not predicted["output"].requires_grad
    kept_per_batch = 5
    assert counts[1] - counts[0] <= kept_per_batch * 190 + 8


def saved_again(tiny, folder: Path, change) -> Path:
    """Save TINY-BERT into `folder`, after `change(model)`."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tiny / "bert")
    change(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny / "bert").save_pretrained(folder)
    return folder


def test_a_model_saved_in_half_precision_is_trained_in_float32(tiny, tiny_settings, tmp_path):
    losses = {}
    for name in ("float32", "float16", "bfloat16"):
        dtype = getattr(torch, name)
        folder = saved_again(tiny, tmp_path / name, lambda model, dtype=dtype: model.to(dtype))
        settings = tiny_settings | {"model_name_or_path": str(folder), "learning_rate": 5e-5, "max_train_steps": 4}
        run(1, settings | {"output_dir": str(tmp_path / f"run {name}")})
        losses[name] = [row["loss"] for row in lines(tmp_path / f"run {name}", "loss")]
        assert {value.dtype for value in weights(tmp_path / f"run {name}" / "best").values()} == {torch.float32}
        before, after = weights(folder), weights(tmp_path / f"run {name}" / "final")
        moved = [(before[key].float() != after[key]).float().mean().item() for key in before if key.endswith("weight")]
        assert sum(moved) / len(moved) > 0.5, "small updates are not rounded away"
    assert losses["float16"] == pytest.approx(losses["float32"], rel=2e-3)
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=2e-2)


def test_what_a_saved_configuration_says_of_another_task_does_not_survive(tiny, tiny_settings, tmp_path):
    def confuse(model) -> None:
        model.config.problem_type = "multi_label_classification"
        model.config.pad_token_id = None

    folder = saved_again(tiny, tmp_path / "model", confuse)
    settings = tiny_settings | {"model_name_or_path": str(folder), "max_train_steps": 1}
    run(1, settings | {"output_dir": str(tmp_path / "run")})
    config = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert (config["problem_type"], config["pad_token_id"]) == ("single_label_classification", 0)
    from transformers import pipeline

    (scores,) = pipeline("text-classification", str(tmp_path / "run" / "best"), top_k=None)(["alpha beta"])
    assert sum(score["score"] for score in scores) == pytest.approx(1)


def test_a_head_for_other_labels_is_not_taken_over(tiny, tiny_settings, tmp_path):
    def name_labels(model) -> None:
        model.config.id2label, model.config.label2id = {0: "no", 1: "yes"}, {"no": 0, "yes": 1}

    folder = saved_again(tiny, tmp_path / "model", name_labels)
    heads = {}
    for labels in (("yes", "no"), ("maybe", "no")):
        files = {
            f"{split}_file": str(write_pairs(tmp_path / f"{split} {labels[0]}.jsonl", 20, labels=labels))
            for split in ("train", "validation", "test")
        }
        settings = tiny_settings | files | {"model_name_or_path": str(folder), "learning_rate": 0.0}
        world = run(1, settings | {"output_dir": str(tmp_path / labels[0]), "max_train_steps": 1})
        heads[labels[0]] = weights(tmp_path / labels[0] / "final")["classifier.weight"]
        is_new = "the classification layer is new: the saved one has the labels no, yes" in world.output()
        assert is_new == (labels[0] == "maybe"), world.output()
        assert world.output().count("\x1b") == 0, "no report of the library's own"
    assert torch.equal(heads["yes"], weights(folder)["classifier.weight"])
    assert not torch.equal(heads["maybe"], weights(folder)["classifier.weight"])


def test_no_room_for_text_is_one_line(tiny_settings, tmp_path):
    world = run(1, tiny_settings | {"max_length": 3, "output_dir": str(tmp_path / "run")}, expected=2)
    assert "max_length 3 leaves no room for text beside 3 special tokens" in world.output()


def test_class_weights_weigh_the_loss_of_training_and_evaluation_alike(tiny, tiny_settings, tmp_path):
    rows = [json.loads(line) for line in write_pairs(tmp_path / "all.jsonl", 40).read_text().splitlines()]
    for number, row in enumerate(rows):
        row["label"] = int(number % 4 == 0)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {f"{split}_file": str(tmp_path / "data.jsonl") for split in ("train", "validation")} | {"test_file": None}
    settings = tiny_settings | files | {"model_name_or_path": str(tiny / "bert_still"), "learning_rate": 0.0}
    settings |= {"global_batch_size": 40, "micro_batch_size": 7, "max_train_steps": 1, "class_weights": "balanced"}
    for num_processes in (1, 2):
        run(num_processes, settings | {"output_dir": str(tmp_path / str(num_processes))})
    found = list(csv.DictReader((tmp_path / "1" / "predictions_validation.csv").open(encoding="utf-8")))
    weight = {"0": 40 / (2 * 30), "1": 40 / (2 * 10)}  # as scikit-learn's "balanced"
    wanted = sum(-weight[row["label"]] * math.log(float(row[f"p_{row['label']}"])) for row in found) / 40
    for num_processes in (1, 2):
        (trained,) = lines(tmp_path / str(num_processes), "loss")
        (judged,) = lines(tmp_path / str(num_processes), "eval_loss")
        assert trained["loss"] == pytest.approx(wanted, rel=1e-4), "probabilities have six digits"
        assert judged["eval_loss"] == pytest.approx(trained["loss"], rel=1e-5)
