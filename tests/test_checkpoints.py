"""Checkpoints: complete or not there, verified before use, never a way to run code."""

import json
import os
import pickle
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from kit import checkpoints
from kit.checkpoints import CheckpointWriter, choose, fault_of, folder_name, prune, restore, snapshot, write
from kit.errors import MachineError, UserError
from worlds import World, lines, numbers, run, same_weights


class Tied(torch.nn.Module):
    """An embedding that shares its weight with the head."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


def trained(steps: int = 3):
    """Return state that has been trained a little: module, optimizer, schedule."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    train(model, optimizer, schedule, steps)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(model, optimizer, schedule, steps: int) -> None:
    for _ in range(steps):
        model(torch.arange(7)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def save(folder, step: int, state=None):
    return write(folder, snapshot(step, state or trained(), {"progress": {"step": step}}))


def test_everything_comes_back_and_goes_on_the_same(tmp_path):
    state, other = trained(), trained(steps=0)
    restore(save(tmp_path, 3, state), other)
    for parts in (state, other):
        train(parts["model"], parts["optimizer"], parts["schedule"], 4)
    for name, value in state["model"].state_dict().items():
        assert torch.equal(value, other["model"].state_dict()[name]), name
    assert state["optimizer"].param_groups[0]["lr"] == other["optimizer"].param_groups[0]["lr"]


def test_tied_weights_stay_tied(tmp_path):
    other = trained(steps=0)
    path = save(tmp_path, 3)
    restore(path, other)
    model = other["model"]
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert json.loads((path / "model_aliases.json").read_text()) == {"head.weight": "embedding.weight"}


def test_tensors_of_every_kind_are_written_as_safetensors_reads_them(tmp_path):
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16]
    tensors = {f"ünïcode {kind}": torch.arange(7).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "matrix": torch.arange(6.0).view(2, 3)}
    path = write(tmp_path, checkpoints.Snapshot(1, {"all": tensors}, {}))
    found = load_file(path / "all.safetensors")
    data = (path / "all.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, place in json.loads(data[8 : 8 + size]).items():
        assert (8 + size + place["data_offsets"][0]) % tensors[name].element_size() == 0, f"{name} is not aligned"
    assert fault_of(path) is None
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert bytes(found[name].reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8)), name


def test_the_copy_in_host_memory_is_used_again_and_holds_the_new_values(tmp_path):
    state, writer = trained(), CheckpointWriter(tmp_path)
    places = []
    for step in (3, 4):
        writer.save(step, state, {}, None)
        writer.finish()
        copies = writer._snapshot.tensors
        places.append({name: copy.data_ptr() for stem in ("model", "optimizer") for name, copy in copies[stem].items()})
        before = {name: value.clone() for name, value in state["model"].state_dict().items()}
        train(state["model"], state["optimizer"], state["schedule"], 1)
    assert places[0] == places[1] and len(places[0]) > 10
    other = trained(steps=0)
    restore(tmp_path / folder_name(4), other)
    assert all(torch.equal(value, before[name]) for name, value in other["model"].state_dict().items())
    with torch.no_grad():
        state["model"].norm = torch.nn.BatchNorm1d(5)  # another shape: fresh memory
    assert snapshot(5, state, {}, writer._snapshot).tensors["model"]["norm.weight"].shape == (5,)


def missing_file(path):
    (path / "optimizer.safetensors").unlink()


def truncated(path):
    os.truncate(path / "model.safetensors", 100)


