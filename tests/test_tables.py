"""kit/tables.py: the text data people bring is read exactly, or refused in one line that names the place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from kit.errors import UserError
from kit.tables import read_text_splits

ROWS = [{"text": f"words number {i}", "label": "yes" if i % 3 else "no"} for i in range(12)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write(name: str, content) -> str:
    """Write text, bytes or rows (as CSV, JSON, JSONL or Parquet by suffix) and return the name."""
    if isinstance(content, list):
        if name.endswith("jsonl"):
            content = "".join(json.dumps(row) + "\n" for row in content)
        elif name.endswith("json"):
            content = json.dumps(content)
        elif name.endswith("parquet"):
            datasets.Dataset.from_list(content).to_parquet(name)
            return name
        else:
            tab = "\t" if name.endswith("tsv") else ","
            content = "".join(tab.join(map(str, row)) + "\n" for row in [content[0], *map(dict.values, content)])
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def read(train, validation=None, test=None, **options):
    return read_text_splits(train_file=train, validation_file=validation, test_file=test, **options)


def read_csv(content, **options):
    return read(write("train.csv", content), write("valid.csv", "text,label\na,0\nb,1\n"), **options)


def refuse(*words, **options) -> str:
    """Assert that reading is refused in one line that holds all `words`."""
    with pytest.raises(UserError) as caught:
        read_text_splits(**options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


def refuse_train(content, *words, name="train.csv", **options) -> str:
    return refuse(name, *words, train_file=write(name, content), **options)


def hub(monkeypatch, **splits):
    """Let the hub answer with these splits."""
    answer = datasets.DatasetDict({name: datasets.Dataset.from_dict(*data) for name, data in splits.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: answer)


# What is read, and how


@pytest.mark.parametrize("suffix", ["csv", "CSV", "tsv", "json", "jsonl", "parquet"])
def test_every_kind_of_file_gives_the_same_splits(suffix):
    splits = read(write(f"a.{suffix}", ROWS), write(f"b.{suffix}", ROWS[:5]), write(f"c.{suffix}", ROWS[4:]))
    assert splits.text_columns == ("text",) and splits.label_names == ("no", "yes")
    assert splits.train.column_names == ["text", "label"]
    assert [f.dtype for f in splits.train.features.values()] == ["string", "int64"]
    assert splits.train[:] == {
        "text": [r["text"] for r in ROWS],
        "label": [int(i % 3 > 0) for i in range(12)],
    }
    assert splits.test["text"][:] == [r["text"] for r in ROWS[4:]]
    assert splits.source["rows"] == {"train": 12, "validation": 5, "test": 8}
    assert splits.source["train_file"] == f"a.{suffix}" and not splits.source["validation_carved"]
    same = read(write("d.jsonl", ROWS), write("e.jsonl", ROWS[:5]), write("f.jsonl", ROWS[4:]))
    assert splits.source["sha256"] == same.source["sha256"] and len(set(same.source["sha256"].values())) == 3
    json.dumps(splits.source)


def test_cells_are_text_to_the_letter():
    words = [
        "None",
        "NA",
        "null",
        "nan",
        "007",
        "1.50",
        "",
        " a ",
        'say "hi", twice',
        "two\r\nlines",
        "TRUE",
        "é",
    ]
    quoted = ['"' + word.replace('"', '""') + '"' if set(word) & set('",\n') else word for word in words]
    content = "text,label\r\n" + "".join(f"{word},{i % 2}\r\n" for i, word in enumerate(quoted))
    for bom in (b"", b"\xef\xbb\xbf"):
        assert read_csv(bom + content.encode()).train["text"][:] == words
    assert read_csv(content + "\r\n\r\n").train.num_rows == 12  # blank lines at the end


def test_json_text_is_not_guessed_at():
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(["2003-06-15", "5", "\u2028 \x85", 7, 2.5, True])]
    for suffix in ("json", "jsonl"):
        name = f"a.{suffix}"
        Path(name).write_text(
            json.dumps(rows) if suffix == "json" else "\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
        )
        splits = read(name, name)
        assert splits.train["text"][:] == ["2003-06-15", "5", "\u2028 \x85", "7", "2.5", "True"]
    assert read("a.jsonl", write("lines.json", Path("a.jsonl").read_text())).validation.num_rows == 6


def test_a_huge_cell_is_read():
    assert len(read_csv(f"text,label\n{'a' * 300_000},0\nb,1\n").train["text"][0]) == 300_000


def test_tsv_is_read_with_quoted_cells_and_with_quotes_as_they_are():
    spreadsheet = 'sentence\tlabel\n"a\tb"\t0\n"say ""hi"""\t1\n"two\nlines"\t1\n'
    assert read(write("a.tsv", spreadsheet), "a.tsv").train["sentence"][:] == [
        "a\tb",
        'say "hi"',
        "two\nlines",
    ]
    one_line = write("one.tsv", 'sentence\tlabel\n"say ""hi"""\t0\n"x"\t1\n')  # as it stands, this is readable too
    assert read(one_line, one_line).train["sentence"][:] == ['say "hi"', "x"]
    glue = 'label\tsentence1\tsentence2\n0\t" one\ttwo\n1\tthree "\tfour\n1\t5" disk\t" six\n'
    assert read(write("b.tsv", glue), "b.tsv").train["sentence1"][:] == ['" one', 'three "', '5" disk']
    swallows = 'label\tsentence1\tsentence2\n0\t"one\ttwo\n1\tthree"\tfour\n1\ta\tb\n'  # also valid as 2 quoted rows
    assert read(write("c.tsv", swallows), "c.tsv").train["sentence1"][:] == ['"one', 'three"', "a"]


