"""The templates are one loop: what may be equal is equal, line by line, so that `diff` shows only the task."""

import ast
import difflib

import pytest

from conftest import TEMPLATES

# The loop lines, without indentation, that a template has for its task alone.
TASK = {
    "text_classification": """
        notes = [*splits.notes, describe_labels(splits.label_names)]
        progress.micro_batch_size = find_micro_batch_size(accelerator, model, train_loader, sampler, stop)
        model.train()  # from_pretrained leaves it in evaluation mode, without dropout
        predicted = predict(accelerator, model, validation_loader, len(validation), stop)
        batch = next(batches)
        export(plain_model, tokenizer, run.path / "final")
        checkpoints.load_module(best, "model", plain_model)
        export(plain_model, tokenizer, run.path / "best")
        predicted = predict(accelerator, model, loader, len(test), stop)
        write_predictions(predicted["logits"], splits.label_names, run.path / "predictions.csv")
        run.write_card(f"{settings.model_name_or_path}, fine-tuned to classify text", results, HOW_TO_LOAD)
    """,
    "image_classification": """
        notes = [*splits.notes, describe_labels(splits.label_names), *batchnorm_notes]
        progress.micro_batch_size = find_micro_batch_size(
        accelerator, model, train_loader, sampler, stop, transform
        )
        train_mode(model)
        predicted = predict(accelerator, model, validation_loader, len(validation), stop, transform, ema)
        batch = transform(next(batches), training=True)
        if ema is not None:
        ema.update(state["modules"]["model"], step)
        weights = "ema" if settings.metric_for_best_model.startswith("ema_") else "model"
        plain_model.load_state_dict(state["modules"][weights].state_dict())
        export(plain_model, preprocessing, splits.label_names, run.path / "final")
        checkpoints.load_module(best, weights, plain_model)
        export(plain_model, preprocessing, splits.label_names, run.path / "best")
        predicted = predict(accelerator, model, loader, len(test), stop, transform)
        write_predictions(predicted["logits"], splits, run.path / "predictions.csv")
        run.write_card(f"{settings.model_name_or_path}, fine-tuned to classify images", results, HOW_TO_LOAD)
    """,
}
SECTIONS = "Accelerator Data Model, Prepare Resume Loop Between One Final".split()  # first words of main's comments


def source_of(template: str) -> str:
    return (TEMPLATES / f"{template}.py").read_text("utf-8")


def function_of(source: str, name: str) -> list[str]:
    """Return the lines of a top-level function."""
    (node,) = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return source.splitlines()[node.lineno - 1 : node.end_lineno]


def loop_of(template: str) -> list[str]:
    """Return the lines of `main` from the run directory on: resume, loop, final evaluation and export."""
    lines = function_of(source_of(template), "main")
    (start,) = [number for number, line in enumerate(lines) if "RunDirectory(" in line]
    assert len(lines) - start > 100, "the loop is not where it was"
    return lines[start:]


def task_lines(first: list[str], second: list[str]) -> tuple[list[str], list[str]]:
    """Return the lines that only one of two loops has, without indentation."""
    changes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    changes = [change for change in changes if change[0] != "equal"]
    mine = [line.strip() for _, start, end, _, _ in changes for line in first[start:end]]
    return mine, [line.strip() for _, _, _, start, end in changes for line in second[start:end]]


def allowed(template: str) -> list[str]:
    return [line.strip() for line in TASK[template].strip().splitlines()]


def test_the_loops_differ_only_in_the_lines_of_their_tasks():
    text, image = "text_classification", "image_classification"
    assert task_lines(loop_of(text), loop_of(image)) == (allowed(text), allowed(image))


@pytest.mark.parametrize("template", sorted(TASK))
def test_a_changed_common_line_is_noticed(template):
    loop = loop_of(template)
    other = loop_of("text_classification" if template == "image_classification" else "image_classification")
    noticed = 0
    for number, line in enumerate(loop):
        if line.strip() and line.strip() not in allowed(template):
            changed = [*loop[:number], f"{line}  # changed", *loop[number + 1 :]]
            assert task_lines(changed, other)[0] != allowed(template), line
            noticed += 1
    assert noticed > 80


@pytest.mark.parametrize("template", sorted(TASK))
def test_main_has_the_sections_in_their_order(template):
    comments = [line.strip()[2:] for line in function_of(source_of(template), "main") if line.strip().startswith("# ")]
    found = [comment.split()[0] for comment in comments if comment.split()[0] in SECTIONS]
    assert found == SECTIONS


@pytest.mark.parametrize("function", ["weighted_loss", "describe_labels"])
def test_functions_that_are_not_about_the_task_are_equal(function):
    assert len({"\n".join(function_of(source_of(template), function)) for template in TASK}) == 1
