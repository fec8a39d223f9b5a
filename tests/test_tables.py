"""kit/tables.py: the text data people bring is read exactly, or refused in one line that names the place."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest

from kit import table_cache, table_files, tables
from kit.errors import MachineError, UserError
from kit.evaluation import describe_labels, printable
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


def test_json_of_any_length_and_layout_is_read_and_refused_with_its_line(monkeypatch):
    rows = [
        {"text": f'{i} "]}},[{{ \u00e9\U0001f600 \\ {"x" * (i % 7)}', "label": i % 2, "deep": [{"a": [i]}]}
        for i in range(50)
    ]
    monkeypatch.setattr(table_files, "CHUNK", 7)
    for block in (1, 2, 3, 10, 64, 2**20):
        monkeypatch.setattr(table_files, "BLOCK", block)
        for indent in (None, 2):
            write("a.json", " \n" + json.dumps(rows, indent=indent) + "\n ")
            assert read("a.json", "a.json").train["text"][:] == [row["text"] for row in rows]
        broken = json.dumps(rows, indent=1)
        lines = broken[: broken.index('"49 ')].count("\n") + 1
        refuse_train(broken.replace('"49 ', "49 "), f"line {lines}", "broken JSON", name="b.json")
        refuse_train(json.dumps(rows) + "]", "broken JSON (Extra data)", name="b.json")
        refuse_train(json.dumps(rows)[:-1], "broken JSON", name="b.json")
        refuse_train('[{"text": "a", "label": 0}, 17]', "row 2: 17 is not an object", name="b.json")
    late = [{"text": "a", "label": 0}] * 9 + [{"label": 1, "words": "b"}]
    refuse_train(late, "row 10", "'text' is missing", name="c.jsonl")
    refuse_train(late, "no column 'word' for train (did you mean 'words'?)", name="c.jsonl", text_columns=["word"])
    test = [{"text": "a"}] * 9 + [{"text": "b", "label": 1}]
    refuse("9 of 10 rows of test", train_file=write("d.jsonl", ROWS), test_file=write("t.jsonl", test))


def test_packed_files_and_shards_are_read_as_one(monkeypatch):
    monkeypatch.setattr(table_files, "CHUNK", 2)
    whole = read(write("whole.jsonl", ROWS), "whole.jsonl")
    Path("data").mkdir()
    for suffix in ("csv.gz", "tsv.GZ", "jsonl.gz", "json.gz", "csv", "parquet"):
        for number, part in enumerate((ROWS[:5], ROWS[5:6], ROWS[6:])):
            plain = write(f"plain.{suffix.lower().removesuffix('.gz')}", part)
            packed = (
                gzip.compress(Path(plain).read_bytes()) if suffix.lower().endswith(".gz") else Path(plain).read_bytes()
            )
            write(f"data/part-{number}.{suffix}", packed)
        splits = read(f"data/*.{suffix}", f"data/*.{suffix}")
        assert splits.source["sha256"] == whole.source["sha256"]  # content counts, not how it is cut
        assert splits.train["text"][:] == whole.train["text"][:]
        assert splits.notes[0] == f"3 files match 'data/*.{suffix}'"
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert read("~/data/*.csv", "~/data/**/*.csv").train.num_rows == 12
    for empty in ("text,label\n", "\n"):  # as some programs leave them
        write("data/part-1.csv", empty)
        assert read("data/*.csv", "whole.jsonl").train.num_rows == 11
    write("data/part-1.csv", Path("data/part-0.csv").read_text())
    write("data/part-0.csv", "\n")
    assert read("data/*.csv", "whole.jsonl").train.num_rows == 11
    write("data/part-0.csv", Path("data/part-1.csv").read_text())
    write("data/part-1.csv", "label,text\nno,a\n")  # another order of columns
    assert read("data/*.csv", "whole.jsonl").train["text"][5] == "a"
    write("data/part-1.csv", "text,label\na,no\nb,\n")
    refuse("data/part-1.csv, row 2", "1 of 13 rows of train", train_file="data/*.csv")
    write("data/part-1.csv", "text,label\na,no\nb\n")
    refuse("data/part-1.csv, row 2 (line 3)", "1 cells", train_file="data/*.csv")
    write("data/part-1.csv", "text,label,more\na,no,b\n")
    refuse("data/part-1.csv", "'more'", "data/part-0.csv", train_file="data/*.csv")
    names = parquet("data/part-1.parquet", CLASS_NAMES, text=["a"], label=[0])
    refuse(names, "class names are not those of data/part-0.parquet", train_file="data/*.parquet")
    write("lines-1.jsonl", [{"text": "a"}, {"text": "b"}])
    write("lines-2.jsonl", [{"more": 1, "text": "a", "label": "no"}])
    refuse("lines-1.jsonl", "no column 'label' for test", train_file="whole.jsonl", test_file="lines-*.jsonl")
    write("lines-1.jsonl", [{"text": "a", "label": "no"}, {"text": "b", "more": 2, "label": "no"}])
    assert read("whole.jsonl", test="lines-*.jsonl").test["text"][:] == ["a", "b", "a"]
    write("bracket[1].csv", ROWS)
    assert read("bracket[1].csv").source["rows"]["train"] == 10  # a name, not a pattern


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz", "a.json.gz", "a.tsv.gz"])
def test_damaged_gzip_is_refused(name):
    good = gzip.compress(Path(write(f"plain{name[1:-3]}", ROWS * 99)).read_bytes())
    for bad in (b"text,label\n", good[:-9], good[:60], good[:40] + b"????" + good[44:]):
        refuse_train(bad, "not readable as gzip", name=name)


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
    note = "(can be read both ways: 2 rows with quoted cells, 3 with quotes as they are)"
    assert f"c.tsv: quotes are read as they are {note}" in read("c.tsv", "c.tsv").notes
    rare = glue[: glue.index("0")] + '0\t"one\ttwo\n1\ta\tb\n2\tc\td\n1\tthree"\tfour\n1\ta\tb\n'
    assert read(write("d.tsv", rare), "d.tsv").label_names == ("0", "1", "2")  # one strange label of three is none


@pytest.mark.parametrize("columns", [("label", "text"), ("text", "label"), ("label", "idx", "text")])
def test_quoted_cells_of_a_tsv_may_hold_tabs_and_line_ends(columns):
    """Each line of these cells could be a row of its own: only its label gives it away."""
    rows, content = [], "\t".join(columns) + "\n"
    for i in range(24):
        text = f"see this {i}\n" + "\t".join(["reply", *"0" * (len(columns) - 2), f"that {i}"])
        if columns[0] == "text":
            text = f"see this {i}\treply\nthat {i}"
        rows.append({"label": ("ham", "spam")[i % 2], "text": text, "idx": str(i)})
        cells = {**rows[-1], "text": f'"{text}"'}
        content += "\t".join(cells[name] for name in columns) + "\n"
    splits = read(write("a.tsv", content), "a.tsv")
    assert splits.label_names == ("ham", "spam") and splits.train["text"][:] == [row["text"] for row in rows]
    assert any("24 rows with quoted cells, 48 with quotes as they are" in note for note in splits.notes)


def test_known_text_columns_are_found_and_others_are_named():
    row = {"idx": 1, "sentence": "s", "question": "q", "text": "t", "label": 0}
    rows = [row, {**row, "label": 1}]
    assert read(write("a.jsonl", rows), "a.jsonl").text_columns == ("question", "sentence")
    assert read("a.jsonl", "a.jsonl", text_columns=["text", "idx"]).train.column_names == [
        "text",
        "idx",
        "label",
    ]


def test_the_only_column_with_words_is_the_text_and_two_are_listed():
    rows = [
        {"idx": i, "at": f"2024-01-{i:02}", "sure": i % 2 > 0, "review": f"w {i}", "label": i % 2} for i in range(12)
    ]
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        splits = read(write(name, rows))
        assert splits.text_columns == ("review",)
        assert "text column: 'review', the only one with words beside 'label'" in splits.notes
    two = [{**row, "title": "t"} for row in rows]
    refuse_train(two, "no text column", "['review', 'title']", "text_columns", "'idx', 'at', 'sure'", name="b.jsonl")
    refuse_train("idx,label\n1,0\n2,1\n", "no column holds texts", "'idx', 'label'")
    refuse_train("review,Label\na,0\nb,1\n", "no column 'label'", "did you mean 'Label'?")
    assert read(write("c.csv", [{"idx": 7, **row} for row in ROWS])).text_columns == ("text",)


# Labels


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([10, 9, 2], ("2", "9", "10")),
        (["10", " 9", "2 "], ("2", "9", "10")),
        ([1.0, 0.0, 3.0], ("0", "1", "3")),
        ([True, False, True], ("False", "True")),
        ([True, 1, "x"], ("1", "True", "x")),
        (["b", " a ", "B"], ("B", "a", "b")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["None", "NA", "007"], ("007", "NA", "None")),
    ],
)
def test_label_ids_are_places_in_the_sorted_names(labels, names):
    for order in (labels, labels[::-1]):
        rows = [{"text": "a", "label": label} for label in order]
        splits = read(write("a.jsonl", rows), "a.jsonl")
        spelt = [str(int(x)) if isinstance(x, float) else str(x).strip() for x in order]
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


def test_truth_values_are_one_pair_of_labels_in_every_kind_of_file():
    rows = [{"text": f"t{i}", "label": i % 3 > 0} for i in range(12)]
    trains = [write(name, rows) for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet")]
    others = [write(f"{word}.csv", f"text,label\na,{word}\nb,{other}\n") for word, other in TRUTH]
    for train in trains:
        for other in (*trains, *others):
            splits = read(train, trains[0], other)
            assert splits.label_names == ("False", "True")
            assert splits.train["label"][:] == [int(i % 3 > 0) for i in range(12)]
            assert splits.test["label"][:2] == ([1, 0] if other in others else [0, 1])
    # where train has lower case or other words beside them, they are words like any other
    assert read(others[1], others[1]).label_names == ("false", "true")
    assert read(others[1], trains[0]).validation["label"][:] == [int(i % 3 > 0) for i in range(12)]
    three = write("three.csv", "text,label\na,True\nb,False\nc,half\n")
    refuse("'true'", "looks like 'True'", train_file=three, validation_file=others[1])
    mixed = write("mixed.csv", "text,label\na,True\nb,False\nc,true\n")
    assert read(mixed, mixed).validation["label"][:] == [1, 0, 2]


TRUTH = [("True", "False"), ("true", "false"), ("TRUE", "FALSE")]


def test_few_rows_for_each_of_many_labels_are_trained_with_a_note():
    rows = [{"text": f"t{i}", "label": f"intent_{i % 60}"} for i in range(120)]
    splits, train, validation = carved(rows)
    assert len(train) == len(validation) == 60 and len(splits.label_names) == 60
    assert len(set(splits.train["label"])) == len(set(splits.validation["label"])) == 60
    assert "60 different labels in 120 rows: is 'label' the label_column?" in splits.notes
    assert any("60 of 120 rows of train (more than 10 %: one of each label at least)" in note for note in splits.notes)
    assert not any("different labels" in note for note in carved(rows * 2)[0].notes)


@pytest.mark.parametrize(
    "label",
    ["['x', 'a']", '["x","a"]', "[0, 1]", "[0 1 0]", "[1. 0.]", "[]", "['x']", "['x' 'a']", "[x, a]", "('x', 'a')"]
    + ["{'x', 'a'}", ["x"], ["x", "a"], [0, 1], []],
)
def test_several_labels_in_one_are_called_multi_label_data(label):
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": label}]
    refuse_train(rows, "row 2", "multi-label", "one label a row", name="a.jsonl")
    if isinstance(label, list) and label:
        refuse_train([rows[1]], "row 1", "multi-label", name="a.parquet")


def test_labels_in_brackets_that_are_no_lists_are_words():
    labels = ["[UNK]", "(none)", ":)", "{x}", "[x]"]
    rows = [{"text": "a", "label": label} for label in labels]
    assert read(write("a.jsonl", rows), "a.jsonl").label_names == tuple(sorted(labels))


@pytest.mark.parametrize(
    ("one", "other"),
    [("caf\u00e9", "cafe\u0301"), ("tea", "te\u200ba"), ("tea", "\ufefftea"), ("new york", "new\u00a0york")]
    + [("new york", "new  york"), ("a b", "a\nb"), ("soft", "so\u00adft"), ("\u2764", "\u2764\ufe0f")],
)
def test_labels_that_look_the_same_are_refused(one, other):
    rows = [{"text": "a", "label": label} for label in (one, "else", other)]
    message = refuse_train(rows, "look the same", f"row 1), {other!a} (a.jsonl, row 3)", name="a.jsonl")
    assert ascii(one) in message
    good = write("b.jsonl", rows[:2])
    refuse(
        "a.jsonl",
        f"validation has labels that train has not: {other!a} (1 rows",
        train_file=good,
        validation_file=write("a.jsonl", rows[2:]),
    )
    assert f"looks like {one!a}" in refuse(train_file=good, validation_file="a.jsonl")


@pytest.mark.parametrize(
    ("one", "other"), [("Oak", "oak"), ("not_equal", "not-equal"), ("m\u00b2", "m2"), ("Stra\u00dfe", "STRASSE")]
)
def test_labels_that_differ_in_case_or_form_only_get_a_note(one, other):
    rows = [{"text": "a", "label": label} for label in (one, "else", other, "else ", " else")]
    splits = read(write("a.jsonl", rows), "a.jsonl")
    assert len(splits.label_names) == 3  # blanks around a label do not count
    blanks = "labels in 'label' have blanks around them (a.jsonl, row 4): read without them"
    assert splits.notes[:2] == [blanks, blanks]  # of train and of validation
    assert splits.notes[2].startswith(
        f"labels that may be meant as one: {one!a} (a.jsonl, row 1), {other!a} (a.jsonl, row"
    )
    good = write("b.jsonl", rows[:2])
    refuse(f"looks like {one!a}", train_file=good, validation_file=write("v.jsonl", rows[2:3]))


def test_numbers_are_no_look_alikes_and_invisible_labels_are_missing_ones():
    rows = [{"text": "a", "label": label} for label in ("-2", "2", "12", "1 2", "1-2", "1_2", "\u00b2")]
    assert read(write("a.jsonl", rows), "a.jsonl").notes[:-1] == []
    for empty in ("\u200b", " \ufeff "):
        bad = [{"text": "a", "label": "x"}, {"text": "b", "label": empty}]
        refuse_train(bad, "1 of 2 rows of train have no label", name="b.jsonl")


def test_a_label_with_a_line_end_is_shown_on_one_line():
    rows = [{"text": "a", "label": label} for label in ("two\nlines", "one", "two", "three\t")]
    splits = read(write("a.jsonl", rows), "a.jsonl")
    assert splits.label_names == ("one", "three", "two", "two\nlines")  # as it is
    assert [printable(name) for name in splits.label_names] == ["one", "three", "two", "two\\nlines"]
    assert printable("caf\u00e9 \u200b\x1b[2J\u2028") == "caf\u00e9 \\u200b\\x1b[2J\\u2028"
    assert (
        describe_labels(("caf\u00e9\n", "two\nlines")) == "labels caf\u00e9\\n, two\\nlines; f1 is that of two\\nlines"
    )
    refuse("'two\\nlines'", train_file=write("b.jsonl", rows[1:3]), validation_file="a.jsonl")


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


def splits_of_before(rows, fraction, seed):
    """The carving and the hashes of the first version: runs that it began have to go on."""

    def sha256(rows):
        return hashlib.sha256("\n".join(map(json.dumps, rows)).encode()).hexdigest()

    rows, ranked = [(i, texts, label) for i, (texts, label) in enumerate(rows, 1)], {}
    for number, texts, label in rows:
        ranked.setdefault(label, []).append((sha256([(seed, texts, label)]), number))
    sizes = {label: len(ranked[label]) for label in sorted(ranked) if len(ranked[label]) > 1}
    take = {label: min(max(int(size * fraction), 1), size - 1) for label, size in sizes.items()}
    short = max(round(len(rows) * fraction) - sum(take.values()), 0)
    for label in sorted(take, key=lambda label: take[label] - sizes[label] * fraction)[:short]:
        take[label] = min(take[label] + 1, sizes[label] - 1)
    chosen = {number for label, count in take.items() for _, number in sorted(ranked[label])[:count]}
    train, validation = ([row for row in rows if (row[0] in chosen) is carved] for carved in (False, True))
    return train, validation, {"train": sha256(train), "validation": sha256(validation)}


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_carving_and_hashes_are_those_of_runs_begun_before(fraction, monkeypatch):
    monkeypatch.setattr(table_files, "CHUNK", 64)
    words = ["caf\u00e9", 'say "hi"', "\U0001f600", "two\nlines\t", "\\", "\x7f\u2028", ""]
    labels = ["b", "a", "\u00e9t\u00e9", "a", "c", "a", "b", "lone"]
    rows = [((f"{words[i % 7]} {i % 90}", words[i % 5]), labels[i % 7 if i else 7]) for i in range(301)]
    write("a.jsonl", [{"sentence1": a, "sentence2": b, "label": label} for (a, b), label in rows])
    for seed in (0, 42):
        train, validation, hashes = splits_of_before(rows, fraction, seed)
        splits = read("a.jsonl", validation_fraction=fraction, seed=seed)
        assert splits.source["sha256"] == hashes
        for part, stored in ((train, splits.train), (validation, splits.validation)):
            assert list(zip(stored["sentence1"], stored["sentence2"], strict=True)) == [texts for _, texts, _ in part]
            assert [splits.label_names[i] for i in stored["label"]] == [label for _, _, label in part]
    _, _, hashes = splits_of_before([(("x",), None), (("y",), None)], 0.5, 0)
    hidden = hashlib.sha256(b'[1, ["x"], null]\n[2, ["y"], null]').hexdigest()
    assert read("a.jsonl", test=write("t.csv", "sentence1,sentence2\nx,\ny,\n")).source["rows"]["test"] == 2
    one = read(write("one.jsonl", ROWS), test=write("t.csv", "text\nx\ny\n"))
    assert one.source["sha256"]["test"] == hidden


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


@pytest.fixture
def settled(monkeypatch):
    """Count every file as old enough to be recognised by its times."""
    monkeypatch.setattr(table_cache, "TICK", -(10**18))


def no_reading(monkeypatch):
    monkeypatch.setattr(tables, "read_rows", lambda *_: pytest.fail("the data are read again"))


def test_a_second_start_does_not_read_unchanged_files(settled, monkeypatch):
    write("a.csv", "text,label\na,x\nb,y\nc,x\nd,Y\n")
    first = read("a.csv", test="a.csv")
    with monkeypatch.context() as patch:
        no_reading(patch)
        second = read("a.csv", test="a.csv")
        for name in ("text_columns", "label_names", "source", "notes"):
            assert getattr(first, name) == getattr(second, name)
        for split in ("train", "validation", "test"):
            assert getattr(first, split)[:] == getattr(second, split)[:]
            assert getattr(first, split).cache_files == getattr(second, split).cache_files
        for changed in ({"seed": 1}, {"validation_fraction": 0.4}, {"text_columns": ["text"]}):
            with pytest.raises(pytest.fail.Exception, match="read again"):
                read("a.csv", test="a.csv", **changed)
    shutil.rmtree(Path(first.train.cache_files[0]["filename"]).parent)  # someone has tidied up
    assert read("a.csv", test="a.csv").train[:] == first.train[:]
    note = next((Path("cache") / "text_splits").glob("*.json"))
    note.write_text("{", "utf-8")  # torn
    assert read("a.csv", test="a.csv").train[:] == first.train[:]
    assert not list((Path("cache") / "text_splits").glob("work.*"))


def test_a_changed_file_is_read_again_whatever_its_size_and_time(settled, monkeypatch):
    """Also if a program sets the old time again: ctime cannot be set."""
    name = write("a.csv", "text,label\naa,0\nbb,1\n")
    before, times = read(name, name), os.stat(name).st_mtime_ns
    time.sleep(0.05)  # more than a tick
    write(name, "text,label\naa,0\nxx,1\n")
    os.utime(name, ns=(times, times))
    assert read(name, name).train["text"][:] == ["aa", "xx"] and before.train["text"][:] == ["aa", "bb"]


def test_a_file_that_has_just_changed_is_not_recognised_by_its_times():
    """Its next change could fall into the same tick of the clock, with the same size."""
    name = write("a.csv", "text,label\naa,0\nbb,1\n")
    for text in ("cc", "dd", "ee"):
        read(name, name)
        write(name, f"text,label\naa,0\n{text},1\n")
        assert read(name, name).train["text"][:] == ["aa", text]
    assert not list((Path("cache") / "text_splits").glob("*.json"))


def test_a_second_start_does_not_read_an_unchanged_hub_dataset(monkeypatch):
    hub(monkeypatch, train=({"text": ["a", "b"], "label": [0, 1]},), validation=({"text": ["a"], "label": [0]},))
    first = read_text_splits(dataset_name="some/set")
    with monkeypatch.context() as patch:
        no_reading(patch)
        assert read_text_splits(dataset_name="some/set").source == first.source
    hub(monkeypatch, train=({"text": ["a", "c"], "label": [0, 1]},), validation=({"text": ["a"], "label": [0]},))
    assert read_text_splits(dataset_name="some/set").train["text"][:] == ["a", "c"]


def test_memory_does_not_grow_with_the_rows(tmp_path):
    """A first start, in a process of its own: 16 times the rows, twice the memory beyond the libraries' at most."""
    code = (
        f"import sys, resource; sys.path[:0] = {sys.path!r}\nfrom kit.tables import read_text_splits\n"
        "read_text_splits(train_file='small.csv'); a = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "s = read_text_splits(train_file='large.csv'); b = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print((b - a) / 1024, len(s.train))"
    )
    row = "some words and then some more of them and others " * 8
    for name, count in (("small", 2_000), ("large", 80_000)):  # the large one has 32 MB
        write(f"{name}.csv", "text,label\n" + "".join(f"{row}{i},{i % 3}\n" for i in range(count)))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    megabytes, rows = done.stdout.split()
    assert rows == "72000"
    assert float(megabytes) < 16, f"{megabytes} MB more for a file of 32 MB"