def test_known_text_columns_are_found_and_others_are_named():
    row = {"idx": 1, "sentence": "s", "question": "q", "text": "t", "label": 0}
    rows = [row, {**row, "label": 1}]
    assert read(write("a.jsonl", rows), "a.jsonl").text_columns == ("question", "sentence")
    assert read("a.jsonl", "a.jsonl", text_columns=["text", "idx"]).train.column_names == [
        "text",
        "idx",
        "label",
    ]
    message = refuse_train("review,label\na,0\nb,1\n", "no text column", "'review', 'label'")
    assert "text_columns" in message


# Labels


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([10, 9, 2], ("2", "9", "10")),
        (["10", " 9", "2 "], ("2", "9", "10")),
        ([1.0, 0.0, 3.0], ("0", "1", "3")),
        ([True, False, True], ("0", "1")),
        (["b", " a ", "B"], ("B", "a", "b")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["None", "NA", "007"], ("007", "NA", "None")),
    ],
)
def test_label_ids_are_places_in_the_sorted_names(labels, names):
    for order in (labels, labels[::-1]):
        rows = [{"text": "a", "label": label} for label in order]
        splits = read(write("a.jsonl", rows), "a.jsonl")
        spelt = [str(int(label)) if not isinstance(label, str) else label.strip() for label in order]
        assert splits.label_names == names
        assert splits.train["label"][:] == [names.index(label) for label in spelt]
    floats = "text,label\na,1.0\nb,0.0\n"  # pandas writes whole numbers so, once one was missing
    assert read_csv(floats).label_names == ("0", "1")


def test_class_names_of_the_hub_keep_their_order(monkeypatch):
    kinds = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["not_equivalent", "equivalent"])
    )
    known = ({"text": ["a", "b", "c"], "label": [0, 1, 1]}, kinds)
    hub(monkeypatch, train=known, validation_matched=known, test=({"text": ["x"], "label": [-1]}, kinds))
    splits = read_text_splits(dataset_name="some/set", dataset_config_name="mrpc")
    assert splits.label_names == ("not_equivalent", "equivalent") and splits.train["label"][:] == [0, 1, 1]
    assert splits.test["label"][:] == [-1]
    assert "validation: some/set (validation_matched)" in splits.notes
    assert splits.source["dataset_name"] == "some/set"
    datasets.Dataset.from_dict(*known).to_parquet("a.parquet")  # the names travel in Parquet, too
    assert read("a.parquet", "a.parquet").label_names == ("not_equivalent", "equivalent")
    hub(monkeypatch, test=known, unsupervised=known)
    refuse("no split 'train'", "'test', 'unsupervised'", dataset_name="some/set")


@pytest.mark.parametrize("test", ["text,label\nx,-1\ny,-1\n", "text,label\nx,\ny,\n", "text\nx\ny\n"])
def test_hidden_or_absent_labels_of_test_are_minus_one(test):
    splits = read(write("a.csv", ROWS), "a.csv", write("t.csv", test))
    assert splits.test[:] == {"text": ["x", "y"], "label": [-1, -1]}
    assert any("test has no labels" in note and "predictions only" in note for note in splits.notes)


