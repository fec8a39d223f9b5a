"""kit/image_checks.py, check_data.py and the examples: what is wrong with images is said before they are used."""

import hashlib
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

from kit.errors import MachineError, UserError
from kit.image_cache import open_cache
from kit.image_checks import check_images, scan
from kit.image_files import EncodedImage, decode
from kit.image_sources import find_images, leave_out
from kit.images import ImageDataset
from photos import (
    ROOT,
    TRAINING,
    jpeg_bytes,
    make_pets,
    names,
    photo,
    run_script,
    spoil,
    write_classes,
    write_every_mode,
)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_file_stops_training_with_its_path(tmp_path, num_workers):  # report 27
    bad = spoil(make_pets(tmp_path))
    items = [item for item in find_images(data_dir=str(tmp_path)) if item.name in bad]
    batches = iter(DataLoader(ImageDataset(items, 16, **TRAINING), batch_size=1, num_workers=num_workers))
    for item in items:
        with pytest.raises(UserError, match=str(tmp_path / item.name)):
            next(batches)
    assert len(items) == 3 and next(batches, None) is None


def test_a_scan_names_every_bad_file_and_they_can_be_left_out(tmp_path):  # report 27
    bad = spoil(make_pets(tmp_path))
    splits = find_images(data_dir=str(tmp_path))
    report = scan(splits, num_workers=2)
    assert list(report.bad) == [name for name in names(splits) if name in bad] and len(report.bad) == 3
    reasons = " ".join(report.bad.values())
    assert all(str(tmp_path / name) in reasons for name in bad)
    assert "truncated" in reasons and "empty" in reasons and "<html>" in reasons
    kept = leave_out(splits, report.bad)
    assert kept.notes[-1].startswith("3 skipped") and len(list(kept)) == 12
    assert {*names(kept.validation)} == {*names(splits.validation)} - set(bad), "the others have moved"
    assert not scan(kept).bad
    pyrenees = [name for name in names(splits) if name.startswith("great")]
    with pytest.raises(UserError, match="no image of great_pyrenees left in train"):
        leave_out(splits, pyrenees)


def test_only_what_is_new_or_changed_is_decoded_again(tmp_path, monkeypatch):
    data, scans = make_pets(tmp_path / "data"), tmp_path / "scans"
    decoded, pixels_of = [], EncodedImage.pixels
    monkeypatch.setattr(EncodedImage, "pixels", lambda self: decoded.append(Path(self.name).name) or pixels_of(self))

    def check(skip_bad_images: bool = True) -> list[str]:
        """Return the names of the images that were decoded."""
        decoded.clear()
        check_images(find_images(data_dir=str(data)), scans, skip_bad_images)
        return sorted(decoded)

    assert len(check()) == 12 and check() == []
    photo(seed=50).save(data / "Abyssinian_7.jpg")
    assert check() == ["Abyssinian_7.jpg"] and check() == []
    (data / "Abyssinian_7.jpg").write_bytes(jpeg_bytes(photo(seed=51))[:-40])
    assert check() == ["Abyssinian_7.jpg"] and check() == []
    with pytest.raises(UserError, match=r"1 of 13 images cannot be used: .*Abyssinian_7.jpg"):
        check(skip_bad_images=False)
    (data / "Abyssinian_6.jpg").unlink()
    (data / "Abyssinian_7.jpg").unlink()
    assert check(skip_bad_images=False) == []
    splits = find_images(data_dir=str(data), seed=9, validation_fraction=0.3)
    decoded.clear()
    assert check_images(splits, scans, False) is splits and not decoded, "another split of the same images"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    splits = find_images(data_dir=str(make_pets(tmp_path / "data")))
    (tmp_path / "taken").touch()  # permissions mean nothing to root: a file stands where the folder should
    with pytest.raises(MachineError, match=r"taken/scans: cannot be written \(Not a directory\): set HF_HOME"):
        check_images(splits, tmp_path / "taken" / "scans", False)
    with pytest.raises(
        MachineError, match=r"taken/caches cannot be written or locked \(Not a directory\): set HF_HOME"
    ):
        open_cache(splits, str(tmp_path / "taken" / "caches"), 16, max_gb=1)


