"""Checkpoints: save, verify, choose, restore, prune.

A checkpoint is a folder `step_00000120` with safetensors for tensors, JSON for everything else, and a manifest
(names, sizes, sha256) written last; it is written under a temporary name, synced and renamed. Nothing in it is a
pickle, so loading one cannot run code.
"""

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from kit.errors import WRITER, MachineError, UserError

MANIFEST = "manifest.json"
TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory of everything that a step leaves behind."""

    step: int
    tensors: dict[str, dict[str, torch.Tensor]]  # file stem -> name -> tensor
    documents: dict[str, dict]  # file stem -> JSON


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def snapshot(step: int, state: dict, documents: dict, spent: Snapshot | None = None) -> Snapshot:
    """Copy the states of unwrapped modules, optimizers, schedules ... (by name) to host memory.

    Tensors of a module that share memory (tied weights) are kept once; the other names are noted beside them.
    The memory of a `spent` snapshot is used again where it fits: fresh memory makes the copy several times slower.
    """
    live, documents = {}, dict(documents)
    for name, part in state.items():
        if isinstance(part, torch.nn.Module):
            live[name], documents[f"{name}_aliases"] = _without_aliases(clean_keys(part.state_dict()))
        else:
            found, documents[name] = _split_tensors(part.state_dict())
            live |= {name: found} if found else {}
    tensors = {
        stem: {name: _copy(tensor, spent and spent.tensors.get(stem, {}).get(name)) for name, tensor in part.items()}
        for stem, part in live.items()
    }
    return Snapshot(step, tensors, json.loads(json.dumps(documents)))


def clean_keys(state: dict) -> dict:
    """Return a state dict without the prefixes that torch.compile puts into names, also in mid-name."""
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def _without_aliases(state: dict) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    kept, aliases, owner = {}, {}, {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in owner:
            aliases[name] = owner[place]
        else:
            owner[place] = name
            kept[name] = tensor
    return kept, aliases


def _copy(tensor: torch.Tensor, spent: torch.Tensor | None) -> torch.Tensor:
    """Return a contiguous copy on the CPU, in the memory of a tensor that nobody needs any more where that fits."""
    if spent is not None and spent.shape == tensor.shape and spent.dtype == tensor.dtype:
        return spent.copy_(tensor.detach())
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _split_tensors(value, path: str = "") -> tuple[dict[str, torch.Tensor], object]:
    """Split a nested state into its tensors, by path, and the rest, where a tensor is noted as {"tensor": path}."""
    if isinstance(value, torch.Tensor):
        return {path: value}, {"tensor": path}
    if isinstance(value, dict):
        parts = {key: _split_tensors(part, f"{path}/{key}") for key, part in value.items()}
        rest = {"items": [[key, part[1]] for key, part in parts.items()]}  # JSON would turn number keys into text
        return {name: tensor for part in parts.values() for name, tensor in part[0].items()}, rest
    if isinstance(value, list | tuple):
        parts = [_split_tensors(part, f"{path}/{place}") for place, part in enumerate(value)]
        return {name: tensor for part in parts for name, tensor in part[0].items()}, [part[1] for part in parts]
    return {}, value


def _join_tensors(rest, tensors: dict[str, torch.Tensor]):
    if isinstance(rest, list):
        return [_join_tensors(part, tensors) for part in rest]
    if isinstance(rest, dict) and "tensor" in rest:
        return tensors[rest["tensor"]]
    if isinstance(rest, dict):
        return {key: _join_tensors(part, tensors) for key, part in rest["items"]}
    return rest


class CheckpointWriter:
    """Writes checkpoints into `folder` in the background, at most one at a time; only process 0 should save.

    After each, the oldest are pruned so that `total_limit` are left (None: all), never the newest nor the best.
    `stalls` holds, for each, the seconds for which the training loop stood still. The copy in host memory is kept from
    one save to the next.
    """

    def __init__(self, folder: Path, total_limit: int | None = None):
        self.folder, self.total_limit = folder, total_limit
        self.stalls: list[float] = []
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None

    def save(self, step: int, state: dict, documents: dict, best_step: int | None) -> None:
        """Copy `state` (as for `snapshot`) to host memory and start to write it.

        Waits first for the one before, and raises what went wrong with it.
        """
        began = time.perf_counter()
        self.finish()
        snap = self._snapshot = snapshot(step, state, documents, spent=self._snapshot)
        self._thread = threading.Thread(target=self._run, args=(snap, best_step), name=WRITER)
        self._thread.start()
        self.stalls.append(time.perf_counter() - began)

    def finish(self) -> None:
        """Wait until everything is on disk. Raises `MachineError` with path and cause if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, snap: Snapshot, best_step: int | None) -> None:
        try:
            write(self.folder, snap)
            prune(self.folder, self.total_limit, keep={snap.step, best_step})
        except BaseException as error:  # handed to the training thread by finish()
            self._error = error