def flipped_byte(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def zero_bytes(path):
    os.truncate(path / "model.safetensors", 0)


def no_manifest(path):
    (path / "manifest.json").unlink()


def half_manifest(path):
    os.truncate(path / "manifest.json", 40)


def empty_folder(path):
    shutil.rmtree(path)
    path.mkdir()


def foreign_manifest(path):
    (path / "manifest.json").write_text(json.dumps({"files": {"../../secret": {"size": 1, "sha256": ""}}}))


TORN = [missing_file, truncated, flipped_byte, zero_bytes, no_manifest, half_manifest, empty_folder, foreign_manifest]


@pytest.mark.parametrize("tear", TORN)
def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(tear, tmp_path):
    good, torn = save(tmp_path, 9), save(tmp_path, 10)
    (tmp_path / "step_00000011.tmp").mkdir()
    (tmp_path / "notes.txt").write_text("something else")
    (tmp_path / "step_of_a_dance").mkdir()
    tear(torn)
    chosen, notes = choose(tmp_path, "auto")
    assert chosen == good
    assert [note.split(" is passed over")[0] for note in notes] == [
        f"checkpoint {tmp_path / 'step_00000011.tmp'}",
        f"checkpoint {torn}",
    ]


def test_when_all_are_torn_it_is_said_and_nothing_starts_anew(tmp_path):
    for step in (1, 2):
        zero_bytes(save(tmp_path, step))
    with pytest.raises(UserError, match=r"no complete checkpoint.*0 bytes.*--overwrite_output_dir true"):
        choose(tmp_path, "auto")


def test_a_path_that_holds_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        choose(tmp_path, str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="it holds none"):
        choose(tmp_path, str(tmp_path))
    save(tmp_path / "checkpoints", 5)
    for place in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step_00000005"):
        assert choose(tmp_path / "elsewhere", str(place))[0].name == "step_00000005"


@pytest.mark.parametrize(
    ("limit", "best", "left"), [(2, None, [10, 100]), (1, None, [100]), (2, 8, [8, 100]), (1, 8, [8, 100])]
)
def test_the_limit_counts_by_number_and_keeps_the_newest_and_the_best(limit, best, left, tmp_path):
    state = trained()
    for step in (8, 9, 10, 100):
        save(tmp_path, step, state)
    os.utime(tmp_path / folder_name(8))  # the newest by its time
    prune(tmp_path, limit, keep={100, best})
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == left


class Hostile:
    def __reduce__(self):
        return (os.system, (f"touch {os.environ['HOSTILE_MARK']}",))


def test_no_file_of_a_checkpoint_can_run_code(tmp_path, monkeypatch):
    mark = tmp_path / "code_ran"
    monkeypatch.setenv("HOSTILE_MARK", str(mark))
    path = save(tmp_path / "checkpoints", 3)
    names = sorted(file.name for file in path.iterdir() if file.name != "manifest.json")
    assert len(names) >= 5
    for name in names:
        victim = tmp_path / "victim"
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(path, victim)
        data = pickle.dumps(Hostile())
        (victim / name).write_bytes(data)
        manifest = json.loads((victim / "manifest.json").read_text())
        manifest["files"][name] = {"size": len(data), "sha256": checkpoints._sha256(victim / name)}
        (victim / "manifest.json").write_text(json.dumps(manifest))
        assert fault_of(victim) is None, "the attacker writes a good manifest"
        failed = False
        try:
            restore(victim, trained(steps=0))
            checkpoints.read_document(victim, "progress")
        except Exception:
            failed = True
        assert failed, name
    pickle.loads(pickle.dumps(Hostile()))  # the attack itself works
    deadline = time.monotonic() + 5
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mark.exists()
    mark.unlink()


def test_saving_goes_on_in_the_background_one_at_a_time(tmp_path, monkeypatch):
    may_write, original, threads = threading.Event(), checkpoints.write, []

    def slow_write(folder, snap):
        threads.append(threading.current_thread().name)
        assert may_write.wait(30)
        return original(folder, snap)

    monkeypatch.setattr(checkpoints, "write", slow_write)
    state, writer = trained(), CheckpointWriter(tmp_path)
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    writer.save(3, state, {"progress": {}}, None)
    train(state["model"], state["optimizer"], state["schedule"], 1)
    assert not list(tmp_path.iterdir()), "it returned before anything was written"
    may_write.set()
    writer.save(4, state, {"progress": {}}, None)
    assert fault_of(tmp_path / folder_name(3)) is None, "the second save waited for the first"
    writer.finish()
    assert threads == ["checkpoint", "checkpoint"]
    saved = checkpoints._read_tensors(tmp_path / folder_name(3), "model")
    assert all(torch.equal(before[name], value) for name, value in saved.items()), "the copy is of the moment of saving"
    assert len(writer.stalls) == 2


def test_what_goes_wrong_in_the_background_is_raised_with_path_and_cause(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    writer = CheckpointWriter(tmp_path / "checkpoints")
    writer.save(3, trained(), {"progress": {}}, None)
    with pytest.raises(MachineError, match=r"could not write .*step_00000003: Not a directory"):
        writer.finish()


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_half_folder(tiny_settings, tmp_path):
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "checkpointing_steps": 2, "eval_steps": 10}
    world = World(1, settings, patches=["faults:full_disk"])
    assert world.wait() == [1], world.output()
    last_line = world.output().strip().splitlines()[-1]
    assert last_line.startswith(f"error: could not write {tmp_path / 'run' / 'checkpoints' / 'step_00000004'}: ")
    assert "File too large" in last_line
    assert "Traceback" not in world.output()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "failed"
    assert "could not write" in facts["cause"]
    run(1, settings)
    run(1, settings | {"output_dir": str(tmp_path / "whole")})
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final")
    assert lines(tmp_path / "run", "test_loss")