def test_labels_that_cannot_be_learned_are_refused():
    write("v.csv", "text,label\na,0\nb,1\n")
    for bad in ("-1", "", "-1.0"):
        refuse_train(f"text,label\na,0\nb,{bad}\nc,1\nd,{bad}\n", "2 of 4 rows of train", "first is row 2")
    refuse(
        "v2.csv",
        "1 of 1 rows of validation",
        train_file="v.csv",
        validation_file=write("v2.csv", "text,label\na,-1\n"),
    )
    refuse(
        "t.csv",
        "1 of 2 rows of test",
        train_file="v.csv",
        test_file=write("t.csv", "text,label\na,-1\nb,1\n"),
    )
    refuse_train([{"text": "a", "label": 0}, {"text": "b"}], "1 of 2 rows of train", name="a.jsonl")
    refuse_train("text,label\na,0.5\nb,1\n", "row 1", "0.5", "regression")
    refuse_train([{"text": "a", "label": [0, 1]}], "row 1", "[0, 1]", name="b.jsonl")
    refuse_train("text,label\na,1\nb,1\n", "every row of train has the same 'label', '1'")
    many = "text,label,idx\n" + "".join(f"a{i},{i % 2},{i}\n" for i in range(60))
    refuse_train(many, "60 different labels in 60 rows", "label_column", label_column="idx")
    assert read(write("few.csv", "text,label\na,0\nb,1\n"), "few.csv").train.num_rows == 2


def test_a_label_that_train_has_not_is_refused_with_split_and_count():
    train = write("a.csv", "text,label\na,no\nb,yes\n")
    odd = write("odd.csv", "text,label\nx,maybe\ny,maybe\nz,no\n")
    for split in ("validation", "test"):
        words = (split, "'maybe' (2 rows)", "'no', 'yes'")
        refuse("odd.csv", *words, **{"train_file": train, "validation_file": train, f"{split}_file": odd})


# The carved validation split


def carved(rows, **options):
    splits = read(write("a.jsonl", rows), **options)
    return splits, set(splits.train["text"]), set(splits.validation["text"])


def test_validation_is_carved_by_label_and_seed_whatever_the_order_of_rows():
    rows = [{"text": f"t{i}", "label": "a" if i % 3 else "b"} for i in range(301)]
    splits, train, validation = carved(rows, seed=3)
    assert not train & validation and len(train | validation) == 301 and len(validation) == 30
    assert splits.validation["label"][:].count(1) == 10
    assert splits.source["validation_carved"]
    assert "no validation split: 10 % of train (30 of 301 rows), stratified by label, seed 3" in splits.notes
    order = [int(text[1:]) for text in splits.train["text"]]
    assert order == sorted(order)  # the order of the file
    assert carved(rows[::-1], seed=3)[2] == validation != carved(rows, seed=4)[2]
    assert carved(rows, seed=3)[0].source == splits.source
    assert len(carved(rows, validation_fraction=0.99)[2]) == 298
    assert abs(len(carved(rows, validation_fraction=0.5)[2]) - 150.5) <= 0.5


def test_each_class_with_two_rows_is_on_both_sides_of_the_carving():
    rows = [{"text": f"{label}{i}", "label": label} for label, n in (("a", 40), ("b", 2), ("c", 1)) for i in range(n)]
    for fraction in (0.01, 0.1, 0.9):
        splits, *_ = carved(rows, validation_fraction=fraction)
        assert set(splits.train["label"]) == {0, 1, 2} and set(splits.validation["label"]) == {0, 1}
    refuse_train("text,label\na,0\nb,1\n", "too few rows (2)")


def test_splits_do_not_depend_on_the_hash_seed(tmp_path):
    write("a.jsonl", [{"text": f"t{i}", "label": f"class {i % 7}"} for i in range(70)])
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom kit.tables import read_text_splits\n"
        "s = read_text_splits(train_file='a.jsonl'); print(s.label_names, s.source)"
    )
    runs = []
    for seed in "12":
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "HF_HOME": str(tmp_path / seed),
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""  # no progress bars where nobody looks
        runs.append(done.stdout)
    assert runs[0] == runs[1] and "class 6" in runs[0]


def test_rows_of_train_in_another_split_are_counted():
    write("a.csv", "text,label\na,0\nb,1\nc,1\n")
    notes = read("a.csv", write("v.csv", "text,label\nb,1\nz,0\nc,0\n"), write("t.csv", "text,label\nz,0\n")).notes
    assert notes == ["2 of 3 validation rows have the same texts as a row of train"]


# The cache


