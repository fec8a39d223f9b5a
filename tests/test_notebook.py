"""The notebook runs: a template's `main` on two processes, and its curves drawn."""

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY, TEMPLATES
from worlds import lines

NOTEBOOK = REPOSITORY / "examples" / "notebook" / "train.ipynb"


def test_the_notebook_trains_on_two_processes_and_draws_its_curves(tiny_settings, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    settings = tiny_settings | {"output_dir": str(tmp_path / "run"), "max_train_steps": 6, "eval_steps": 3}
    parameters.source = f"settings = {settings!r}"
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "2 processes on" in text and "gloo, cpu" in text
    assert [row["step"] for row in lines(tmp_path / "run", "loss")] == [1, 2, 3, 4, 5, 6]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")


def test_a_templates_import_has_no_side_effects(tmp_path):
    """Nothing printed or written, no signal caught, no Accelerator, no device touched."""
    code = (
        "import signal, sys\n"
        "before = {number: signal.getsignal(number) for number in signal.valid_signals()}\n"
        "import blank, image_classification, text_classification\n"
        "assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}\n"
        "import accelerate, torch\n"
        "assert not accelerate.PartialState._shared_state and not torch.distributed.is_initialized()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    answer = subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(TEMPLATES),
            "HOME": str(tmp_path),
            "HF_HOME": str(tmp_path / "hf"),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
    assert [path.name for path in Path(tmp_path).iterdir()] == []
