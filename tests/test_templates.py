"""The templates are one loop: what may be equal is equal, line by line, so that `diff` shows only the task."""

import ast

import pytest

from conftest import TEMPLATES

NAMES = ("blank", "image_classification", "text_classification")
LIMITS = {"blank": 225, "image_classification": 420, "text_classification": 335}  # lines
EQUAL = {  # each function, and the templates in which it is the same to the letter
    "summed_loss": NAMES,
    "train_step": NAMES,
    "predict": NAMES,
    "evaluate": ("blank", "text_classification"),  # images: of the averaged weights too
    "score": ("image_classification", "text_classification"),
}


def source_of(template: str) -> str:
    return (TEMPLATES / f"{template}.py").read_text("utf-8")


def function_of(template: str, name: str) -> list[str]:
    """Return the lines of a top-level function, with its decorators."""
    tree, lines = ast.parse(source_of(template)), source_of(template).splitlines()
    (node,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return lines[first - 1 : node.end_lineno]


def loop_of(template: str) -> list[str]:
    """Return the lines of `main` from the Run to the end of the loop."""
    main = function_of(template, "main")
    (start,) = [number for number, line in enumerate(main) if line.startswith("    with Run(")]
    (end,) = [number for number, line in enumerate(main) if line.strip() == "# Export and test"]
    return main[start:end]


def test_the_loops_are_equal_to_the_letter():
    loops = {name: loop_of(name) for name in NAMES}
    assert len(loops["blank"]) > 20
    assert loops["blank"] == loops["text_classification"] == loops["image_classification"]


@pytest.mark.parametrize("function", sorted(EQUAL))
def test_functions_that_are_not_about_the_task_are_equal_to_the_letter(function):
    assert len({"\n".join(function_of(name, function)) for name in EQUAL[function]}) == 1
    assert len(function_of(EQUAL[function][0], function)) >= 3


@pytest.mark.parametrize("template", NAMES)
def test_a_template_reads_in_a_minute(template):
    assert len(source_of(template).splitlines()) <= LIMITS[template]
    assert len(function_of(template, "main")) <= 90
    assert len(function_of(template, "train_step")) <= 30


@pytest.mark.parametrize("template", NAMES)
def test_main_has_the_sections_in_their_order(template):
    comments = [line.strip()[2:] for line in function_of(template, "main") if line.strip().startswith("# ")]
    sections = ["Accelerator", "Data and model", "Prepare", "Resume", "Loop", "Export and test"]
    found = [next((s for s in sections if comment.startswith(s)), None) for comment in comments]
    assert [section for section in found if section] == sections


@pytest.mark.parametrize("template", NAMES)
def test_gradients_are_made_in_two_places_only(template):
    """In `train_step`, and in the trials of micro_batch_size auto."""
    assert source_of(template).count(".backward(") == 2
    assert sum(".backward(" in line for line in function_of(template, "train_step")) == 1
