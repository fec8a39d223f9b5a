"""kit/image_folders.py and image_sources.py: which images there are, of which class, in which split."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kit.errors import UserError
from kit.image_checks import check_images, scan
from kit.image_folders import class_from_name, split_of
from kit.image_sources import find_images
from kit.images import ImageDataset
from photos import ROOT, jpeg_bytes, make_pets, names, photo, write_classes


def test_strangers_in_the_folder_are_ignored_and_counted(tmp_path):  # report 70
    make_pets(tmp_path, count=2)
    (tmp_path / "x.mat").write_bytes(b"MATLAB 5.0 MAT-file")
    (tmp_path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (tmp_path / "._Abyssinian_1.jpg").write_bytes(b"\0\5\x16\7")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    photo().save(tmp_path / ".ipynb_checkpoints" / "Abyssinian_1-checkpoint.jpg")
    before = find_images(data_dir=str(tmp_path))
    photo(seed=7).save(tmp_path / "great_pyrenees_20.JPG")
    photo(seed=8).save(tmp_path / "Abyssinian_30.jpg", "GIF")
    splits = find_images(data_dir=str(tmp_path))
    assert len(list(splits)) == 6 == len(list(before)) + 2
    assert f"ignored in {tmp_path}: .mat (1), hidden files (2)" in splits.notes
    report = scan(splits)
    assert not report.bad and report.odd == {"Abyssinian_30.jpg": "GIF named .jpg, mode P"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("staffordshire_bull_terrier_2.jpg", "staffordshire_bull_terrier"),
        ("data/images/great_pyrenees_12.JPG", "great_pyrenees"),
        (r"C:\data\my_pets\Abyssinian_100.jpeg", "Abyssinian"),
        ("IMG.jpg", None),
        ("1_2_3.png", "1_2"),
    ],
)
def test_the_class_is_the_name_without_its_number_on_any_platform(path, expected):  # report 70, 78
    assert class_from_name(path) == expected


def test_folders_of_classes_may_stand_below_splits(tmp_path):
    write_classes(tmp_path / "bare", {"cat": 5, "dog": 10, "train": 5})
    splits = find_images(data_dir=str(tmp_path / "bare"))
    assert splits.label_names == ("cat", "dog", "train") and not splits.test
    assert splits.source["rows"] == {"train": 17, "validation": 3, "test": 0} and splits.source["validation_carved"]
    for validation in ("validation", "valid", "val", "Val"):
        data = tmp_path / f"with {validation} and ümlaut"
        write_classes(data / "train", {"dog": 3, "cat": 2})
        write_classes(data / validation, {"dog": 1}, seed=1)
        write_classes(data / "test", {"cat": 2}, seed=2)
        splits = find_images(data_dir=str(data))
        assert splits.source["rows"] == {"train": 5, "validation": 1, "test": 2}
        assert not splits.source["validation_carved"] and splits.label_names == ("cat", "dog")
        assert names(splits.test) == ["test/cat/0.jpg", "test/cat/1.jpg"]
    make_pets(tmp_path / "flat" / "train")
    make_pets(tmp_path / "flat" / "test")
    splits = find_images(data_dir=str(tmp_path / "flat"))
    assert splits.source["rows"] == {"train": 10, "validation": 2, "test": 12}


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ({}, "no images .* only: nothing"),
        ({"a/notes": 0}, "no images"),
        ({"a": 3}, "1 classes in train: a; two at least"),
        ({"train/a": 2, "train/b": 2, "val/a": 1, "val/c": 1}, "validation has classes that train has not: c"),
        ({"train/a": 2, "train/b": 2, "test/z": 1}, "test has classes that train has not: z"),
        ({"train/a": 2, "val/a": 1, "valid/a": 1}, "above the classes, use train"),
        ({"train/a": 2, "train/b": 2, "val/a": 1, "extra/a": 1}, "above the classes, use train"),
        ({"val/a": 2, "test/a": 2}, "above the classes, use train"),
        ({"": 2, "a": 2}, r"contains both images \(0.jpg\) and folders of images \(a\)"),
        ({"": 2}, "no class in the name '[01].jpg'"),
        ({"a": 1, "b": 1}, "no image for validation"),
        # a class without images
        ({"a": 2, "b": 2, "c": 0}, r"/c: a class without images \(empty\): add images of a supported kind"),
        ({"train/a": 2, "train/b": 2, "train/c": 0, "val/a": 1}, r"/train/c: a class without images"),
        ({"train/a": 2, "train/b": 2, "test/a": 1, "test/b": 0}, r"/test/b: a class without images"),
        ({"train/a": 2, "train/b": 2, "test": 0}, r"/test: a split without images \(empty\)"),
        # splits that would be taken for classes
        ({"elm/Training": 2, "oak/Training": 2, "elm/test": 1}, "elm, oak contain splits .*train/CLASS"),
        ({"one/a": 2, "one/b": 2, "two/a": 2, "two/b": 2}, "one, two look like splits, .*a, b.* to train"),
        ({"pets_train": 2, "pets_test": 2}, "pets_test, pets_train look like splits, not classes: rename"),
        ({"seg_train/seg_train/a": 2, "seg_test/seg_test/a": 2, "seg_pred/x": 1}, "seg_pred, seg_test, seg_train look"),
        ({"seg_train/seg_train/a": 2, "seg_test/seg_test/a": 2}, "seg_test, seg_train look like splits"),
        ({"pets/train/a": 2, "pets/train/b": 2, "pets/test/a": 1}, "a single folder, pets: use --data_dir .*/pets"),
        ({"Train/a": 2, "Train/b": 2, "test/A": 1}, r"test has classes that train has not: A \(train has a\)"),
        ({"Training/a": 2, "Training/b": 2, "train/a": 1}, "above the classes, use train"),
    ],
)
def test_a_folder_that_makes_no_sense_is_refused_in_one_line(tmp_path, folders, message):
    write_classes(tmp_path, folders)
    with pytest.raises(UserError, match=message) as caught:
        find_images(data_dir=str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("Training", "Validation", "Testing"),
        ("TRAIN", "Val", "TEST"),
        ("train2017", "val2017", "test2017"),
        ("training_set", "dev-set", "test set"),
        ("TrainImages", "eval_data", "Testing Data"),
        ("images_train", "img-val", "data test"),
    ],
)
def test_splits_are_known_by_their_usual_names(tmp_path, train, validation, test):
    for folder, count, seed in ((train, 6, 0), (validation, 2, 1), (test, 3, 2)):
        write_classes(tmp_path / folder, {"elm": count, "fir": count, "oak": count}, seed)
    splits = find_images(data_dir=str(tmp_path))
    assert splits.source["rows"] == {"train": 18, "validation": 6, "test": 9}
    assert splits.label_names == ("elm", "fir", "oak")
    said = [note for note in splits.notes if f"{train} is train" in note]
    assert len(said) == (0 if train == "TRAIN" else 1)


@pytest.mark.parametrize("name", ["trainer", "trained", "retest", "tester", "attest", "value", "device", "1", "_"])
def test_other_words_are_no_splits(name):
    assert split_of(name) is None


def test_images_are_found_by_every_usual_suffix_in_any_case(tmp_path):
    suffixes = ".jpg .JPEG .jfif .jpe .png .gif .bmp .webp .tif .TIFF .avif .jp2 .ppm .pgm".split()
    for label in ("elm", "oak"):
        (tmp_path / label).mkdir()
        for suffix in suffixes:
            (tmp_path / label / f"1{suffix}").touch()  # nothing is opened here
    assert len(list(find_images(data_dir=str(tmp_path)))) == 2 * len(suffixes)


def test_classes_may_have_the_words_of_splits_in_their_names(tmp_path):
    write_classes(tmp_path, {"train_station": 3, "test_tube": 3, "dev_board": 3})
    assert find_images(data_dir=str(tmp_path)).label_names == ("dev_board", "test_tube", "train_station")


def test_sub_folders_of_a_class_are_part_of_it(tmp_path):
    write_classes(tmp_path / "cat" / "images", {"monday": 2, "tuesday": 1})
    write_classes(tmp_path / "dog" / "images", {"monday": 2, "friday": 3})
    splits = find_images(data_dir=str(tmp_path))
    assert splits.label_names == ("cat", "dog") and len(list(splits)) == 8
    write_classes(tmp_path, {"cat": 2})  # images directly in it: a class, whatever the folders below have in common
    write_classes(tmp_path / "cat", {"front": 1, "side": 1})
    write_classes(tmp_path / "dog", {"front": 1, "side": 1})
    assert find_images(data_dir=str(tmp_path)).label_names == ("cat", "dog")


def test_a_class_of_unread_files_is_named_with_them(tmp_path):
    write_classes(tmp_path, {"elm": 3, "oak": 3})
    (tmp_path / "fir" / "raw").mkdir(parents=True)
    for name in ("fir/a.heic", "fir/b.HEIC", "fir/raw/c.heic", "fir/.DS_Store"):
        (tmp_path / name).write_bytes(b"0")
    with pytest.raises(UserError) as caught:
        find_images(data_dir=str(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/fir: a class without images (.HEIC (1), .heic (2), hidden files (1)): add ")
    assert ".avif" in message and "remove the folder" in message
    shutil.rmtree(tmp_path / "fir")
    (tmp_path / "fir").symlink_to(tmp_path / "oak")
    with pytest.raises(UserError, match=r"/fir: a class without images \(links to folders \(1\)\)"):
        find_images(data_dir=str(tmp_path))


def test_folders_of_the_system_are_no_classes(tmp_path):
    write_classes(tmp_path, {"elm": 3, "oak": 3, "__MACOSX/elm": 1, "@eaDir": 2, ".thumbnails": 2})
    assert find_images(data_dir=str(tmp_path)).label_names == ("elm", "oak")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    write_classes(tmp_path, {"elm": 3, "oak": 3})
    scandir = os.scandir

    def refused(path):
        if str(path).endswith("oak"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"/oak: cannot be listed \(Permission denied\)"):
        find_images(data_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Oak", "oak"),
        ("red_oak", "red oak"),
        ("tea", "tea\u200b"),
        ("oak", "oak "),
        ("tea", "t\u200bea"),
        ("Straße", "STRASSE"),
    ],
)
def test_classes_that_look_alike_are_named_as_a_likely_mistake(tmp_path, one, other):
    write_classes(tmp_path, {one: 3, other: 3, "elm": 3, "fir": 3})
    notes = find_images(data_dir=str(tmp_path)).notes
    assert sum("probably one class" in note for note in notes) == 1
    assert sum(repr(one) in note and repr(other) in note and "elm" not in note for note in notes) == 1


def test_classes_that_differ_in_signs_are_no_mistake(tmp_path):
    write_classes(tmp_path, {"c": 3, "c++": 3, "c#": 3, "+": 3, "-": 3, "_": 3})
    assert not any("probably one class" in note for note in find_images(data_dir=str(tmp_path)).notes)


def test_two_spellings_of_an_accent_are_one_class_and_said(tmp_path):
    write_classes(tmp_path, {"cafe\u0301": 3, "elm": 3})
    (tmp_path / "caf\u00e9").mkdir()
    photo(seed=9).save(tmp_path / "caf\u00e9" / "other.jpg")
    splits = find_images(data_dir=str(tmp_path))
    assert splits.label_names == ("caf\u00e9", "elm") and len(list(splits)) == 7
    assert [note for note in splits.notes if "spelled in two ways" in note and "caf\u00e9" in note]
    photo(seed=10).save(tmp_path / "caf\u00e9" / "0.jpg")
    with pytest.raises(UserError, match="two files have this name"):
        find_images(data_dir=str(tmp_path))


def test_a_name_with_a_line_end_is_written_out_and_said(tmp_path):
    write_classes(tmp_path, {"red\noak": 3, "elm": 3, "fir\u2028tree": 3})
    splits = find_images(data_dir=str(tmp_path))
    assert splits.label_names == ("elm", "fir%2028tree", "red%0aoak")
    assert sum("control character in a name, written as red%0aoak" in note for note in splits.notes) == 1
    assert all(note.isprintable() for note in splits.notes) and splits.read(splits.train[-1])


def test_missing_folders_and_double_sources_are_refused():
    for arguments, message in (
        ({"data_dir": "nowhere"}, "no such folder: 'nowhere'"),
        ({}, "give data_dir"),
        ({"data_dir": "x", "dataset_name": "beans"}, "both given"),
        ({"data_dir": "x", "validation_fraction": 1.0}, "between 0 and 1"),
    ):
        with pytest.raises(UserError, match=message):
            find_images(**arguments)


def test_links_are_not_followed_out_of_the_folder_nor_in_circles(tmp_path):
    data = make_pets(tmp_path / "data", count=3)
    photo().save(tmp_path / "secret_1.jpg")
    (data / "secret_1.jpg").symlink_to(tmp_path / "secret_1.jpg")
    (data / "Abyssinian_9.jpg").symlink_to(data / "Abyssinian_1.jpg")
    (data / "again").symlink_to(data, target_is_directory=True)
    splits = find_images(data_dir=str(data))
    assert len(list(splits)) == 7 and "Abyssinian_9.jpg" in names(splits)
    assert splits.notes[0].endswith("links out of the folder (1), links to folders (1)")


def test_the_split_is_a_function_of_names_and_seed_alone(tmp_path, monkeypatch):  # reports 8 and 13
    data = make_pets(tmp_path / "data", ("b_b", "a", "c"), count=20)
    splits = find_images(data_dir=str(data), seed=3)
    assert splits.label_names == ("a", "b_b", "c")
    assert splits.source["rows"] == {"train": 54, "validation": 6, "test": 0}
    assert [sum(item.label == label for item in splits.validation) for label in range(3)] == [2, 2, 2]
    assert not set(names(splits.train)) & set(names(splits.validation))
    assert names(splits.train) == sorted(names(splits.train))
    assert find_images(data_dir=str(data), seed=4).source["sha256"] != splits.source["sha256"]
    # the pixels do not matter, nor where the folder is, nor the order of listing, nor the hash seed of another process
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in sorted(names(splits), key=lambda name: name[::-1]):
        photo().save(copy / name)
    with monkeypatch.context() as patch:
        walk = os.walk
        patch.setattr(os, "walk", lambda root: ((top, dirs, files[::-1]) for top, dirs, files in walk(root)))
        random.seed(99)
        torch.manual_seed(99)
        assert find_images(data_dir=str(copy), seed=3).source["sha256"] == splits.source["sha256"]
    code = "import sys; from kit.image_sources import find_images; s = find_images(data_dir=sys.argv[1], seed=3)\n"
    code += "import json; print(json.dumps([s.source['sha256'], s.label_names]))"
    environment = {**os.environ, "PYTHONHASHSEED": "2", "PYTHONPATH": str(ROOT / "templates")}
    answer = subprocess.run(
        [sys.executable, "-c", code, str(copy)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=True,
    )
    assert json.loads(answer.stdout) == [splits.source["sha256"], list(splits.label_names)]


def write_lists(folder: Path, **lists: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, stems in lists.items():
        (folder / f"{name}.txt").write_text("#Image CLASS-ID\n" + "".join(f"{stem} 1 1 1\n" for stem in stems))


def test_official_lists_beside_the_images_are_followed(tmp_path):
    make_pets(tmp_path / "images", count=6)
    trainval = [f"{breed}_{number}" for breed in ("Abyssinian", "great_pyrenees") for number in (1, 2, 3)]
    write_lists(tmp_path / "annotations", trainval=trainval, test=["Abyssinian_4", "great_pyrenees_4"])
    for data_dir in (tmp_path, tmp_path / "images"):
        splits = find_images(data_dir=str(data_dir))
        assert splits.source["rows"] == {"train": 4, "validation": 2, "test": 2}
        assert names(splits.test) == ["Abyssinian_4.jpg", "great_pyrenees_4.jpg"]
        assert splits.notes[0].endswith("in no official list (4)")
    write_lists(tmp_path / "annotations", test=["Abyssinian_4", "Abyssinian_99"])
    with pytest.raises(UserError, match=r"1 of 2 listed images are not in .*Abyssinian_99"):
        find_images(data_dir=str(tmp_path))
    write_lists(tmp_path / "annotations", test=["Abyssinian_4", "Abyssinian_1"])
    with pytest.raises(UserError, match="Abyssinian_1 is listed twice"):
        find_images(data_dir=str(tmp_path))


def check_against_torchvision(root: Path) -> None:
    from torchvision.datasets import OxfordIIITPet

    splits = find_images(data_dir=str(root), dataset_name="oxford-iiit-pet")
    # its classes are those of the list at hand; ours are all of train's, as the ids in both lists are
    theirs = {split: OxfordIIITPet(str(root), split=split, download=False) for split in ("trainval", "test")}
    classes = [name.replace(" ", "_").lower() for name in theirs["trainval"].classes]
    ours = {"trainval": [*splits.train, *splits.validation], "test": splits.test}
    for split, items in ours.items():
        labels = zip(theirs[split]._images, theirs[split]._labels, strict=True)
        expected = sorted((path.name, classes[label]) for path, label in labels)
        assert sorted((item.name, splits.label_names[item.label].lower()) for item in items) == expected
        assert expected


def test_the_pets_are_torchvisions_with_the_official_lists(tmp_path, monkeypatch):
    folder = tmp_path / "oxford-iiit-pet"
    make_pets(folder / "images", ("Abyssinian", "great_pyrenees", "Birman"), count=3)
    folder.joinpath("annotations").mkdir()
    for file, numbers in (("trainval", (1, 2)), ("test", (3,))):
        rows = [
            f"{b}_{n} {i} 1 {i}" for i, b in enumerate(("Abyssinian", "Birman", "great_pyrenees"), 1) for n in numbers
        ]
        (folder / "annotations" / f"{file}.txt").write_text("\n".join(rows) + "\n")
    check_against_torchvision(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set. Ways on: ") as caught:
        find_images(data_dir=str(tmp_path / "empty"), dataset_name="oxford-iiit-pet")
    assert "\n" not in str(caught.value)


def test_the_real_pets_are_torchvisions_with_the_official_lists(real_data, tmp_path):
    folder = tmp_path / "oxford-iiit-pet"
    folder.mkdir()
    for part in ("images", "annotations"):
        (folder / part).symlink_to(real_data / "pets" / part, target_is_directory=True)
    check_against_torchvision(tmp_path)


def test_a_hub_dataset_keeps_the_bytes_and_the_classes_as_they_are(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    stored = [jpeg_bytes(photo(seed=i)) for i in range(8)]
    features = datasets.Features({"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["zebra", "ant"])})
    rows = {"photo": [{"bytes": data, "path": None} for data in stored], "kind": [0, 1] * 4}
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "hub" / "train.parquet")
    splits = find_images(dataset_name=str(tmp_path / "hub"))
    assert splits.label_names == ("zebra", "ant"), "the order of the dataset is its contract"
    assert {splits.read(item) for item in splits} == set(stored)
    dataset = ImageDataset(splits.train, 16, tables=splits.tables)
    assert pickle.loads(pickle.dumps(dataset))[0]["image"].shape == (3, 16, 16)
    assert not scan(splits).bad and scan(splits).num_images == 8
    # the usual names; hidden labels of a test get predictions; of two columns of classes one has to be named
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["zebra", "ant"])})
    rows = {"image": rows["photo"], "label": rows["kind"]}
    (tmp_path / "usual").mkdir()
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "usual" / "train.parquet")
    hidden = {"image": rows["image"][:3], "label": [-1] * 3}
    datasets.Dataset.from_dict(hidden, features).to_parquet(tmp_path / "usual" / "test.parquet")
    splits = find_images(dataset_name=str(tmp_path / "usual"))
    assert [item.label for item in splits.test] == [-1] * 3
    assert {splits.read(item) for item in splits} == set(stored)
    (tmp_path / "two").mkdir()
    both = datasets.Features({**features, "cat": features["label"]})
    datasets.Dataset.from_dict({**rows, "cat": [1, 0] * 4}, both).to_parquet(tmp_path / "two" / "train.parquet")
    with pytest.raises(UserError, match="give --label_column; columns there: image, label, cat"):
        find_images(dataset_name=str(tmp_path / "two"))
    named = find_images(dataset_name=str(tmp_path / "two"), label_column="cat")
    assert [item.label for item in sorted(named) if item.name == "train/00000000"] == [1]
    with pytest.raises(UserError, match="no column 'image' or 'kind' among photo, kind"):
        find_images(dataset_name=str(tmp_path / "hub"), image_column="image")
    with pytest.raises(UserError, match=r"cannot load 'nobody/nothing'.*Ways on") as caught:
        find_images(dataset_name="nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="only there a name may be any bytes")
def test_names_that_are_not_utf8_are_used_and_written_out(tmp_path):
    make_pets(tmp_path / "train", count=3)
    (tmp_path / "test").mkdir()
    for number, name in enumerate((b"train/caf\xe9_77.jpg", b"train/caf\xe9_78.jpg", b"test/caf\xe9.jpg")):
        (tmp_path / os.fsdecode(name)).write_bytes(jpeg_bytes(photo(seed=number)))
    splits = find_images(data_dir=str(tmp_path))
    assert splits.label_names == ("Abyssinian", "caf%e9", "great_pyrenees")
    assert [(item.name, item.label) for item in splits.test] == [("test/caf%e9.jpg", -1)]
    assert not scan(splits).bad
    assert not check_images(splits, tmp_path / "scans", False).notes[1:]


def test_a_test_of_names_without_a_class_of_the_training_is_unlabelled(tmp_path):
    make_pets(tmp_path / "train", count=3)
    (tmp_path / "test").mkdir()
    for number in range(2):
        photo(seed=number).save(tmp_path / "test" / f"IMG_{number:04}.jpg")
    assert [item.label for item in find_images(data_dir=str(tmp_path)).test] == [-1, -1]
    photo(seed=7).save(tmp_path / "test" / "Abyssinian_7.jpg")
    with pytest.raises(UserError, match="test has classes that train has not: IMG"):
        find_images(data_dir=str(tmp_path))