def write(folder: Path, snap: Snapshot) -> Path:
    """Write a snapshot as `folder/step_...` and return that path; it is complete or it is not there."""
    final = folder / folder_name(snap.step)
    temporary = final.with_name(final.name + TEMPORARY)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = {}
        for stem, tensors in snap.tensors.items():
            name = f"{stem}.safetensors"
            files[name] = save_file(tensors, temporary / name)
        for stem, document in snap.documents.items():
            name = f"{stem}.json"
            files[name] = _write_hashed(temporary / name, [json.dumps(document).encode()])
        manifest = json.dumps({"step": snap.step, "files": files}, indent=1)
        _write_hashed(temporary / MANIFEST, [manifest.encode()])
        _sync_folder(temporary)
        shutil.rmtree(final, ignore_errors=True)  # a torn one of this step: a complete one is never written again
        os.replace(temporary, final)
        _sync_folder(folder)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        cause = getattr(error, "strerror", None) or str(error)
        raise MachineError(f"could not write {final}: {cause}; the checkpoints before it are untouched") from error
    return final


def _write_hashed(path: Path, parts: Iterable) -> dict:
    """Write bytes-like parts to a file and sync it; return its size and sha256, taken from memory on the way."""
    digest, size = hashlib.sha256(), 0
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            digest.update(rest)
            size += len(rest)
            while len(rest):  # Linux writes at most 2 GiB at a time
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def save_file(tensors: dict[str, torch.Tensor], path: Path) -> dict:
    """Write contiguous tensors on the CPU as a safetensors file and sync it; return its size and sha256.

    `safetensors.torch.save_file` writes the same, in six times the CPU time and without a hash.
    The format: https://github.com/huggingface/safetensors#format
    """
    assert sys.byteorder == "little"
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # aligned
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    memory = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values())
    return _write_hashed(path, [len(text).to_bytes(8, "little"), text, *memory])


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return what safetensors calls a type of numbers."""
    data = save({"": torch.empty(0, dtype=dtype)})
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[""]["dtype"]


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        if hasattr(hashlib, "file_digest"):  # Python 3.11
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def prune(folder: Path, total_limit: int | None, keep: set) -> None:
    """Delete the oldest checkpoints by step number until `total_limit` are left; those in `keep` always stay."""
    if total_limit is None:
        return
    steps = sorted(step for step in map(step_of, folder.iterdir()) if step is not None)
    spare = [step for step in steps if step not in keep]
    for step in spare[: max(0, len(steps) - total_limit)]:
        # The manifest goes first: a half-deleted checkpoint must never look complete.
        (folder / folder_name(step) / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder / folder_name(step))


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint folder by its name; None for anything else that lies there."""
    digits = path.name.removeprefix("step_")
    is_checkpoint = path.is_dir() and path.name.startswith("step_") and digits.isdecimal() and len(digits) >= 8
    return int(digits) if is_checkpoint else None


