"""The modules of the kit import each other without a circle, and import no image library before it is used."""

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from conftest import TEMPLATES

IMAGE_LIBRARIES = ("PIL", "torchvision", "timm", "datasets", "simplejpeg")


def imports_between(folder: Path, package: str) -> dict[str, set[str]]:
    """Return {module: the modules of the package that it imports}, also in functions and under TYPE_CHECKING."""
    files = {file.stem: file for file in folder.glob("*.py") if file.stem != "__init__"}
    graph = {}
    for module, file in files.items():
        needed = set()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                inside = node.level == 1 or node.module == package
                names = [alias.name for alias in node.names] if inside else []
                needed |= {*names, (node.module or "").removeprefix(f"{package}.")}
            elif isinstance(node, ast.Import):
                needed |= {alias.name.removeprefix(f"{package}.") for alias in node.names}
        graph[module] = needed & files.keys()
    return graph


def test_no_modules_of_the_kit_import_each_other_in_a_circle():
    graph = imports_between(TEMPLATES / "kit", "kit")
    assert len(graph) > 10 and graph["images"] >= {"image_cache", "image_files"}
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "closing",
    ["from kit.a import x", "from kit import a", "import kit.a", "from .a import x", "from . import a"],
)
@pytest.mark.parametrize("place", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_every_way_to_close_a_circle_is_seen(tmp_path, closing, place):
    (tmp_path / "a.py").write_text("from kit.b import y\n")
    (tmp_path / "b.py").write_text("import torch\n")
    assert imports_between(tmp_path, "kit") == {"a": {"b"}, "b": set()}
    (tmp_path / "b.py").write_text(place.format(closing) + "\n")
    with pytest.raises(CycleError):
        list(TopologicalSorter(imports_between(tmp_path, "kit")).static_order())


def test_the_kit_imports_no_image_library_at_its_top():
    modules = sorted(file.stem for file in (TEMPLATES / "kit").glob("image*.py"))
    assert len(modules) >= 6
    code = f"import sys; import {', '.join(f'kit.{module}' for module in modules)}\n"
    code += f"print([name for name in {IMAGE_LIBRARIES} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(TEMPLATES)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment)
    assert done.stdout.strip() == "[]", done.stderr
