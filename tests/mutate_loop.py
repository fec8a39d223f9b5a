"""Spoil each line of a template's loop in turn, and see whether a test that travels with it fails.

    python tests/mutate_loop.py blank
    python tests/mutate_loop.py image_classification --lines 290-320
    python tests/mutate_loop.py blank -k "clips or plain_loop"

The loop is the functions around a step and `main` from the run on. A statement is deleted; of an `if` or `with` also
the first line alone, so that its body always runs; a condition is negated, a factor dropped. What no test notices is
listed at the end. Each mutant is forked from this process, so the imports are paid once: two to ten seconds each, and
the time of the whole suite for each that survives.
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

# No test notices these, and none can:
# - blank, `model.train()` in main: a module that was just made is in training mode. A pretrained one is not.

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT = 30  # seconds for one run of a mutant that hangs
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Break, ast.Continue, ast.Return, ast.If, ast.For)
FUNCTIONS = ("summed_loss", "train_step", "predict", "score", "evaluate")
FIRST = (
    "test_a_step_clips",
    "test_it_is_the_plain_loop",
    "test_auto_finds",
    "test_any_split_of_a_step",
    "test_gradients_are_exchanged",
    "test_it_stops_when",
    "test_the_best_model",
    "test_a_step_that_is_not_finite",
    "test_lines_come_when_due",
)


def assemble(template: str, folder: Path) -> None:
    """Copy the files of a new project of `template` into `folder`."""
    shutil.copytree(REPOSITORY / "templates" / "_project", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / "tests").glob("made_*.py"):
        name = path.stem.removeprefix("made_")
        if name != template:
            path.unlink()
            (folder / f"{name}.py").unlink()


def is_of_the_loop(tree: ast.Module) -> set[int]:
    """Return the line numbers of the functions around a step, and of `main` from the run on."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in (*FUNCTIONS, "main"):
            part = node if node.name != "main" else [inner for inner in node.body if isinstance(inner, ast.With)][-1]
            found |= set(range(part.lineno, part.end_lineno + 1))
    assert len(found) > 75, "the loop is not where it was"
    return found


def ways(node: ast.AST) -> list[tuple[str, list[ast.AST]]]:
    """Return (how, what takes its place) for each way to spoil a statement or an expression."""
    result = []
    if isinstance(node, SIMPLE) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        result.append(("deleted", [ast.Pass()]))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        calls = [argument for argument in node.value.args if isinstance(argument, ast.Call)]
        result += [(f"{ast.unparse(call.func)} alone", [ast.Expr(call)]) for call in calls]
    if isinstance(node, ast.With | ast.If) and not getattr(node, "orelse", None):
        result.append(("first line deleted", node.body))
    if isinstance(node, ast.With) and len(node.items) > 1:
        for item in node.items:
            others = [other for other in node.items if other is not item]
            result.append((f"without {ast.unparse(item)[:20]}", [ast.With(items=others, body=node.body)]))
    if isinstance(node, ast.If):
        negated = ast.UnaryOp(ast.Not(), node.test)
        result.append(("negated", [ast.If(test=negated, body=node.body, orelse=node.orelse)]))
    if isinstance(node, ast.IfExp):
        result += [("always", [node.body]), ("never", [node.orelse])]
        result.append(("swapped", [ast.IfExp(test=node.test, body=node.orelse, orelse=node.body)]))
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            others = [other for other in node.values if other is not part]
            left = others[0] if len(others) == 1 else ast.BoolOp(op=node.op, values=others)
            result.append((f"without {ast.unparse(part)[:20]}", [left]))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        result += [("left alone", [node.left]), ("right alone", [node.right])]
    if isinstance(node, ast.FunctionDef) and node.decorator_list:
        result.append(("undecorated", [undecorated := copy.copy(node)]))
        undecorated.decorator_list = []
    return result


def exchange(tree: ast.Module, old: ast.AST, new: list[ast.AST]) -> None:
    """Put `new` where `old` stands."""
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new[0])
            elif isinstance(value, list) and any(part is old for part in value):
                place = next(place for place, part in enumerate(value) if part is old)
                value[place : place + 1] = new


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Return (line number, how, mutated source) for every way to spoil a line of the loop."""
    tree = ast.parse(source)
    lines = is_of_the_loop(tree)
    result = []
    for number, node in enumerate(ast.walk(tree)):
        if getattr(node, "lineno", None) not in lines:
            continue
        for way, (how, _) in enumerate(ways(node)):
            changed = copy.deepcopy(tree)
            spoilt = list(ast.walk(changed))[number]
            exchange(changed, spoilt, ways(spoilt)[way][1])
            result.append((node.lineno, how, ast.unparse(ast.fix_missing_locations(changed))))
    return sorted(result, key=lambda mutant: mutant[0])


class StrongestFirst:
    """Runs the tests that notice most first, and those that are slow last."""

    def pytest_collection_modifyitems(self, items: list) -> None:
        def place(item) -> int:
            return next((number for number, name in enumerate(FIRST) if item.name.startswith(name)), len(FIRST))

        items.sort(key=place)


def run_alone(target, arguments: tuple) -> None:
    """Call `target` in a forked process, which must not delete its parent's temporary folders when it ends."""
    atexit._clear()
    target(*arguments)


def judge(template: str, source: str, settings: dict, log: str, tests: str) -> None:
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
    code = pytest.main(
        ["-x", "-q", "-p", "no:cacheprovider", "-k", tests, "tests/test_loop.py"], plugins=[StrongestFirst()]
    )
    sys.stdout.flush()
    os._exit(int(code))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("template")
    parser.add_argument("--lines", help="only those, as 480-520")
    parser.add_argument("-k", default="not launcher", help="only these tests, as pytest has it")
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
            process = fork.Process(target=judge, args=(arguments.template, changed, settings, log, arguments.k))
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
            print(f"{number:>4} {how:<28} {time.monotonic() - began:4.0f} s  {line[:60]:<60}  {verdict}", flush=True)
        print(f"{len(todo) - 1} mutants, {len(unnoticed)} that no test notices:")
        for number, how in unnoticed:
            print(f"{number:>4} {how:<28} {lines[number - 1].strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