def test_a_cache_that_cannot_be_written_is_one_line(monkeypatch):
    write("in the way", "x")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("in the way"))
    with pytest.raises(MachineError, match=r"in the way.*HF_HOME"):
        read(write("a.csv", ROWS))


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
    refuse_train("\n\n", "has no rows")
    refuse_train("text,label\na,0\ncafé,1\n".encode("latin-1"), "line 3", "UTF-8", "iconv")
    refuse_train("text,label\na,0\n".encode("utf-16"), "UTF-8", "UTF-16")
    refuse_train("text,label\na,0\nb\0,1\n", "line 3", "NUL")
    refuse_train("PAR1 this is not", "Parquet", name="a.parquet")
    refuse_train(b"text,label\na,0\n" + "\u00e9,1\n".encode() * 9000 + b"\xff,1\n", "line 9003", "0xff")


def parquet(name, schema=None, **columns) -> str:
    """Write columns (lists, or Arrow arrays where a type matters) and return the name."""
    arrays = [column if isinstance(column, pyarrow.Array) else pyarrow.array(column) for column in columns.values()]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, [*columns], metadata=schema), name)
    return name


FEATURES = {"label": {"_type": "ClassLabel", "names": ["n", "p"]}}
FEATURES |= {"scan": {"_type": "Hologram"}, "tags": [{"_type": "Value", "dtype": "string"}]}  # others' business
CLASS_NAMES = {"huggingface": json.dumps({"info": {"features": FEATURES}})}