def fault_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None when every file is as its manifest says."""
    try:
        files = json.loads((path / MANIFEST).read_text("utf-8"))["files"]
        for name, expected in files.items():
            file = path / name
            if Path(name).name != name:
                return f"manifest names a file outside the folder: {name}"
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["size"]:
                return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
            if _sha256(file) != expected["sha256"]:
                return f"{name} is damaged (its sha256 differs from the manifest)"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is unreadable"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return None


def choose(folder: Path, resume_from_checkpoint: str) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to go on from (None: start anew) and notes on those that were passed over.

    `resume_from_checkpoint` is 'auto' (the newest complete one in `folder`), 'none', or the path of one checkpoint or
    of a folder of them. Raises `UserError` when a path does not hold a complete one, or when all in `folder` are torn.
    """
    if resume_from_checkpoint == "none":
        return None, []
    is_auto = resume_from_checkpoint == "auto"
    place = folder if is_auto else Path(resume_from_checkpoint)
    if not is_auto and not place.is_dir():
        raise UserError(f"resume_from_checkpoint: there is no folder {place}; give a checkpoint, a run, auto or none")
    if step_of(place) is not None or (place / MANIFEST).exists():
        candidates = [place]
    else:  # a run directory is as good as its checkpoints folder
        candidates = _remnants(place) or _remnants(place / "checkpoints")
    notes = []
    for path in candidates:
        fault = "left over from an interrupted save" if path.name.endswith(TEMPORARY) else fault_of(path)
        if fault is None:
            return path, notes
        notes.append(f"checkpoint {path} is passed over: {fault}")
    if is_auto and all(path.name.endswith(TEMPORARY) for path in candidates):
        return None, notes  # nothing was ever complete, so no checkpoint was lost
    raise UserError(
        f"no complete checkpoint in {place} ({'; '.join(notes) or 'it holds none'}): to start anew use"
        " --resume_from_checkpoint none with another --output_dir, or --overwrite_output_dir true"
    )


def adopt(path: Path, folder: Path, best_step: int | None) -> Path:
    """Return a chosen checkpoint as one of `folder`: one of elsewhere is copied there, with the best one beside it."""
    if path.parent.resolve() == folder.resolve():
        return path
    step = json.loads((path / MANIFEST).read_text("utf-8"))["step"]
    sources = {best_step: path.with_name(folder_name(best_step))} if best_step is not None else {}
    for number, source in {**sources, step: path}.items():  # the chosen one last: when it is here, all is
        if source == path or fault_of(source) is None:  # `choose` has looked at the chosen one
            final = folder / folder_name(number)
            temporary = final.with_name(final.name + TEMPORARY)
            shutil.copytree(source, temporary, dirs_exist_ok=True)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
    return folder / folder_name(step)


def _remnants(folder: Path) -> list[Path]:
    """Return what saves have left in a folder, complete or not, the newest first."""
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else [])
        if step_of(path) is not None or (path.name.startswith("step_") and path.name.endswith(TEMPORARY))
    ]
    return sorted(found, key=lambda path: (len(path.stem), path.name), reverse=True)  # by number


def read_document(path: Path, name: str) -> dict:
    """Return one of the JSON documents of a checkpoint."""
    return json.loads((path / f"{name}.json").read_text("utf-8"))


def restore(path: Path, state: dict) -> None:
    """Load a checkpoint into the parts that `snapshot` copied; strict in every key."""
    for name, part in state.items():
        if isinstance(part, torch.nn.Module):
            load_module(path, name, part)
        else:
            part.load_state_dict(_join_tensors(read_document(path, name), _read_tensors(path, name)))


def load_module(path: Path, name: str, module: torch.nn.Module) -> None:
    """Load one module of a checkpoint; strict in every key, tied weights stay tied."""
    state = _read_tensors(path, name)
    state |= {alias: state[owner] for alias, owner in read_document(path, f"{name}_aliases").items()}
    spelled = {key.replace("_orig_mod.", ""): key for key in module.state_dict()}
    module.load_state_dict({spelled.get(key, key): value for key, value in state.items()}, strict=True)


def _read_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    if not (path / f"{name}.safetensors").exists():  # a part without tensors, such as a schedule
        return {}
    with safe_open(path / f"{name}.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