def test_a_changed_file_is_never_served_from_the_cache():
    name = write("a.csv", "text,label\naa,0\nbb,1\n")
    before, times = read(name, name), os.stat(name).st_mtime_ns
    assert read(name, name).train.cache_files == before.train.cache_files  # equal data are found again
    tokenized = before.train.map(lambda row: {"size": row["text"].upper()}, load_from_cache_file=True)
    assert tokenized.cache_files  # on disk, so that other processes find it
    write(name, "text,label\naa,0\nxx,1\n")
    os.utime(name, ns=(times, times))
    after = read(name, name)
    assert after.train["text"][:] == ["aa", "xx"] and before.train["text"][:] == ["aa", "bb"]
    assert after.train.map(lambda row: {"size": row["text"].upper()})["size"][:] == ["AA", "XX"]
    assert after.source["sha256"] != before.source["sha256"]
    for folder in ("one", "two"):
        Path(folder).mkdir()
        write(f"{folder}/a.csv", f"text,label\n{folder},0\nb,1\n")
    assert [read(f"{f}/a.csv", f"{f}/a.csv").train["text"][0] for f in ("one", "two")] == ["one", "two"]


def test_same_texts_with_other_labels_are_other_data():
    first = read(write("a.csv", "text,label\na,x\nb,y\n"), "a.csv")
    second = read(write("a.csv", "text,label\na,y\nb,x\n"), "a.csv")
    assert first.train["label"][:] == [0, 1] and second.train["label"][:] == [1, 0]


# What is refused, in one line


def test_unreadable_tables_are_refused_with_the_place():
    refuse_train("text,label\na,0\nb\nc,1\n", "row 2", "1 cells", "header has 2")
    refuse_train("text,label\na,0\nb, then c,1\n", "row 2", "3 cells")
    refuse_train('text,label\na,0\n"b,1\nc,0\n', "row 2", "quote")
    refuse_train('text,label\na,0\n"b" c,1\n', "row 2", "quote")
    refuse_train("text;label\na, b;0\n", "'text;label'", "separated by ';'")
    refuse_train("text,label\na,0\n", "'text,label'", "separated by ','", name="a.tsv")
    refuse_train("text,label,text\na,0,b\n", "'text'", "more than once")
    refuse_train("text,label\n", "has no rows")
    refuse_train(" \n", "has no rows")
    refuse_train("text,label\na,0\ncafé,1\n".encode("latin-1"), "line 3", "UTF-8", "iconv")
    refuse_train("text,label\na,0\n".encode("utf-16"), "UTF-8", "UTF-16")
    refuse_train("text,label\na,0\nb\0,1\n", "line 3", "NUL")
    refuse_train("PAR1 this is not", "Parquet", name="a.parquet")


def test_unreadable_json_is_refused_with_the_place():
    refuse_train('{"text": "a", "label": 0}\n{"text": "b", "lab\n', "line 2", "broken JSON", name="a.jsonl")
    refuse_train('[{"text": "a", "label": 0},\n {"text": ]', "line 2", "broken JSON", name="a.json")
    refuse_train('{"data": [{"text": "a", "label": 0}]}', "'data'", "list of objects", name="a.json")
    refuse_train('{\n "text": {"0": "a"},\n "label": {"0": 1}\n}', "'text', 'label'", name="a.json")
    refuse_train('{"text": "a", "label": 0}\n["b", 1]\n', "row 2", "not an object", name="a.jsonl")
    refuse_train("[]", "has no rows", name="a.json")
    refuse_train("\n", "has no rows", name="a.jsonl")
    refuse_train('{"text": "a \\ud83d", "label": 0}\n', "row 1", "not a text", name="a.jsonl")


def test_missing_text_is_refused_with_its_row():
    good = {"text": "a", "label": 0}
    for bad in ({"label": 1}, {"text": None, "label": 1}, {"text": float("nan"), "label": 1}):
        refuse_train([good, good, bad], "row 3", "'text' is missing", name="a.jsonl")
    refuse_train([good, {"text": None, "label": 1}], "row 2", "'text' is missing", name="a.parquet")
    for bad in (["x"], {"x": 1}):
        refuse_train([good, {"text": bad, "label": 1}], "row 2", "'text' is not a text", name="b.jsonl")
    refuse_train([{"text": ["x"], "label": 1}], "row 1", "'text' is not a text", name="b.parquet")


