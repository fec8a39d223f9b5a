"""Predictions with a finished run: the same numbers as its own evaluation, from every input, on any processes."""

import csv
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import made_image_classification
import worlds
from conftest import REPOSITORY, TEMPLATES
from tiny import write_pairs

LIMIT = 100  # seconds


@pytest.fixture(scope="module")
def text_run(tiny_settings, tmp_path_factory) -> Path:
    """A run of the text template on pairs of sentences, on a path with a space."""
    output_dir = tmp_path_factory.mktemp("a text") / "run"
    worlds.run(1, tiny_settings | {"output_dir": str(output_dir)})
    return output_dir


@pytest.fixture(scope="module")
def image_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("image data")
    made_image_classification.make(folder)
    return folder


@pytest.fixture(scope="module")
def image_run(image_data, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("images") / "run"
    settings = made_image_classification.settings_for(image_data) | {"output_dir": str(output_dir)}
    worlds.run(1, settings, template="image_classification")
    return output_dir


@pytest.fixture
def predict(capsys, monkeypatch):
    """Predict in this process; return the table, and what was printed."""
    import predict as script

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def call(*args) -> tuple[list[dict], str]:
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._reset_state()
        script.main(script.parse(list(map(str, args))))
        screen = capsys.readouterr().out
        return rows_of(Path(screen.splitlines()[-1].rsplit(": ", 1)[1])), screen

    return call


def refusal(*args) -> str:
    """Return the one line that a refused call gives."""
    import predict as script
    from kit.errors import UserError

    with pytest.raises(UserError) as caught:
        script.main(script.parse(list(map(str, args))))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows_of(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def shares(rows: list[dict], names: str) -> list[list]:
    return [[row[f"p_{name}"] for name in names.split()] + [row["prediction"]] for row in rows]


# ------------------------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize("split", ["validation", "test"])
def test_probabilities_of_texts_are_those_of_the_runs_own_evaluation(split, text_run, tiny, predict):
    own = rows_of(text_run / f"predictions_{split}.csv")
    rows, screen = predict(text_run, tiny / f"{split}.jsonl")
    assert len(own) == len(rows) > 10
    assert shares(rows, "0 1") == shares(own, "0 1")
    given = records(tiny / f"{split}.jsonl")
    assert list(rows[0]) == [*given[0], "prediction", "p_0", "p_1"]
    assert [{name: row[name] for name in given[0]} for row in rows] == [
        {name: str(value) for name, value in row.items()} for row in given
    ]
    results = json.loads((text_run / "run.json").read_text("utf-8"))["results"][split]
    assert json.loads((text_run / f"predictions/{split}.scores.json").read_text("utf-8")) == results
    assert f"accuracy   {results['accuracy']['value']:.4f}" in screen


def write_inputs(folder: Path, rows: list[dict]) -> dict[str, str]:
    """Write the rows in every form that training reads; return {kind: what to give as DATA}."""
    import pyarrow
    import pyarrow.parquet

    def table(path: Path, part: list[dict], delimiter: str) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(part[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(part)

    table(folder / "a.csv", rows, ",")
    table(folder / "a.tsv", rows, "\t")
    (folder / "a.json").write_text(json.dumps(rows))
    with gzip.open(folder / "packed.csv.gz", "wb") as file:
        file.write((folder / "a.csv").read_bytes())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    for number in range(2):
        part = "".join(json.dumps(row) + "\n" for row in rows[6 * number : 6 * number + 6])
        (folder / f"shard{number}.jsonl").write_text(part)
    names = {name: name for name in ("a.csv", "a.tsv", "a.json", "packed.csv.gz", "a.parquet", "shard*.jsonl")}
    return {kind: str(folder / name) for kind, name in names.items()}


def test_every_kind_of_table_gives_the_same_rows_in_csv_and_parquet(text_run, tiny, tmp_path, predict):
    given = records(tiny / "test.jsonl")
    own = rows_of(text_run / "predictions_test.csv")
    for kind, data in write_inputs(tmp_path, given).items():
        rows, _ = predict(text_run, data, "--output", tmp_path / "out.csv", "--overwrite", "true", "--top_k", "2")
        assert shares(rows, "0 1") == shares(own, "0 1"), kind
        assert [row["idx"] for row in rows] == [str(row["idx"]) for row in given], kind
        for row in rows:
            assert row["top_1"] == row["prediction"] and {row["top_1"], row["top_2"]} == {"0", "1"}
            assert float(row[f"p_{row['top_1']}"]) >= float(row[f"p_{row['top_2']}"])
    rows, _ = predict(text_run, tmp_path / "a.parquet", "--output", tmp_path / "out.parquet")
    assert [{name: row[name] for name in given[0]} for row in rows] == given, "types are kept too"
    assert [f"{row['p_1']:.6f}" for row in rows] == [row["p_1"] for row in own]
    assert not list(tmp_path.glob("*.tmp"))


def test_odd_rows_keep_all_they_have_and_long_texts_are_cut_as_in_training(text_run, tmp_path, predict):
    rows = [
        {"sentence1": "alpha " * 500, "sentence2": "cat", "more": {"a": [1]}},
        {"sentence1": "", "sentence2": "dog", "late": None, "half": "\ud800"},
    ]
    cut = [{"sentence1": "alpha " * 46, "sentence2": "cat"}]  # the longer one is cut: 48 with three special tokens
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "cut.json").write_text(json.dumps(cut))
    found, screen = predict(text_run, tmp_path / "odd.jsonl")
    assert list(found[0])[:5] == ["sentence1", "sentence2", "more", "late", "half"]
    assert found[0]["more"] == '{"a": [1]}' and found[1]["half"] == "\\ud800"
    assert "accuracy" not in screen and not (text_run / "predictions/odd.scores.json").exists()
    assert shares(predict(text_run, tmp_path / "cut.json")[0], "0 1") == shares(found, "0 1")[:1]
    found, _ = predict(text_run, tmp_path / "odd.jsonl", "--output", tmp_path / "odd.parquet")
    assert found[1]["half"] == "\\ud800"


def test_labels_that_are_hidden_or_unknown_are_said_and_not_scored(text_run, tiny, tmp_path, predict):
    given = records(tiny / "test.jsonl")
    for row, label in zip(given, [-1, None, "maybe", "perhaps", "maybe"], strict=False):
        row["label"] = label
    given[7]["late"] = "a key that the first row has not"
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    rows, screen = predict(text_run, tmp_path / "some.jsonl")
    assert shares(rows, "0 1") == shares(rows_of(text_run / "predictions_test.csv"), "0 1")
    assert [row["label"] for row in rows[:4]] == ["-1", "", "maybe", "perhaps"]
    assert [row["late"] for row in rows] == [row.get("late", "") for row in given]
    assert "3 rows have labels that the model does not know: ['maybe', 'perhaps']" in screen
    assert "scored     6 of 11 samples" in screen
    right = sum(row["label"] == row["prediction"] for row in rows[5:]) / 6
    scores = json.loads((text_run / "predictions/some.scores.json").read_text("utf-8"))
    assert scores["accuracy"]["value"] == right
    again = [{**row, "label": -1} for row in given]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in again))
    predict(text_run, tmp_path / "some.jsonl", "--overwrite", "true")
    assert not (text_run / "predictions/some.scores.json").exists(), "those of the file before"


# ----------------------------------------------------------------------------------------------------------- images


def test_probabilities_of_images_are_those_of_the_runs_own_evaluation(image_run, image_data, predict):
    names = "blue green red"
    for split in ("validation", "test"):
        own = rows_of(image_run / f"predictions_{split}.csv")
        rows, screen = predict(image_run, image_data / split)
        assert len(rows) == len(own) > 8
        assert [f"{split}/{row['name']}" for row in rows] == [row["name"] for row in own]
        assert shares(rows, names) == shares(own, names)
        results = json.loads((image_run / "run.json").read_text("utf-8"))["results"][split]
        assert json.loads((image_run / f"predictions/{split}.scores.json").read_text("utf-8")) == results
        assert f"scored     {len(own)} of {len(own)} samples" in screen


def test_single_images_and_folders_without_classes_are_predicted(image_run, image_data, tmp_path, predict):
    own = rows_of(image_run / "predictions_test.csv")
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, row in enumerate(own):
        shutil.copy(image_data / row["name"], flat / f"IMG{number:02}.JPG")
    (flat / "notes.txt").write_text("none")
    rows, screen = predict(image_run, flat)
    assert shares(rows, "blue green red") == shares(own, "blue green red")
    assert "ignored in" in screen and "scored" not in screen
    rows, _ = predict(image_run, flat / "IMG04.JPG", "--output", tmp_path / "one.csv")
    assert [row["name"] for row in rows] == ["IMG04.JPG"]
    assert rows[0]["prediction"] == own[4]["prediction"]
    shutil.copytree(image_data / "test", tmp_path / "classes")
    (tmp_path / "classes/red").rename(tmp_path / "classes/pink")
    _, screen = predict(image_run, tmp_path / "classes")
    assert "3 images are in no folder of a known class, such as pink/0.jpg" in screen
    assert "scored     6 of 9 samples" in screen
    (flat / "IMG05.JPG").write_bytes(b"\xff\xd8 no more")
    refused = refusal(image_run, flat, "--output", tmp_path / "none.csv")
    assert "IMG05.JPG" in refused and "skip_bad" not in refused


# --------------------------------------------------------------------------------------------- processes and mistakes


def command(*args) -> subprocess.CompletedProcess:
    words = [sys.executable, "-X", "importtime", str(TEMPLATES / "predict.py"), *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)


Settings = dict  # this module is what `worlds` starts in each process


def main(settings: dict) -> None:
    import predict as script

    script.main(script.parse(settings["arguments"]))


def test_two_processes_write_what_one_does(text_run, image_run, image_data, tiny, tmp_path):
    for run, data, split, names in (
        (text_run, tiny / "test.jsonl", "test", "0 1"),
        (image_run, image_data / "validation", "validation", "blue green red"),
    ):
        output = tmp_path / f"{split}.csv"
        arguments = [str(run), str(data), "--output", str(output)]
        world = worlds.run(2, {"output_dir": str(tmp_path / "x"), "arguments": arguments}, template="test_predict")
        own, rows = rows_of(run / f"predictions_{split}.csv"), rows_of(output)
        assert [row["label"] for row in own] == [row.get("label", row.get("name", "").split("/")[0]) for row in rows]
        assert shares(rows, names) == shares(own, names)
        assert world.output().count(f"predicted  {len(own)} samples") == 1
        assert "predicting:" not in world.output(), "a bar belongs on a terminal"


def test_a_mistake_is_one_line_before_anything_heavy_is_imported(text_run, tiny):
    done = command(text_run, tiny / "tset.jsonl")
    lines = [text for text in done.stderr.splitlines() if not text.startswith("import time:")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert "DATA" in lines[0] and "did you mean 'test.jsonl'" in lines[0]
    assert " kit.tables\n" in done.stderr
    for name in ("torch", "transformers", "datasets", "pyarrow", "numpy"):
        assert f" {name}\n" not in done.stderr, name
    done = command("--help")
    assert done.returncode == 0 and "--top_k" in done.stdout


def test_the_demo_shows_three_pairs_through_the_same_command(text_run, tmp_path):
    shutil.copytree(text_run, tmp_path / "demo", ignore=shutil.ignore_patterns("predictions"))
    (tmp_path / "demo/data").mkdir()
    write_pairs(tmp_path / "demo/data/test.jsonl", 47)
    script = REPOSITORY / "examples" / "demo" / "three_pairs.py"
    done = subprocess.run([sys.executable, script, tmp_path / "demo"], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.count("    model: ") == 3 and done.stdout.count(", really: ") == 3
    (tmp_path / "demo/run.json").unlink()
    done = subprocess.run([sys.executable, script, tmp_path / "demo"], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_every_mistake_names_value_and_cure(text_run, image_run, image_data, tiny, tmp_path):
    data = tiny / "test.jsonl"
    assert "no such run directory" in refusal(tmp_path / "none", data)
    assert "output_dir of a training" in refusal(tmp_path, data)
    assert "--top_k 3: the model knows 2 labels" in refusal(text_run, data, "--top_k", 3)
    assert "did you mean --top_k" in refusal(text_run, data, "--topk", 3)
    assert "'0' is not a whole number > 0" in refusal(text_run, data, "--batch_size", 0)
    assert ".csv or .parquet" in refusal(text_run, data, "--output", tmp_path / "out.xlsx")
    (tmp_path / "there.csv").write_text("mine")
    assert "--overwrite true" in refusal(text_run, data, "--output", tmp_path / "there.csv")
    assert (tmp_path / "there.csv").read_text() == "mine"
    same = refusal(text_run, tmp_path / "there.csv", "--output", tmp_path / "there.csv", "--overwrite", "true")
    assert "is the data" in same
    assert "is a folder: name one file" in refusal(text_run, image_data)
    assert "is no image" in refusal(image_run, data)
    assert "no such file or folder" in refusal(image_run, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "no images in" in refusal(image_run, tmp_path / "empty")
    (tmp_path / "other.csv").write_text("sentence1,sentance2\na,b\n")
    missing = refusal(text_run, tmp_path / "other.csv")
    assert "no column 'sentence2'" in missing and "['sentence1', 'sentance2']" in missing
    (tmp_path / "twice.csv").write_text("sentence1,sentence2,p_1\na,b,c\n")
    assert "named as the predictions will be: p_1" in refusal(text_run, tmp_path / "twice.csv")
    (tmp_path / "rows.csv").write_text("sentence1,sentence2\n")
    assert "has no rows" in refusal(text_run, tmp_path / "rows.csv")


def test_runs_that_cannot_predict_say_why(text_run, tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(text_run, run, ignore=shutil.ignore_patterns("predictions"))
    settings = (run / "settings.yaml").read_text("utf-8")
    (run / "settings.yaml").write_text(settings + "colour: red\n")
    assert "has colour, unknown to text_classification.py" in refusal(run, tiny / "test.jsonl")
    (run / "settings.yaml").write_text(settings)
    (run / "predictions_validation.csv").unlink()
    assert "which columns were trained on" in refusal(run, tiny / "test.jsonl")
    (run / "best/config.json").unlink()
    assert "load_model(model" in refusal(run, tiny / "test.jsonl"), "a run of blank.py leaves weights alone"
    (run / "best/model.safetensors").unlink()
    assert "holds no model" in refusal(run, tiny / "test.jsonl")
    facts = json.loads((run / "run.json").read_text("utf-8"))
    (run / "run.json").write_text(json.dumps(facts | {"status": "stopped"}))
    assert "is not done (status stopped)" in refusal(run, tiny / "test.jsonl")
    (run / "run.json").write_text("{")
    assert "damaged" in refusal(run, tiny / "test.jsonl")