def test_a_dark_scan_is_said_by_the_run_and_by_the_check(tmp_path):
    data = make_pets(tmp_path / "data")
    Image.fromarray(np.full((40, 60), 3000, np.uint16)).save(data / "Abyssinian_8.tif")
    splits = find_images(data_dir=str(data))
    assert scan(splits).odd == {"Abyssinian_8.tif": "mode I;16, uses 12 of 16 bits: looks almost black"}
    for _ in range(2):  # the second time from what is kept
        notes = check_images(splits, tmp_path / "scans", False).notes
        said = f"almost black: {data}/Abyssinian_8.tif uses 12 of 16 bits. Store the full range of brightness"
        assert notes == [*splits.notes, said]


def test_a_class_of_damaged_images_is_named_with_its_files(tmp_path):
    data = tmp_path / "data"
    write_classes(data, {"elm": 3, "fir": 2, "oak": 3})
    for number in range(2):
        (data / "fir" / f"{number}.jpg").write_bytes(b"not an image")
    splits = find_images(data_dir=str(data))
    with pytest.raises(UserError, match=r"no image of fir left in train: .*fir/1.jpg.*take the class out"):
        check_images(splits, tmp_path / "scans", True)


def test_a_scan_tells_duplicates_and_which_of_them_leak(tmp_path):
    for split in ("train", "test"):
        write_classes(tmp_path / split, {"a": 3, "b": 3}, seed=len(split))
    (tmp_path / "train/a/copy.jpg").write_bytes((tmp_path / "train/b/1.jpg").read_bytes())
    (tmp_path / "test/b/leak.jpg").write_bytes((tmp_path / "train/a/2.jpg").read_bytes())
    report = scan(find_images(data_dir=str(tmp_path)))
    assert [sorted(group) for group in report.leaks] == [["test/b/leak.jpg", "train/a/2.jpg"]]
    assert sorted(map(sorted, report.duplicates)) == [
        ["test/b/leak.jpg", "train/a/2.jpg"],
        ["train/a/copy.jpg", "train/b/1.jpg"],
    ]
    assert run_script("examples/resnet50_pets/check_data.py", "--data_dir", str(tmp_path)) == 1
    assert [sorted(group) for group in scan(find_images(data_dir=str(tmp_path))).contradictions] == [
        ["test/b/leak.jpg", "train/a/2.jpg"],
        ["train/a/copy.jpg", "train/b/1.jpg"],
    ]
    (tmp_path / "test/b/leak.jpg").unlink()
    assert run_script("examples/resnet50_pets/check_data.py", "--data_dir", str(tmp_path)) == 1
    (tmp_path / "train/a/copy.jpg").write_bytes((tmp_path / "train/a/2.jpg").read_bytes())
    assert run_script("examples/resnet50_pets/check_data.py", "--data_dir", str(tmp_path)) == 0


