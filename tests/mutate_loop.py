"""Delete each line of a template's loop in turn, and see whether a test that travels with it fails.

    python tests/mutate_loop.py blank
    python tests/mutate_loop.py text_classification --lines 480-520

A statement is deleted; of an `if` or `with` also the first line alone, so that its body always runs. What no test
notices is listed at the end. Each mutant is forked from this process, so the imports are paid once; about five seconds
each on a quiet machine, and the time of the whole suite for each that survives.
"""

import argparse
import ast
import atexit
import copy
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import types
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT = 30  # seconds for one run of a mutant that hangs
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Break, ast.Continue, ast.Return)


def assemble(template: str, folder: Path) -> None:
    """Copy the files of a new project of `template` into `folder`."""
    shutil.copytree(REPOSITORY / "templates" / "_project", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / "tests").glob("made_*.py"):
        name = path.stem.removeprefix("made_")
        if name != template:
            path.unlink()
            (folder / f"{name}.py").unlink()


def loop_statements(tree: ast.Module) -> list[tuple[list, int]]:
    """Return (list, place) of each statement of `main` from the run directory on."""
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    run = [node for node in main.body if isinstance(node, ast.With)][-1]
    found, queue = [], [run.body]
    while queue:
        body = queue.pop()
        for place, node in enumerate(body):
            found.append((body, place))
            queue += [part for name in ("body", "orelse") if (part := getattr(node, name, None))]
    assert len(found) > 40, "the loop is not where it was"
    return sorted(found, key=lambda item: item[0][item[1]].lineno)


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Return (line number, how, mutated source) for every way to delete a line of the loop."""
    tree = ast.parse(source)
    result = []
    for number, (body, place) in enumerate(loop_statements(tree)):
        node = body[place]
        ways = ["deleted"] if isinstance(node, (*SIMPLE, ast.If)) else []
        if isinstance(node, ast.With) or (isinstance(node, ast.If) and not node.orelse):
            ways.append("first line deleted")
        for how in ways:
            changed = copy.deepcopy(tree)
            other, where = loop_statements(changed)[number]
            other[where : where + 1] = other[where].body if how == "first line deleted" else [ast.Pass()]
            result.append((node.lineno, how, ast.unparse(ast.fix_missing_locations(changed))))
    return result


def run_alone(target, arguments: tuple) -> None:
    """Call `target` in a forked process, which must not delete its parent's temporary folders when it ends."""
    atexit._clear()
    target(*arguments)


def judge(template: str, source: str, settings: dict, log: str) -> None:
    """In a process of its own: run the tests on a changed script; exit with pytest's code."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    module = types.ModuleType(template)
    module.__file__ = f"{template}.py"
    sys.modules[template] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    sys.modules[f"made_{template}"].make = lambda folder: dict(settings)

    import pytest

    import worlds

    fork = multiprocessing.get_context("fork")
    # Forked from here, a run has the changed script.
    worlds.process = lambda target, arguments: fork.Process(target=run_alone, args=(target, arguments))
    worlds.World.wait.__defaults__ = (LIMIT,)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", "not launcher", "tests/test_loop.py"])
    sys.stdout.flush()
    os._exit(int(code))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("template")
    parser.add_argument("--lines", help="only those, as 480-520")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants ") as name:
        project = Path(name) / "project"
        assemble(arguments.template, project)
        os.chdir(project)
        sys.path[0] = str(project / "tests")
        importlib.import_module("conftest")
        importlib.import_module("warm_imports")
        settings = importlib.import_module(f"made_{arguments.template}").make(Path(name) / "made data")
        source = (project / f"{arguments.template}.py").read_text("utf-8")
        lines = source.splitlines()
        first, last = map(int, (arguments.lines or f"1-{len(lines)}").split("-"))
        todo = [(0, "unchanged", source), *(mutant for mutant in mutants(source) if first <= mutant[0] <= last)]
        fork = multiprocessing.get_context("fork")
        unnoticed = []
        for number, how, changed in todo:
            began, log = time.monotonic(), str(Path(name) / "log")
            process = fork.Process(target=judge, args=(arguments.template, changed, settings, log))
            process.start()
            process.join(900)
            if process.is_alive():
                process.kill()
                process.join()
            text = Path(log).read_text("utf-8", "replace")
            failed = next((line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
            test = failed.split("::")[-1].split(" - ")[0]
            assert process.exitcode in (0, 1) or number, text
            noticed = process.exitcode != 0
            if number == 0 and noticed:
                print(text)
                return 1
            if number and not noticed:
                unnoticed.append((number, how))
            line = lines[number - 1].strip() if number else "(the script as it is)"
            verdict = test or f"exit code {process.exitcode}" if noticed else "no test fails"
            print(f"{number:>4} {how:<18} {time.monotonic() - began:4.0f} s  {line[:70]:<70}  {verdict}", flush=True)
        print(f"{len(todo) - 1} mutants, {len(unnoticed)} that no test notices:")
        for number, how in unnoticed:
            print(f"{number:>4} {how:<18} {lines[number - 1].strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
