"""The report of a run, made of files alone: complete, safe, readable; and the comparison of several runs."""

import base64
import csv
import html
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import report
from conftest import TEMPLATES
from kit.errors import MachineError, UserError
from kit.report import write_report
from kit.report_comparison import write_comparison
from kit.report_reading import read_predictions

NASTY = ["<script>alert(1)</script>", 'a "quoted"\n$x_1$ & \u732b']
LEAVES_OPEN = {"meta", "link", "img", "br"}


def write_run(folder: Path, num_steps: int = 60, every: int = 10, metrics: int | None = None, **facts) -> Path:
    """Write a run directory as a run leaves it, with `metrics` lines of metrics.jsonl (None: all)."""
    folder.mkdir(parents=True)
    seed = facts.get("numbers", {}).get("seed", 0)
    draw = np.random.default_rng(seed)
    rows = []
    for step in range(1, num_steps + 1):
        row = {"step": step, "epoch": step / 30, "loss": 2 / step + 0.1 * draw.random(), "learning_rate": 1e-3 / step}
        rows.append(row | {"grad_norm": draw.random(), "samples_per_second": 90 + draw.random(), "memory_gb": 1.5})
        if step % every == 0:
            accuracy = 1 - 1 / step - 0.01 * draw.random()
            row = {"step": step, "epoch": step / 30, "eval_loss": 2 / step, "eval_samples": 40}
            rows.append(row | {"eval_accuracy": accuracy, "eval_f1": accuracy - 0.1})
    rows.append({"step": num_steps, "epoch": num_steps / 30, "test_loss": 0.1, "test_samples": 40})
    lines = "".join(json.dumps(row) + "\n" for row in rows[:metrics])
    (folder / "metrics.jsonl").write_text(lines, "utf-8")
    numbers = {"model_name_or_path": "bert-base-cased", "learning_rate": 1e-3, "seed": 0} | facts.pop("numbers", {})
    found = {
        "status": "done",
        "cause": None,
        "started": "2026-01-01T00:00:00+00:00",
        "starts": 1,
        "seconds": 100.0,
        "command": ["text_classification.py", "--config", "recipe.yaml", "--seed", "7"],
        "versions": {"python": "3.11", "torch": "2.14.1"},
        "git_commit": "abc",
        "profile": {"ACCELERATE_MIXED_PRECISION": "no"},
        "numbers": numbers,
        "world": {"num_processes": 1, "mixed_precision": "no", "summary": "1 process on 1 node, cpu"},
        "data": {"rows": {"train": 37, "test": 11}, "validation_carved": False, "sha256": {"train": "f" * 64}},
        "batch": {"arithmetic": "8 = 1 process x 8", "total_steps": num_steps},
        "results": {"best_step": num_steps, "test_accuracy": 0.5 + seed / 10, "test": {"confusion": [[12345]]}},
    }
    (folder / "run.json").write_text(json.dumps(found | facts), "utf-8")
    (folder / "settings.yaml").write_text(yaml.safe_dump(numbers | {"output_dir": str(folder)}), "utf-8")
    return folder


