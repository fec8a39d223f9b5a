"""Keep checked splits as Arrow files, so that a second start neither reads nor checks the same data again.

They lie in HF_DATASETS_CACHE/text_splits: each split in a folder named by its content, where `map` caches too, and
for each way of reading a note of the files it was read from. A file counts as unchanged while its size, inode and
times of change (mtime and ctime, in nanoseconds) are the same. Two changes within one tick of the file system's clock
could share their times: files that changed less than two seconds before they were read are read again next time.
This relies on ctime, which no program sets, and on clocks of computer and file server less than two seconds apart.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kit.errors import MachineError

if TYPE_CHECKING:
    import datasets

TICK = 2_000_000_000  # nanoseconds: the coarsest clock of a file system (FAT)
DATA = "data.arrow"


def cache_folder() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "text_splits"


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Make a folder for files that are not complete yet; it is gone afterwards."""
    work = cache_folder() / f"work.{uuid.uuid4().hex}"
    try:
        with _one_line(work.parent):
            work.mkdir(parents=True)
        with _one_line(work.parent, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _one_line(folder: Path, *numbers: int):
    """Turn what the machine refuses (with these error numbers, if any are given) into one line."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MachineError) or (numbers and error.errno not in numbers):
            raise
        cure = "free some space there, or set HF_HOME to a folder that you may write to"
        raise MachineError(f"{folder}: {error.strerror or error}: {cure}") from error


def keep(file: Path, name: str) -> None:
    """Move a complete split into the folder `name` of its content."""
    folder, complete = cache_folder() / name, file.with_name(name)
    if not folder.exists():
        complete.mkdir()
        file.rename(complete / DATA)
        with contextlib.suppress(OSError):  # another process was quicker
            complete.rename(folder)


def open_split(name: str) -> "datasets.Dataset":
    """Return the split in the folder `name`, mapped into memory."""
    import datasets

    return datasets.Dataset.from_file(str(cache_folder() / name / DATA))


class Reading:
    """One way to read some files (or hub splits): recalls what came of it, as long as nothing has changed."""

    def __init__(self, options: dict, files: list[Path], fingerprints: dict[str, str]):
        code = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("table*.py"))]  # edited: read anew
        paths = [str(path.absolute()) for path in files]
        key = hashlib.sha256(b"\0".join([*code, json.dumps([options, paths], sort_keys=True).encode()])).hexdigest()
        self.note = cache_folder() / f"{key[:32]}.json"
        self.marks = dict(fingerprints)
        now, changed = time.time_ns(), 0
        for path in files:
            stat = path.stat()
            self.marks[str(path.absolute())] = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
            changed = max(changed, stat.st_mtime_ns, stat.st_ctime_ns)
        self.is_settled = now - changed > TICK

    def recall(self) -> dict | None:
        """Return what `remember` was given for the same files, None if anything has changed."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            known = json.loads(self.note.read_text("utf-8"))
            there = all((cache_folder() / name / DATA).is_file() for name in known["result"]["splits"].values())
            if known["marks"] == self.marks and there:
                return known["result"]
        return None

    def remember(self, result: dict, work: Path) -> None:
        """Keep `result` (JSON, with the folder of each split under "splits") for the next start."""
        if self.is_settled:
            new = work / self.note.name
            new.write_text(json.dumps({"marks": self.marks, "result": result}), "utf-8")
            os.replace(new, self.note)
