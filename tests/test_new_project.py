"""From template to project: what `make new`, `copier copy` and `cp -r` leave runs there at once, alone, and is updated.

Everything starts from a snapshot of this working tree, committed in a repository of its own, on a path with a space.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import REPOSITORY
from tiny import make_tiny, settings_for

PROJECT_FILES = REPOSITORY / "templates" / "_project"
TEMPLATES = sorted(path.stem.removeprefix("made_") for path in (PROJECT_FILES / "tests").glob("made_*.py"))
IDENTITY = ["-c", "user.name=test", "-c", "user.email=test@example.org"]

pytestmark = pytest.mark.timeout(900)  # a project's own tests run inside of some


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *IDENTITY, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def shell(command: str, folder: Path, limit: float = 300) -> subprocess.CompletedProcess:
    """Run a command as a person types it, in an environment that has this one's programs and no network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    variables |= {"PATH": path, "GIT_CONFIG_GLOBAL": os.devnull, "MAKEFLAGS": ""}
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=limit, env=variables)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> Path:
    """The working tree as it stands, committed."""
    folder = tmp_path_factory.mktemp("up") / "the templates"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        source, target = REPOSITORY / name, folder / name
        if source.is_symlink() or source.is_file():  # not one that was deleted and is not committed yet
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "snapshot")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory, upstream) -> str:
    """The option that lets make use the environment of these tests, as if it had made it."""
    folder = tmp_path_factory.mktemp("environment")
    for part in Path(sys.prefix).iterdir():
        (folder / part.name).symlink_to(part)
    planned = shell(f'make --dry-run environment VENV="{folder}"', upstream).stdout
    (stamp,) = set(re.findall(r"\.installed[\w-]*", planned))
    (folder / stamp).unlink(missing_ok=True)
    shutil.copy(upstream / "pyproject.toml", folder / stamp)
    return f'VENV="{folder}"'


@pytest.fixture(scope="module")
def projects(tmp_path_factory, upstream, environment) -> dict[str, Path]:
    """A project of each template, made next to each other on a path with a space and an umlaut."""
    folder = tmp_path_factory.mktemp("new") / "meine Prüfstücke"
    made = {}
    for template in TEMPLATES:
        made[template] = folder / f"mein {template}"
        answer = shell(f'make new TEMPLATE={template} DEST="{made[template]}" {environment}', upstream)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    return made


def files_of(project: Path) -> list[Path]:
    skipped = {"__pycache__", ".git", "outputs", "made", ".pytest_cache", ".ruff_cache"}
    return [path for path in sorted(project.rglob("*")) if path.is_file() and not skipped & {*path.parts}]


def test_there_is_a_project_for_each_template():
    assert TEMPLATES == ["blank", "image_classification", "text_classification"]


# ------------------------------------------------------------------------------------------------------ what is in it


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_has_everything_and_nothing_of_here(template, projects, upstream):
    project = projects[template]
    found = {str(path.relative_to(project)) for path in files_of(project)}
    for name in (f"{template}.py", "launch.py", "recipe.yaml", "Makefile", "pyproject.toml", "README.md", "update.py"):
        assert name in found
    for name in (
        ".gitignore",
        ".copier-answers.yml",
        ".github/workflows/test.yml",
        "tests/test_loop.py",
        "kit/world.py",
    ):
        assert name in found
    assert {Path(name).stem for name in found if name.startswith("configs/")} == {
        path.stem for path in (REPOSITORY / "configs").iterdir()
    }
    others = [other for other in TEMPLATES if other != template]
    for path in files_of(project):
        assert not path.is_symlink(), path
        text = path.read_text("utf-8")
        if path.name == ".copier-answers.yml":
            assert yaml.safe_load(text)["_src_path"] == str(upstream)
            assert git(upstream, "rev-parse", "HEAD").startswith(yaml.safe_load(text)["_commit"])
            continue
        is_a_page = path.name == "report_page.html"  # which kit/report.py fills in
        assert path.suffix == ".py" or is_a_page or not {"{{", "{%", "{#"} & {*re.findall(r"\{[{%#]", text)}, (
            f"{path}: Jinja is left"
        )
        for words in ("templates/", "examples/", str(upstream), str(REPOSITORY)):
            assert words not in text, f"{path}: {words}"
        assert not [other for other in others if f"import {other}" in text], path
    assert f"# mein {template}" in (project / "README.md").read_text("utf-8").splitlines()[0]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_is_clean_and_has_the_kit_that_it_imports(template, projects):
    project = projects[template]
    for command in (["check"], ["format", "--check"]):
        answer = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=project, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
    # predict.py imports the reader of its own template by name
    readers = [*(project / "kit").glob("*_predictions.py")]
    scripts = [project / f"{name}.py" for name in (template, "launch", "report", *(["predict"] if readers else []))]
    assert len(readers) == (template != "blank")
    imported, queue = {f"kit.{path.stem}" for path in readers}, [*scripts, *readers]
    foreign = set()
    while queue:
        for name in imports_of(queue.pop()):
            if name.startswith("kit.") and name not in imported:
                imported.add(name)
                queue.append(project / f"{name.replace('.', '/')}.py")
            elif not name.startswith("kit"):
                foreign.add(name.split(".")[0])
    there = {f"kit.{path.stem}" for path in (project / "kit").glob("*.py")} - {"kit.__init__"}
    assert there == imported
    assert len(there) >= 7

    # What it imports it names, and nothing else, in the ranges that were tested here.
    packages = {"yaml": "pyyaml", "PIL": "pillow", "sklearn": "scikit-learn"}
    needed = {packages.get(name, name) for name in foreign - sys.stdlib_module_names} - {"launch"}
    ranges, tested = (ranges_of(path / "pyproject.toml") for path in (project, REPOSITORY))
    with_others = {"huggingface_hub", "packaging", "pyarrow", "markupsafe"}  # they come with accelerate and datasets
    extras = {"mlflow", "trackio", "wandb", "onnx", "onnxruntime", "onnxscript"}
    assert needed - with_others - extras == set(ranges)
    assert ranges == {name: tested[name] for name in ranges}