def test_a_scan_tells_what_is_odd(tmp_path):
    write_every_mode(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    photo().save(tmp_path / "l_2.jpg", exif=exif)
    photo(1, 50).save(tmp_path / "l_3.png")
    data = bytearray(jpeg_bytes(photo(200, 150)))
    data[-2:-2] = b"\1\2\3\4\5\6\7\x08"  # bytes between the last row and the end: libjpeg warns, the picture is whole
    (tmp_path / "l_4.jpg").write_bytes(data)
    odd = scan(find_images(data_dir=str(tmp_path), validation_fraction=0.4)).odd
    assert odd["png_1.jpg"] == "PNG named .jpg" and odd["p_1.png"] == "mode P, transparency"
    assert odd["l_2.jpg"] == "Exif orientation 6" and odd["l_3.png"] == "1 x 50 pixels"
    assert odd["l_4.jpg"] == "a damaged JPEG, but complete" and odd["cmyk_2.jpg"] == "mode CMYK"
    assert not {"bmp_1.BMP", "tiff_1.tiff", "webp_1.webp"} & odd.keys()


def test_check_data_looks_at_the_split_that_training_uses(tmp_path):
    from image_classification import Settings

    data, report = make_pets(tmp_path / "data", count=20), tmp_path / "report.json"
    command = ["examples/resnet50_pets/check_data.py", "--data_dir", str(data), "--json", str(report)]
    assert run_script(*command) == 0
    for changed in ({}, {"seed": 3}, {"validation_fraction": 0.3}):
        assert run_script(*command, *[f"--{name}={value}" for name, value in changed.items()]) == 0
        settings = Settings(data_dir=str(data), **changed)
        splits = find_images(data_dir=str(data), validation_fraction=settings.validation_fraction, seed=settings.seed)
        assert json.loads(report.read_text("utf-8"))["source"] == splits.source


def test_check_data_answers_0_1_or_2(tmp_path, capsys):
    check = "examples/resnet50_pets/check_data.py"
    data = make_pets(tmp_path / "data")
    assert run_script(check, "--data_dir", str(data), "--json", str(tmp_path / "out" / "report.json")) == 0
    result = json.loads((tmp_path / "out" / "report.json").read_text())
    assert result["classes"]["Abyssinian"] == {"train": 5, "validation": 1, "test": 0} and result["bad"] == {}
    bad = spoil(data)
    capsys.readouterr()
    assert run_script(check, "--data_dir", str(data)) == 1
    printed = capsys.readouterr().out
    assert "bad, cannot be used: 3" in printed and all(str(data / name) in printed for name in bad)
    for folder in (tmp_path / "nowhere", ""):
        assert run_script(check, "--data_dir", str(folder)) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_demo_images_are_the_same_for_a_seed_and_differ_between_seeds(tmp_path):
    write_images = runpy.run_path(str(ROOT / "examples/demo_images/make_images.py"))["write_images"]
    digests = []
    for seed, folder in ((0, "one"), (0, "two"), (1, "three")):
        write_images(tmp_path / folder, seed, {"train": 4, "test": 2})
        files = sorted((tmp_path / folder).rglob("*.jpg"))
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
        assert len(set(digests[-1])) == 24
    assert digests[0] == digests[1] and not set(digests[0]) & set(digests[2])
    splits = find_images(data_dir=str(tmp_path / "one"))
    assert splits.label_names == ("bear", "cat", "dog", "rabbit") and splits.source["rows"]["test"] == 8
    assert not scan(splits).bad and not scan(splits).odd and not scan(splits).duplicates


def test_the_benchmark_measures_the_pipelines_in_one_run(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TEMPLATES_DATA", raising=False)
    threads = torch.get_num_threads()
    assert (
        run_script("examples/resnet50_pets/bench_images.py", "--rounds", "1", "--json", str(tmp_path / "b.json")) == 0
    )
    torch.set_num_threads(threads)
    result = json.loads((tmp_path / "b.json").read_text())
    assert set(result["rounds"]) == {"plain", "decode", "jpeg", "cache"} and "made JPEGs" in result["origin"]
    (plain,), (cache,) = result["rounds"]["plain"], result["rounds"]["cache"]
    assert result["ratio_to_plain"]["cache"] == cache / plain > 0
    assert "made JPEGs" in capsys.readouterr().out


def test_the_odd_files_of_the_real_pets_are_used(real_data, tmp_path):
    pets = real_data / "pets"
    files = sorted((pets / "odd").glob("*.jpg"))
    assert len(files) == 10
    for file in files:
        picture = ImageOps.exif_transpose(Image.open(file)).convert("RGBA")
        seen = np.asarray(picture)[..., 3:] == 255  # what lies under full transparency is not to be seen
        assert np.array_equal(decode(file).permute(1, 2, 0).numpy() * seen, np.asarray(picture)[..., :3] * seen), file
        (tmp_path / file.name).write_bytes(file.read_bytes())
    make_pets(tmp_path, ("Abyssinian", "Bengal"), count=4)
    (tmp_path / "Abyssinian_100.mat").write_bytes((pets / "odd" / "Abyssinian_100.mat.head128").read_bytes())
    for name in ("american_bulldog_1", "miniature_pinscher_1", "Egyptian_Mau_1"):
        photo().save(tmp_path / f"{name}.jpg")
    splits = find_images(data_dir=str(tmp_path))
    report = scan(splits)
    assert not report.bad and splits.notes[0].endswith(": .mat (1)")
    assert report.odd == {
        "Abyssinian_34.jpg": "GIF named .jpg, mode P",
        "Abyssinian_5.jpg": "PNG named .jpg, mode RGBA",
    }
    dataset = ImageDataset(sorted(splits), 32, **TRAINING)
    assert all(dataset[i]["image"].shape == (3, 32, 32) for i in range(len(dataset)))


def test_the_real_pets_are_clean_and_split_as_published(real_data):
    splits = find_images(data_dir=str(real_data / "pets"))
    assert splits.source["rows"] == {"train": 628, "validation": 64, "test": 335} and len(splits.label_names) == 37
    report = scan(splits)
    assert report.num_images == 1027 and not report.bad and not report.duplicates