def test_only_the_used_columns_of_parquet_are_read():
    texts, labels = ["a", "b"], pyarrow.array(["x", "y"]).dictionary_encode()
    odd = {
        "map": pyarrow.array([[("k", "v")]] * 2, pyarrow.map_(pyarrow.string(), pyarrow.string())),
        "took": pyarrow.array([5, 5], pyarrow.duration("us")),
        "when": pyarrow.array([5, 5], pyarrow.time64("us")),
        "none": pyarrow.nulls(2),
        "list": [[1], [2]],
        "bytes": [b"\xff", b"\xfe"],
        "text.more": ["1", "2"],
    }
    name = parquet("a.parquet", text=pyarrow.array(texts, pyarrow.large_string()), label=labels, **odd)
    splits = read(name, name)
    assert splits.train[:] == {"text": texts, "label": [0, 1]} and splits.label_names == ("x", "y")
    for column in ("map", "took", "when", "none", "list", "bytes"):
        refuse("a.parquet", "row 1", f"'{column}'", train_file=name, text_columns=[column])
    for column in ("map", "took", "when", "list", "bytes"):
        refuse("a.parquet", "row 1", f"'{column}'", train_file=name, label_column=column)
    name = parquet("b.parquet", CLASS_NAMES, text=texts, label=[1, 0], scan=texts)
    assert read(name, name).label_names == ("n", "p") and read(name, name).train["label"][:] == [1, 0]
    for ids in ([1, 2], [0, -2], [0, 7]):
        wrong = parquet("c.parquet", CLASS_NAMES, text=texts, label=ids)
        refuse("c.parquet, row 2", f"'label' is {ids[1]}", "2 classes, 0 to 1", train_file=wrong)
    twice = pyarrow.Table.from_arrays([pyarrow.array(texts)] * 3, ["text", "label", "label"])
    pyarrow.parquet.write_table(twice, "d.parquet")
    refuse("d.parquet", "['label'] more than once", train_file="d.parquet")
    pyarrow.parquet.write_table(twice.rename_columns(["text", "x", "x"]).append_column("label", [texts]), "e.parquet")
    assert read("e.parquet", "e.parquet").train["text"][:] == texts
    content = Path("a.parquet").read_bytes()
    for broken in (content[:-30], content[: len(content) // 2], content[:4] + b"\0" * 60 + content[64:]):
        refuse_train(broken, "not readable as Parquet", name="f.parquet")


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
    write("a.parquet.gz", "x")
    write("part-1.csv", "text,label\na,0\n")
    write("part-2.tsv", "text\tlabel\nb\t1\n")
    refuse("no training data")
    refuse("no training data", validation_file="train.jsonl")
    refuse("train_file", "dataset_name 'some/set'", train_file="train.jsonl", dataset_name="some/set")
    refuse("validation_file", "dataset_name", validation_file="train.jsonl", dataset_name="some/set")
    refuse("'trian.jsonl'", "did you mean 'train.jsonl'?", train_file="trian.jsonl")
    refuse("'nowhere'", train_file="nowhere/train.jsonl")
    refuse("train_file", "'folder' is a folder", "'folder/*.csv'", train_file="folder")
    refuse("dataset_name", "'folder'", "train_file", dataset_name="folder")
    refuse("test_file", "empty file", train_file="train.jsonl", test_file="empty.csv")
    for name in ("a.xlsx", "a.parquet.gz"):
        refuse(name, ".csv, .tsv, .json, .jsonl, .parquet", train_file=name)
    refuse("'part-*'", "several kinds", "part-1.csv", "part-2.tsv", train_file="part-*")
    refuse("'shard-*.csv'", "matches no file", train_file="shard-*.csv")
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