def test_missing_columns_are_refused_with_those_there_and_the_near_one():
    refuse_train("text,label \na,0\n", "no column 'label'", "did you mean 'label '?", "'text', 'label '")
    refuse_train("Text,LABEL\na,0\n", "no column 'text'", "did you mean 'Text'?", text_columns=["text"])
    train = write("a.csv", "sentence1,sentence2,label\na,b,0\nc,d,1\n")
    odd = write("odd.csv", "sentence1,sentence_2,label\na,b,0\n")
    refuse("odd.csv", "'sentence2' for validation", "'sentence_2'?", train_file=train, validation_file=odd)
    refuse(
        "odd.csv",
        "'label' for validation",
        train_file=train,
        validation_file=write("odd.csv", "sentence1,sentence2\na,b\n"),
    )


def test_sources_are_checked_before_anything_is_read():
    write("train.jsonl", ROWS)
    Path("folder").mkdir()
    write("empty.csv", "")
    write("a.xlsx", "x")
    write("a.csv.gz", "x")
    refuse("no training data")
    refuse("no training data", validation_file="train.jsonl")
    refuse("train_file", "dataset_name 'some/set'", train_file="train.jsonl", dataset_name="some/set")
    refuse("validation_file", "dataset_name", validation_file="train.jsonl", dataset_name="some/set")
    refuse("'trian.jsonl'", "did you mean 'train.jsonl'?", train_file="trian.jsonl")
    refuse("'nowhere'", train_file="nowhere/train.jsonl")
    refuse("train_file", "'folder' is a folder", train_file="folder")
    refuse("dataset_name", "'folder'", "train_file", dataset_name="folder")
    refuse("test_file", "empty file", train_file="train.jsonl", test_file="empty.csv")
    for name in ("a.xlsx", "a.csv.gz"):
        refuse(name, ".csv, .tsv, .json, .jsonl, .parquet", train_file=name)
    for names in (["a", "b", "c"], [], ["a", "a"], ["label"], ["gold"]):
        refuse("text_columns", str(names), train_file="train.jsonl", text_columns=names, label_column="gold")
    for fraction in (0, 1, -0.1, float("nan")):
        refuse("validation_fraction", train_file="train.jsonl", validation_fraction=fraction)
    assert "not used" in read("train.jsonl", dataset_config_name="mrpc").notes[0]
    write("~$open.csv", "text,label\na,0\nb,1\n")  # no user of this name
    assert read("~$open.csv", "~$open.csv").train.num_rows == 2


def test_checking_sources_imports_nothing_heavy():
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom kit.tables import check_text_sources\n"
        "check_text_sources(train_file=None, validation_file=None, test_file=None, dataset_name='some/set',"
        " text_columns=None, label_column='label', validation_fraction=0.1)\n"
        "print(sorted({'torch', 'datasets', 'pandas', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_hub_that_cannot_be_reached_is_one_line_with_three_ways_on(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    ways = ("--train_file", "HF_HUB_OFFLINE=1", "make demo")
    refuse("'nyu-mll/glue'", "mrpc", *ways, dataset_name="nyu-mll/glue", dataset_config_name="mrpc")
    for error in (
        ConnectionError("no\nroute"),
        datasets.exceptions.DatasetNotFoundError("gone"),
        ValueError("no config"),
    ):

        def fail(name, config, error=error):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", fail)
        refuse("'some/set'", type(error).__name__, *ways, dataset_name="some/set")


# The real thing


@pytest.mark.skipif("TEMPLATES_DATA" not in os.environ, reason="TEMPLATES_DATA names no folder with mrpc/")
def test_real_mrpc_is_read_whole():
    folder = Path(os.environ["TEMPLATES_DATA"]) / "mrpc"
    splits = read(*(str(folder / f"{split}.jsonl") for split in ("train", "validation", "test")))
    assert splits.source["rows"] == {"train": 3668, "validation": 408, "test": 1725}
    assert splits.label_names == ("0", "1") and splits.text_columns == ("sentence1", "sentence2")
    assert [sum(part["label"]) for part in (splits.train, splits.validation, splits.test)] == [
        2474,
        279,
        1147,
    ]
    assert splits.notes == []
    lines = folder.joinpath("train.jsonl").read_text("utf-8").split("\n")
    assert splits.train["sentence2"][3667] == json.loads(lines[3667])["sentence2"]
    alone = read(str(folder / "train.jsonl"))
    assert alone.source["rows"] == {"train": 3301, "validation": 367}
    assert "no validation split: 10 % of train (367 of 3668 rows), stratified by label, seed 0" in alone.notes
    csv = folder / "accelerate_samples"
    samples = read(str(csv / "train.csv"), str(csv / "dev.csv"))
    assert samples.label_names == ("equivalent", "not_equivalent") and samples.source["rows"]["train"] == 6
    assert samples.notes == ["6 of 6 validation rows have the same texts as a row of train"]
