"""The rules of the house that can be read off the source: each looks at every file, and at some."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from conftest import REPOSITORY, TEMPLATES

KIT = sorted((TEMPLATES / "kit").glob("*.py"))
LOOPS = sorted(TEMPLATES.glob("*.py"))
METHODS = sorted((REPOSITORY / "examples" / "parallelism").glob("*.py"))


def calls_of(path):
    """Yield each call as 'name' or '....attribute', with its node."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_the_kit_never_trains():
    assert len(KIT) > 8
    for path in KIT:
        for name, _ in calls_of(path):
            assert not name.endswith((".backward", ".train")), f"{path.name}: {name}"
            assert not (name.endswith(".step") and "optimizer" in name), f"{path.name}: {name}"


def test_nothing_that_needs_all_processes_stands_under_a_guard_of_one():
    collective = (".wait_for_everyone", ".gather", ".reduce", ".save_state", ".barrier", "on_main", ".settle", ".poll")
    seen = 0
    for path in [*LOOPS, *KIT]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.If) and "is_main" in ast.unparse(node.test):
                seen += 1
                inside = [ast.unparse(c.func) for part in node.body for c in ast.walk(part) if isinstance(c, ast.Call)]
                assert not [name for name in inside if name.endswith(collective)], f"{path.name}:{node.lineno}"
    assert seen > 5


@pytest.mark.parametrize("path", [*LOOPS, *KIT, *METHODS], ids=lambda path: path.name)
def test_no_device_is_taken_for_granted(path):
    text = path.read_text("utf-8")
    assert ".cuda(" not in text
    assert "cuda.amp" not in text
    assert 'backend="nccl"' not in text
    if path.parent != TEMPLATES / "kit":
        return
    for number, line in enumerate(text.splitlines(), 1):
        if "torch.cuda." in line:
            before = "\n".join(text.splitlines()[max(0, number - 8) : number])
            assert "is_available" in before or '== "cuda"' in before or "is_initialized" in before, f"{number}: {line}"


def test_nothing_loaded_can_run_code():
    for path in [*LOOPS, *KIT]:
        for name, node in calls_of(path):
            assert name not in ("eval", "exec", "pickle.load", "pickle.loads", "yaml.load"), f"{path.name}: {name}"
            assert not name.endswith("torch.load"), f"{path.name}: {name}"
            assert "trust_remote_code" not in [keyword.arg for keyword in node.keywords], path.name


def test_workers_get_functions_that_every_start_method_can_send():
    for path in LOOPS:
        for name, node in calls_of(path):
            if name in ("build_loader", "DataLoader"):
                assert not [part for part in ast.walk(node) if isinstance(part, ast.Lambda)], path.name


def committed_files(*suffixes: str) -> list[Path]:
    """Return the committed files with these suffixes."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [REPOSITORY / name for name in listed.stdout.splitlines()]
    assert len(paths) > 30
    return [path for path in paths if path.suffix in suffixes and path.is_file()]


def test_committed_files_name_no_path_of_one_machine():
    words = ["/wo" + "rk/", "/ro" + "ot/", "/fa" + "rm/", "pypi" + ".org"]
    for path in committed_files(".py", ".md", ".yaml", ".yml", ".toml", ".jinja", ""):
        text = path.read_text("utf-8")
        assert not [word for word in words if word in text], path


def targets_of(makefile) -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", makefile.read_text("utf-8"), re.MULTILINE))


def test_every_make_target_that_a_text_names_is_there():
    """What travels into projects names only what is there too."""
    here, there = targets_of(REPOSITORY / "Makefile"), targets_of(TEMPLATES / "_project" / "Makefile.jinja")
    named = 0
    for path in committed_files(".md", ".py", ".yaml", ".yml", ".jinja"):
        if path.is_symlink() or path.parent.name == "tests":
            continue
        is_travelling = TEMPLATES in path.parents
        for name in re.findall(r"(?:^|`|[;#(] +)make ([a-z][a-z0-9-]+)\b(?!\.)", path.read_text("utf-8"), re.MULTILINE):
            assert name in (there if is_travelling else here | there), f"{path}: make {name}"
            named += 1
    assert named > 30