def ranges_of(pyproject: Path) -> dict[str, str]:
    """Return the dependencies with their ranges, by name."""
    block = re.search(r"^dependencies = \[\n(.*?)^\]", pyproject.read_text("utf-8"), re.DOTALL | re.MULTILINE)[1]
    return {re.split(r"[\[<>=]", line)[0]: line for line in re.findall(r'"(.+?)",\n', block)}


def imports_of(path: Path) -> list[str]:
    """Return the modules that a file imports, anywhere in it; `from kit import x` counts as kit.x."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            is_kit = node.module == "kit"
            found += [f"kit.{alias.name}" for alias in node.names] if is_kit else [node.module]
    return found


def test_no_python_file_is_a_jinja_file_and_no_file_is_here_twice():
    files = [path for path in PROJECT_FILES.rglob("*") if "__pycache__" not in path.parts]
    assert files
    assert not [path for path in files if ".py." in path.name or ("{" in path.name)]
    links = [path for path in files if path.is_symlink()]
    assert {path.name for path in links} >= {
        "kit",
        "configs",
        "launch.py",
        "report.py",
        "predict.py",
        "worlds.py",
        *(f"{t}.py" for t in TEMPLATES),
    }
    for path in links:
        assert not path.readlink().is_absolute()
        assert path.exists(), path
    elsewhere = {
        path.read_bytes()
        for path in REPOSITORY.rglob("*.py")
        if PROJECT_FILES not in path.parents and path.stat().st_size
    }
    assert not [path for path in files if path.is_file() and not path.is_symlink() and path.read_bytes() in elsewhere]


def test_the_workflow_runs_targets_that_there_are(projects):
    workflow = yaml.safe_load((projects["blank"] / ".github" / "workflows" / "test.yml").read_text("utf-8"))
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert len(commands) == 3
    for command in commands:
        target = command.split()[1]
        assert f"\n{target}:" in (projects["blank"] / "Makefile").read_text("utf-8"), command


# ---------------------------------------------------------------------------------------------------------- it runs


def facts(run: Path) -> dict:
    return json.loads((run / "run.json").read_text("utf-8"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_trains_at_once_on_one_and_on_two_processes(template, projects, environment):
    project = projects[template]
    answer = shell(f"make demo {environment}", project)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert facts(project / "outputs" / "demo")["status"] == "done"
    rows = [json.loads(line) for line in (project / "outputs" / "demo" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert min(losses) < losses[0] * 0.8, "a demo that learns nothing looks broken"
    answer = shell(f"make train PROFILE=multi_gpu {environment} ARGS='--num_train_epochs 1'", project)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert facts(project / "outputs" / "train")["world"]["num_processes"] == 2
    assert answer.stdout.count("2 processes on 1 node") == 1


def test_a_new_project_trains_with_plain_accelerate_launch(projects):
    project = projects["text_classification"]
    command = "accelerate launch --config_file configs/cpu.yaml text_classification.py --config recipe.yaml"
    assert command in (project / "README.md").read_text("utf-8")
    answer = shell(f"{command} --output_dir outputs/plain --num_train_epochs 1", project)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert facts(project / "outputs" / "plain")["status"] == "done"


# The blank one whole. The loops of the others are proven in this folder too: there the tests need to be seen to work.
OWN_TESTS = {
    "blank": "",
    "image_classification": "-k 'plain or not_finite or average or frozen or test_split or number'",
    "text_classification": "-k 'plain or better or test_split or scored'",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tests_of_a_new_project_pass_there(template, projects, environment):
    answer = shell(f'make test {environment} ARGS="{OWN_TESTS[template]}"', projects[template], limit=540)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    passed = int(re.search(r"(\d+) passed", answer.stdout)[1])
    assert passed >= (10 if template == "blank" else 2)


@pytest.mark.parametrize("template", TEMPLATES)
def test_copied_by_hand_it_runs_from_any_folder(template, upstream, projects, tmp_path):
    mine, elsewhere = tmp_path / "mine", tmp_path / "anderswo ü"
    mine.mkdir()
    elsewhere.mkdir()
    command = "cp -r templates/text_classification.py templates/kit configs ../mine/"
    answer = shell(command.replace("text_classification", template).replace("../mine", f'"{mine}"'), upstream)
    assert answer.returncode == 0, answer.stderr
    if template == "text_classification":
        settings = settings_for(make_tiny(tmp_path))
    else:
        settings = yaml.safe_load((projects[template] / "recipe.yaml").read_text("utf-8"))
        settings |= {"data_dir": str(projects[template] / "made")} if "data_dir" in settings else {}
    recipe = settings | {"num_train_epochs": 1, "output_dir": "out put"}
    (elsewhere / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    start = f'accelerate-launch --config_file "{mine}/configs/cpu.yaml" "{mine}/{template}.py" --config recipe.yaml'
    answer = shell(start, elsewhere)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert facts(elsewhere / "out put")["status"] == "done"


# ---------------------------------------------------------------------------------------------------- making, updating


def test_mistakes_in_make_new_cost_one_line(upstream, environment, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for options, words in (
        (f"TEMPLATE=blank DEST={tmp_path}/full", "is not empty"),
        (f"TEMPLATE=blank DEST={tmp_path}/file", "is a file"),
        (f"TEMPLATE=blank DEST={tmp_path}/file/below", "cannot be made"),
        (f"TEMPLATE=blanc DEST={tmp_path}/new", "TEMPLATE=blank|image_classification|text_classification"),
        (f"TEMPLATE=launch DEST={tmp_path}/new", "TEMPLATE=blank|image_classification|text_classification"),
        ("TEMPLATE=blank", "DEST="),
    ):
        answer = shell(f"make new {options} {environment}", upstream)
        assert answer.returncode == 2, options
        said = [line for line in answer.stderr.splitlines() if not line.startswith("make: ***")]
        assert len(said) == 1, answer.stderr
        assert words in said[0], said
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "thesis.txt"]


def test_copier_alone_makes_a_project_too(upstream, tmp_path):
    answer = shell(f'copier copy --defaults "{upstream}" mine', tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "mine" / "text_classification.py").is_file()
    assert "make demo" in answer.stderr


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{path}: {old}"
    path.write_text(text.replace(old, new), "utf-8")


def test_an_update_merges_both_sides_without_tags_and_marks_conflicts(upstream, environment, tmp_path):
    source, project = tmp_path / "source", tmp_path / "mein Projekt ä"
    shutil.copytree(upstream, source, symlinks=True)
    assert not git(source, "tag")
    assert shell(f'make new TEMPLATE=blank DEST="{project}" {environment}', source).returncode == 0

    def update() -> subprocess.CompletedProcess:
        return shell(f"make update {environment}", project)

    answer = update()
    assert answer.returncode == 2
    assert "not under git" in answer.stderr
    git(project, "init", "--quiet")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "start")
    assert "nothing new since" in update().stdout

    replace(project / "blank.py", "learning_rate: NonNegativeFloat = 1e-2", "learning_rate: NonNegativeFloat = 3e-3")
    answer = update()
    assert answer.returncode == 2
    assert "not committed" in answer.stderr
    git(project, "commit", "--quiet", "--all", "--message", "own change")
    replace(source / "templates" / "blank.py", "    optimizer.zero_grad()\n", "    optimizer.zero_grad()  # repaired\n")
    replace(source / "templates" / "kit" / "run.py", "    step: int = 0\n", "    step: int = 0  # repaired\n")
    git(source, "commit", "--quiet", "--all", "--message", "repairs")
    (source / "README.md").write_text("a change that is not committed")
    answer = update()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    script = (project / "blank.py").read_text("utf-8")
    assert "learning_rate: NonNegativeFloat = 3e-3" in script
    assert "optimizer.zero_grad()  # repaired" in script
    assert "# repaired" in (project / "kit" / "run.py").read_text("utf-8")
    for words in ("blank.py", "kit/run.py", f"-> {git(source, 'rev-parse', '--short', 'HEAD')}"):
        assert words in answer.stdout, answer.stdout
    assert "mein Projekt ä" in (project / "README.md").read_text("utf-8").splitlines()[0]

    git(project, "commit", "--quiet", "--all", "--message", "updated")
    epochs = "num_train_epochs: PositiveInt = {}".format
    replace(project / "blank.py", epochs(10), epochs(11))
    git(project, "commit", "--quiet", "--all", "--message", "own number")
    replace(source / "templates" / "blank.py", epochs(10), epochs(12))
    git(source, "commit", "--quiet", "--all", "--message", "other number")
    answer = update()
    assert answer.returncode == 2
    assert "both sides changed the same lines" in answer.stderr and "blank.py" in answer.stderr
    script = (project / "blank.py").read_text("utf-8")
    assert script.index("<<<<<<<") < script.index("= 11\n") < script.index("= 12\n") < script.index(">>>>>>>")


def test_a_template_that_has_moved_is_named_once_and_then_remembered(upstream, environment, tmp_path):
    source, project = tmp_path / "source", tmp_path / "project"
    shutil.copytree(upstream, source, symlinks=True)
    assert shell(f'make new TEMPLATE=blank DEST="{project}" {environment}', source).returncode == 0
    git(project, "init", "--quiet")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "start")
    identity = " ".join(
        f"GIT_{who}_{what}=x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    )

    def update(options: str = "", variables: str = "") -> subprocess.CompletedProcess:
        return shell(f"env {identity} {variables} make update {environment} {options}", project)

    def said(answer: subprocess.CompletedProcess) -> str:
        assert answer.returncode == 2, answer.stdout
        (line,) = [line for line in answer.stderr.splitlines() if not line.startswith("make: ***")]
        return line

    # Another user's folder: git reads it only if it is told to trust it.
    trusted = "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0="
    line = said(update(variables=f'GIT_TEST_ASSUME_DIFFERENT_OWNER=1 {trusted}"{project}"'))
    assert f"safe.directory '{source}' && " in line and f"safe.directory '{source}/.git'. " in line, line
    assert "make update SOURCE=" in line, line

    # Moved: one line with the cure. A wrong place is refused and not remembered.
    moved = tmp_path / "the colleague's copy"
    source.rename(moved)
    line = said(update())
    assert str(source) in line and "make update SOURCE=" in line, line
    start = git(project, "rev-parse", "HEAD")
    (tmp_path / "another").mkdir()
    for name, words in (
        ("nowhere", "cannot be read"),
        ("another", "cannot be read"),
        ("project", "is it the same template?"),
    ):
        assert words in said(update(f'SOURCE="{tmp_path}/{name}"'))
        assert git(project, "rev-parse", "HEAD") == start
        assert not git(project, "status", "--porcelain")

    # A folder, as a person types it from the project.
    replace(moved / "templates" / "kit" / "run.py", "    step: int = 0\n", "    step: int = 0  # repaired\n")
    git(moved, "commit", "--quiet", "--all", "--message", "a repair")
    answer = update(f'SOURCE="../{moved.name}"')
    assert answer.returncode == 0, answer.stderr
    assert "# repaired" in (project / "kit" / "run.py").read_text("utf-8")
    git(project, "commit", "--quiet", "--all", "--message", "updated")
    assert "nothing new since" in update().stdout, "the place is remembered"

    # A git URL.
    git(tmp_path, "clone", "--quiet", "--bare", str(moved), "server")
    shutil.rmtree(moved)
    url = f"file://{tmp_path}/server"
    answer = update(f"SOURCE={url}")
    assert "nothing new since" in answer.stdout, answer.stderr
    assert yaml.safe_load((project / ".copier-answers.yml").read_text("utf-8"))["_src_path"] == f"git+{url}"
    answer = update()
    assert "nothing new since" in answer.stdout, answer.stderr
    assert not git(project, "status", "--porcelain")
