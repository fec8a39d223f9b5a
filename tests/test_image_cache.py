"""kit/image_cache.py: the cache is made once, never stale, and shows the same pictures."""

import ctypes
import errno
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from kit import image_cache
from kit.errors import MachineError, UserError
from kit.image_cache import open_cache
from kit.image_files import EncodedImage
from kit.image_sources import find_images
from kit.images import ImageDataset
from photos import TRAINING, make_pets, photo, seen


@pytest.fixture
def pets(tmp_path):
    return find_images(data_dir=str(make_pets(tmp_path / "data")))


def count_decoding(monkeypatch) -> list[str]:
    decoded, pixels_of = [], EncodedImage.pixels
    monkeypatch.setattr(
        EncodedImage, "pixels", lambda self, shrink=1: decoded.append(self.name) or pixels_of(self, shrink)
    )
    return decoded


def test_the_cache_shows_the_same_crops(tmp_path):
    for number in range(4):
        for label in "ab":
            photo(500 + 50 * number, 400, seed=number).save(tmp_path / f"{label}_{number}.jpg", quality=95)
    splits = find_images(data_dir=str(tmp_path))
    items = sorted(splits)
    for size, tolerance in ((300, 0), (128, 2)):  # 300: the short side, 400 pixels, is below 450, and all is kept
        cache = open_cache(splits, str(tmp_path / "cache"), size, max_gb=1)
        assert min(cache["a_0.jpg"].kept.shape[:2]) == min(400, size * 3 // 2)
        assert (cache["a_0.jpg"].height, cache["a_0.jpg"].width) == (400, 500)
        for training in ({}, TRAINING):
            plain, cached = (ImageDataset(items, size, **training, cache=kept) for kept in (None, cache))
            for index in range(len(items)):
                one, other = (seen(dataset, index, epoch=1)["image"].int() for dataset in (plain, cached))
                assert (one - other).abs().float().mean() <= tolerance


def test_the_cache_is_made_once_and_never_stale(tmp_path, pets, monkeypatch):
    decoded = count_decoding(monkeypatch)
    folder = str(tmp_path / "cache")
    first = open_cache(pets, folder, 16, max_gb=1)
    assert len(decoded) == 12
    path = Path(pets.train[0].place)
    os.utime(path)  # another time, the same bytes
    assert open_cache(pets, folder, 16, max_gb=1).folder == first.folder and len(decoded) == 12
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-20] ^= 1  # the same size and time, other bytes
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    second = open_cache(pets, folder, 16, max_gb=1)
    assert second.folder != first.folder and len(decoded) == 24
    larger = open_cache(pets, folder, 32, max_gb=1)
    assert larger.folder not in (first.folder, second.folder), "the size is not in the key"
    monkeypatch.setattr(image_cache, "FORMAT", 2)
    assert open_cache(pets, folder, 16, max_gb=1).folder != second.folder, "the format is not in the key"


@pytest.mark.parametrize("torn", ["cut pixels", "no pixels", "no index", "half an index", "another index"])
def test_a_torn_cache_is_said_and_made_again(tmp_path, pets, torn, capsys):
    folder = Path(open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1).folder)
    whole = (folder / "pixels.bin").read_bytes()
    index = (folder / "index.json").read_text()
    if torn.endswith("pixels"):
        (folder / "pixels.bin").unlink()
    if torn == "cut pixels":
        (folder / "pixels.bin").write_bytes(whole[:-1])
    if torn.endswith("index"):
        text = {"no index": None, "half an index": index[:50], "another index": "[1]"}[torn]
        (folder / "index.json").unlink()
        if text is not None:
            (folder / "index.json").write_text(text)
    again = open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)
    assert again.folder == str(folder) and (folder / "pixels.bin").read_bytes() == whole
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{folder} is torn" in said


def test_what_a_killed_builder_left_is_no_cache(tmp_path, pets, monkeypatch):
    monkeypatch.setattr(image_cache, "_shrunk", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)
    assert not list((tmp_path / "cache").glob("*/pixels.bin")), "an unfinished cache has a name"
    monkeypatch.undo()
    folder = Path(open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1).folder)
    work = folder.rename(folder.with_suffix(".partial"))  # as SIGKILL leaves it
    (work / "index.json").unlink()
    cache = open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)
    assert cache[pets.train[0].name].pixels().shape == (24, 36, 3) and not work.exists()


def test_a_cache_that_does_not_fit_is_refused_before_it_is_made(tmp_path, pets, monkeypatch):
    folder = tmp_path / "cache"
    with pytest.raises(UserError, match="more than the limit of 1e-09 GB"):
        open_cache(pets, str(folder), 16, max_gb=1e-9)
    usage = image_cache.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(image_cache.shutil, "disk_usage", lambda _: usage._replace(free=10))
        with pytest.raises(UserError, match=r"0.00 GB free: choose another"):
            open_cache(pets, str(folder), 16, max_gb=1)
    assert not list(folder.glob("*/pixels.bin"))
    needed = Path(open_cache(pets, str(folder), 16, max_gb=1).folder, "pixels.bin").stat().st_size / 1e9
    with pytest.raises(UserError, match=r"others in .* take 0.00 GB: delete"):
        open_cache(pets, str(folder), 20, max_gb=needed * 2)


@pytest.mark.parametrize("refusal", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")])
def test_a_file_system_without_locks_is_one_line(tmp_path, pets, monkeypatch, refusal):
    import filelock

    monkeypatch.setattr(filelock.FileLock, "acquire", lambda self: (_ for _ in ()).throw(refusal))
    with pytest.raises(
        MachineError, match=r"cannot be written or locked \((No locks available|no flock)\): set HF_HOME"
    ):
        open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)


def test_a_cache_of_a_bad_image_is_refused_with_its_path(tmp_path, pets):
    path = Path(pets.train[0].place)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=rf"{path}: .*truncated"):
        open_cache(pets, str(tmp_path / "cache"), 16, max_gb=1)


def _build_and_count(splits, folder, decoded):
    pixels_of = EncodedImage.pixels

    def counted(self, shrink=1):
        with decoded.get_lock():
            decoded.value += 1
        return pixels_of(self, shrink)

    EncodedImage.pixels = counted
    torch.set_num_threads(1)
    open_cache(splits, folder, 16, max_gb=1, num_workers=1)


def test_one_process_makes_the_cache_while_others_wait(tmp_path, pets):
    context = multiprocessing.get_context("fork")
    decoded = context.Value(ctypes.c_int, 0)
    processes = [context.Process(target=_build_and_count, args=(pets, str(tmp_path / "c"), decoded)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert decoded.value == 12