def write_predictions(folder: Path, split: str, label_names: list[str], inputs: dict, labels=None, wrong=0.3) -> None:
    """Write predictions of a split: `inputs` are columns of one length; a share of `wrong` answers."""
    draw = np.random.default_rng(0)
    num_classes, num_samples = len(label_names), len(next(iter(inputs.values())))
    ids = draw.permutation(np.arange(num_samples) % num_classes)
    logits = draw.normal(size=(num_samples, num_classes))
    logits[np.arange(num_samples), np.where(draw.random(num_samples) < wrong, (ids + 1) % num_classes, ids)] += 5
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = [label_names[i] for i in ids] if labels is None else labels
    with open(folder / f"predictions_{split}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*inputs, "label", "prediction", *(f"p_{name}" for name in label_names)])
        for *row, label, p in zip(*inputs.values(), labels, probabilities, strict=True):
            writer.writerow([*row, label, label_names[p.argmax()], *(f"{value:.6f}" for value in p)])


def text_run(folder: Path, label_names=("no", "yes"), **facts) -> Path:
    write_run(folder, **facts)
    texts = [f'row {i}: <b onclick="steal()">"bold"</b>\n& more' for i in range(40)]
    for split in ("validation", "test"):
        write_predictions(folder, split, list(label_names), {"index": range(40), "label": texts, "second": texts})
    return folder


def image_run(folder: Path, num_classes: int = 37) -> Path:
    """Write an image run whose pictures are of every kind that a folder may hold; one of them is gone."""
    write_run(folder, numbers={"model_name_or_path": "resnet50"})
    settings = yaml.safe_load((folder / "settings.yaml").read_text("utf-8")) | {"data_dir": str(folder / "data")}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    (folder / "data").mkdir()
    draw = np.random.default_rng(0)
    paths = []
    for i, (mode, suffix) in enumerate(
        [("RGB", "jpg"), ("L", "png"), ("RGBA", "png"), ("P", "gif"), ("CMYK", "jpg"), ("I;16", "tif"), ("LA", "png")]
    ):
        pixels = draw.integers(0, 255, (40, 50 + i, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 16) if mode == "I;16" else image.convert(mode)
        image.save(folder / "data" / f"{i}.{suffix}")
        paths.append(f"{i}.{suffix}")
    paths = [*paths, "gone.jpg"] * num_classes
    labels = [f"Breed_number_{i}_of_a_long_name" for i in range(num_classes)]
    write_predictions(folder, "test", labels, {"name": [f"name {i}" for i in range(len(paths))], "path": paths})
    return folder


class Page(HTMLParser):
    """The elements of a page. Fails where a tag is not closed."""

    def __init__(self, path: Path):
        super().__init__()
        self.text = path.read_text("utf-8")
        self.elements, self.open, self.shown = [], [], ""
        self.feed(self.text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in LEAVES_OPEN:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.shown += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_page(path: Path) -> Page:
    """Assert what holds for every page: it loads nothing, runs nothing, describes its pictures; return it."""
    page = Page(path)
    assert not page.all("script") + page.all("iframe") + page.all("object")
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.findall(r"url\((?!#)|@import", page.text)
    for image in page.all("img"):
        assert image["alt"] and image["src"].startswith("data:image/jpeg;base64,")
    for picture in page.all("svg"):
        assert picture["role"] == "img" and picture["aria-label"]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    used = set(re.findall(r'(?:url\(|xlink:href=")#([\w-]+)', page.text))
    assert len(ids) == len(set(ids)) and used <= set(ids)
    assert "#0102" not in page.text  # a colour that the page does not choose
    return page


def test_a_text_run_shows_everything_and_nothing_of_it_can_run(tmp_path):
    folder = text_run(
        tmp_path / "a <run>",
        NASTY,
        cause="stopped by <b>me</b>",
        notes=["3 rows <i>twice</i>"],
        resumes=[20],
        skipped=[31, 32],
        best_step=50,
        time={"data": 10.0, "forward_backward": 60.0},
        defaults={"learning_rate": 5e-5, "seed": 0, "model_name_or_path": "bert-base-cased"},
        numbers={"seed": 7},
    )
    page = check_page(write_report(folder))
    assert "<script>alert(1)" in page.shown and "stopped by <b>me</b>" in page.shown
    assert "3 rows <i>twice</i>" in page.shown
    assert page.shown.count(': <b onclick="steal()">"bold"</b>\n& more') == 2 * 2 * 12  # splits, columns, examples
    titles = [picture["aria-label"] for picture in page.all("svg")]
    assert len(titles) == 6 + 2 * 2
    assert "Loss over the steps: training, validation" in titles and "confusion matrix, test" in titles
    for words in ("resumed after step 20", "step skipped (31, 32)", "best step (50)", "always “<script>", "30.0 %"):
        assert words in page.shown, words
    assert "12345" not in page.shown  # of a table in run.json
    assert "everything else" in page.shown and "60 s" in page.shown
    rows = dict(
        re.findall(r"<tr><td>(\w+)</td><td class=\"mono\">.*?</td><td class=\"mono\">(.*)</td></tr>", page.text)
    )
    assert rows["seed"].endswith("command line") and rows["learning_rate"].endswith("recipe")
    assert "model_name_or_path" not in rows
    assert not list(folder.glob(".report*"))


def test_the_numbers_are_those_of_the_predictions(tmp_path):
    folder = write_run(tmp_path / "run")
    with open(folder / "predictions_test.csv", "w", encoding="utf-8") as file:
        file.write("index,label,label,prediction,p_no,p_yes\n")  # an input column is called label too
        for i, (label, p) in enumerate([("no", 0.9), ("no", 0.8), ("yes", 0.7), ("yes", 0.1), ("", 0.6)]):
            file.write(f"{i},text {i},{label},{'no' if p > 0.5 else 'yes'},{p},{1 - p}\n")
    found = read_predictions(folder / "predictions_test.csv")
    assert found.labels.tolist() == [0, 0, 1, 1] and found.predictions.tolist() == [0, 0, 0, 1]
    assert found.inputs == {"index": ["0", "1", "2", "3"], "label": ["text 0", "text 1", "text 2", "text 3"]}
    page = check_page(write_report(folder))
    assert "75.0 %" in page.shown and "66.7 %" in page.shown  # accuracy, F1 of yes
    assert "The weakest label is “yes”: F1 66.7 %, recall 50.0 % of 2 samples; most often predicted as “no” (1 t" in (
        page.shown
    )
    assert page.shown.index("text 2") < page.shown.index("text 1")  # the hardest first


def test_an_image_run_shows_its_hardest_images(tmp_path):
    folder = image_run(tmp_path / "run")
    page = check_page(write_report(folder))
    assert 0 < len(page.all("img")) <= 12
    assert "Breed_number_36_of_a_lo…" in page.shown  # in the confusion matrix
    kinds = {Path(path).stem for path in os.listdir(folder / "data")}
    from kit.report import _image
    from kit.report_reading import read_run_files

    run = read_run_files(folder)
    assert len(kinds) == 7
    for path in os.listdir(folder / "data"):
        with Image.open(io.BytesIO(base64.b64decode(_image(run, path).split(",")[1]))) as small:
            assert small.mode == "RGB" and 60 < np.asarray(small).mean() < 200, path  # neither black nor white
    assert _image(run, "gone.jpg") is None and _image(run, "a text about a .jpg") is None


def test_of_very_many_classes_those_with_the_most_errors_are_shown(tmp_path):
    folder = write_run(tmp_path / "run")
    write_predictions(folder, "test", [f"intent {i}" for i in range(150)], {"index": range(900)})
    page = check_page(write_report(folder))
    assert "Shown are the 60 labels with the most errors of 150." in page.shown
    assert sum(f"intent {i}" in page.shown for i in range(150)) == 150  # all in the table


def change(folder: Path, name: str, text: str | None) -> None:
    (folder / name).unlink() if text is None else (folder / name).write_text(text, "utf-8")


HALF_WRITTEN = {
    "running": (lambda folder: None, {"status": "running", "metrics": 30}, "step 28 of 60 (47 %)"),
    "torn line": (lambda folder: open(folder / "metrics.jsonl", "a").write('{"step": 6'), {}, "step 60 of 60"),
    "failed": (
        lambda folder: None,
        {"status": "failed", "cause": "KeyError: <x>", "traceback": "File <y>"},
        "File <y>",
    ),
    "no evaluation": (lambda folder: None, {"metrics": 5, "results": {}}, "No evaluation yet."),
    "no line": (lambda folder: change(folder, "metrics.jsonl", ""), {"results": {}}, "No training line yet."),
    "no metrics": (lambda folder: change(folder, "metrics.jsonl", None), {}, "No training line yet."),
    "no run.json": (lambda folder: change(folder, "run.json", None), {}, "run.json is missing."),
    "torn run.json": (lambda folder: change(folder, "run.json", '{"status'), {}, "run.json cannot be read"),
    "list as run.json": (lambda folder: change(folder, "run.json", "[]"), {}, "unknown"),
    "no settings": (lambda folder: change(folder, "settings.yaml", None), {}, "settings.yaml is missing."),
    "bad settings": (lambda folder: change(folder, "settings.yaml", "a: ["), {}, "settings.yaml cannot be read"),
    "old predictions": (
        lambda folder: change(folder, "predictions_test.csv", "index,label,probability\n0,no,0.5\n"),
        {},
        "predictions_test.csv cannot be read: its columns are not",
    ),
    "empty predictions": (lambda folder: change(folder, "predictions_test.csv", ""), {}, "csv cannot be read"),
    "torn predictions": (
        lambda folder: change(folder, "predictions_test.csv", "index,t,label,prediction,p_no,p_yes\n0,x,no,no,0.5\n"),
        {},
        "predictions_test.csv cannot be read",
    ),
    "probabilities not finite": (
        lambda folder: change(folder, "predictions_test.csv", "index,label,prediction,p_no,p_yes\n0,no,no,nan,nan\n"),
        {},
        "some probabilities are not finite",
    ),
    "hidden labels": (
        lambda folder: write_predictions(folder, "test", ["no", "y\nes"], {"index": range(9)}, labels=[""] * 9),
        {},
        "What ran",
    ),
}


@pytest.mark.parametrize("case", HALF_WRITTEN)
def test_whatever_is_missing_there_is_a_report(case, tmp_path):
    spoil, facts, says = HALF_WRITTEN[case]
    folder = write_run(tmp_path / "run", **facts)
    spoil(folder)
    page = check_page(write_report(folder))
    assert says in page.shown


def test_a_loss_that_is_not_finite_is_marked(tmp_path):
    folder = write_run(tmp_path / "run")
    row = {"step": 61, "epoch": 2.1, "loss": None, "learning_rate": 0.1, "grad_norm": None}
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    assert "Red cross: not finite (loss at step 61)." in check_page(write_report(folder)).shown


def test_a_long_run_makes_no_heavy_page(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=20_000, every=1000)
    page = check_page(write_report(folder))
    assert len(page.text) < 300_000


def test_what_is_no_run_or_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no such run directory"):
        write_report(tmp_path / "none")
    with pytest.raises(UserError, match="contains no run"):
        write_report(tmp_path)
    folder = write_run(tmp_path / "run")
    (folder / "report.html").mkdir()
    with pytest.raises(MachineError, match=r"report\.html cannot be written"):
        write_report(folder)
    assert not list(folder.glob(".report*"))


def test_a_report_needs_no_torch_and_the_script_says_where_it_is(tmp_path):
    folder = text_run(tmp_path / "my run")
    program = (
        "import sys; sys.path.insert(0, '.'); import report; report.main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(folder)],
        cwd=TEMPLATES,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [str(folder / "report.html"), "False"], done.stderr
    assert done.stderr == ""


# ---------------------------------------------------------------------------------------------------- comparison


def test_runs_that_differ_in_the_seed_are_one_group(tmp_path):
    seeds = [write_run(tmp_path / f"seed{seed}", numbers={"seed": seed}) for seed in range(3)]
    other = write_run(tmp_path / "other", numbers={"learning_rate": 2e-3})
    moved = write_run(tmp_path / "moved", data={"sha256": {"train": "e" * 64}})
    report.main([str(folder) for folder in (*seeds, other, moved)])
    page = check_page(tmp_path / "comparison.html")
    results, differences = page.text.split("What differs")
    rows = re.findall(r'<i class="dot (\w+)"></i>(.*?)</td><td class="number">(\d)<', results)
    assert [(color, count) for color, _, count in rows] == [("series0", "3"), ("series1", "1"), ("series2", "1")]
    measured = [0.5, 0.6, 0.7]
    assert f"{statistics.mean(measured):.4g} ± {statistics.stdev(measured):.2g}" in page.shown
    differences = differences[: differences.index("<h2>Curves")]
    assert re.findall(r"<tr><td>(.*?)</td>", differences) == ["learning_rate", "sha256 of train"]
    assert {picture["aria-label"].split(" over")[0] for picture in page.all("svg")} == {
        *("eval_loss", "eval_accuracy", "eval_f1", "loss", "learning_rate", "grad_norm", "samples_per_second"),
        "memory_gb",
    }
    assert page.text.count("fill-opacity: 0.2") == 8  # the band of the seeds, once in each chart


def test_splits_carved_by_seed_are_no_difference(tmp_path):
    folders = [
        write_run(
            tmp_path / str(seed),
            numbers={"seed": seed},
            data={"validation_carved": True, "sha256": {"train": f"{seed}" * 64}},
        )
        for seed in range(2)
    ]
    write_comparison(folders, tmp_path / "two.html")
    page = check_page(tmp_path / "two.html")
    assert "Nothing but the seed." in page.shown
    assert 'class="dot series0"' in page.text and 'class="dot series1"' not in page.text  # one group


def test_an_unfinished_run_is_compared_by_what_is_there(tmp_path):
    folders = [
        write_run(tmp_path / "a", metrics=3, status="failed", results={}),
        write_run(tmp_path / "b", numbers={"seed": 1, "learning_rate": 0.1}),
    ]
    report.main([*map(str, folders), "--output", str(tmp_path / "x.html")])
    page = check_page(tmp_path / "x.html")
    assert "failed" in page.shown
    # One colour for each run, in charts too where the other is missing.
    legends = re.findall(r"<figcaption>(\w+)\s*(.*?)\s*</figcaption>", page.text, re.DOTALL)
    colors = {title: re.findall(r"dot (\w+)", legend) for title, legend in legends}
    assert colors["loss"] == ["series0", "series1"] and colors["eval_loss"] == ["series1"]


def test_options_that_make_no_sense_are_refused(tmp_path):
    a, b = (str(write_run(tmp_path / name)) for name in "ab")
    for args, says in (
        ([a, b, "--follow"], "one run, not 2"),
        ([a, "--output", "x.html"], "for several runs"),
        ([a, b, "--output", str(tmp_path / "train.csv")], "ends in .html"),
    ):
        with pytest.raises(UserError, match=says):
            report.main(args)
    assert not list(tmp_path.glob("*.html"))


# -------------------------------------------------------------------------------------------------------- follow


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(report, "INTERVAL", 0.01)
    monkeypatch.setattr(report, "RENEWAL", 0.0)


def set_status(folder: Path, status: str) -> None:
    facts = json.loads((folder / "run.json").read_text("utf-8")) | {"status": status}
    (folder / "new").write_text(json.dumps(facts), "utf-8")
    os.replace(folder / "new", folder / "run.json")


@pytest.mark.timeout(60)
def test_follow_prints_each_line_once_and_ends_with_the_run(quick, monkeypatch, tmp_path):
    folder = write_run(tmp_path / "run", num_steps=3, status="running")
    path, said = folder / "metrics.jsonl", []
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text(lines[0], "utf-8")
    monkeypatch.setattr(report, "print", lambda text, flush=True: said.append(text), raising=False)

    def train():
        with open(path, "a", encoding="utf-8") as file:
            for text, expected in ((lines[1][:9], 1), (lines[1][9:] + lines[2], 3)):  # a line seen half-written
                file.write(text)
                file.flush()
                time.sleep(0.1)
                while len(said) < expected:
                    time.sleep(0.01)
        path.write_text(lines[0], "utf-8")  # resumed from step 1
        while len(said) < 4:
            time.sleep(0.01)
        assert "running" in Page(folder / "report.html").shown
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines[1])
        set_status(folder, "stopped")

    writer = threading.Thread(target=train, daemon=True)
    writer.start()
    report.main([str(folder), "--follow"])
    writer.join()
    assert [line.split()[1] if line.startswith("step") else line for line in said] == [
        *("1", "2", "3"),
        "resumed    after step 1",
        "2",
        f"stopped    {folder / 'report.html'}",
    ]
    assert "stopped" in check_page(folder / "report.html").shown


@pytest.mark.timeout(60)
def test_follow_notices_a_run_that_was_killed(quick, monkeypatch, tmp_path, capsys):
    from filelock import FileLock

    monkeypatch.setattr(report, "QUIET", 0.1)
    folder = write_run(tmp_path / "run", num_steps=2, status="running")
    lock = FileLock(folder / ".lock", thread_local=False)  # a timer releases it
    lock.acquire()
    threading.Timer(1.0, lock.release).start()
    began = time.monotonic()
    report.main([str(folder), "--follow"])
    assert time.monotonic() - began > 0.9  # it was alive until then
    assert capsys.readouterr().out.splitlines()[-1].startswith("killed")


def test_follow_ends_quietly_on_ctrl_c(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=2, status="running")
    command = [sys.executable, "report.py", str(folder), "--follow"]
    process = subprocess.Popen(command, cwd=TEMPLATES, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("step 1")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""


# ------------------------------------------------------------------------------------------------- in a browser

WIDTHS = (400, 900, 1600)
MEASURE = """
const found = [];
const luminance = color => { const [r, g, b] = color.match(/[\\d.]+/g).map(v => { v /= 255;
  return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05); };
window.onload = () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, style = element => frame.contentWindow.getComputedStyle(element);
    page.querySelectorAll("details").forEach(element => { element.open = true; });
    const root = page.documentElement, pictures = [...page.querySelectorAll("svg")];
    const outside = pictures.flatMap(svg => { const box = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("text")].filter(text => { const b = text.getBoundingClientRect();
        return b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1; })
        .map(text => svg.getAttribute("aria-label") + ": " + text.textContent); });
    const ground = style(page.body).backgroundColor, figure = page.querySelector("figure");
    const inks = [...page.querySelectorAll("p, td, h2, .badge")].map(element => contrast(style(element).color, ground));
    const marks = figure ? [...page.querySelectorAll("figure svg text")].map(
      text => contrast(style(text).fill, style(figure).backgroundColor)) : [];
    found.push({page: frame.title, width: frame.width, wide: root.scrollWidth, outside,
      pictures: pictures.length, dark: luminance(ground) < 0.2, contrast: Math.min(...inks, ...marks),
      empty: pictures.filter(svg => svg.getBoundingClientRect().height < 50).length +
        [...page.images].filter(image => !image.naturalWidth).length});
  }
  document.querySelector("pre").textContent = JSON.stringify(found);
};
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """Pages of every kind, by name."""
    folder = tmp_path_factory.mktemp("pages")
    text = text_run(folder / "text", NASTY, resumes=[20], skipped=[31], time={"data": 9.0})
    failed = write_run(folder / "failed", status="failed", cause="x" * 300, traceback="File " + "y" * 300, metrics=9)
    long_path = write_run(folder / "long", numbers={"model_name_or_path": "/a/" + "long" * 60, "seed": 1}, metrics=0)
    made = {path.parent.name: path for path in map(write_report, (text, failed, long_path))}
    made["images"] = write_report(image_run(folder / "images"))
    made["comparison"] = folder / "comparison.html"
    write_comparison([text, failed, long_path], made["comparison"])
    return {name: path.read_text("utf-8") for name, path in made.items()}


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_pages_fit_their_window_and_can_be_read_light_and_dark(is_dark, pages, tmp_path):
    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )
    if not browser:
        pytest.skip("no Chromium on the path: the pages were not looked at in a browser")
    frames = "".join(
        f'<iframe title="{name}" width="{width}" height="800" srcdoc="{html.escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    frame = tmp_path / "frames.html"
    frame.write_text(f'<!doctype html><meta charset="utf-8"><pre></pre>{frames}<script>{MEASURE}</script>', "utf-8")
    options = "--headless --no-sandbox --disable-gpu --disable-background-networking --enable-logging=stderr --dump-dom"
    options = [
        *options.split(),
        f"--user-data-dir={tmp_path}",
        f"--blink-settings=preferredColorScheme={int(not is_dark)}",
    ]
    done = subprocess.run(
        [browser, *options, frame.as_uri()], capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(html.unescape(re.search("<pre>(.*?)</pre>", done.stdout, re.DOTALL)[1]))
    assert len(found) == len(pages) * len(WIDTHS)
    for page in found:
        assert page["wide"] <= int(page["width"]), page
        assert page["outside"] == [] and page["empty"] == 0, page
        assert page["dark"] == is_dark
        assert page["contrast"] >= 4.5, page
    assert sum(page["pictures"] for page in found) > 60
