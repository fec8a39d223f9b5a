"""The pictures of a report, drawn by matplotlib, as SVG that takes its colours from the page: light or dark."""

import html
import io
import math
import re
import warnings
from dataclasses import dataclass, field
from itertools import pairwise

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

# What is drawn in these colours comes out in the page's variable of that name.
SERIES = [f"series{i}" for i in range(8)]
COLORS = {name: f"#0102{i:02x}" for i, name in enumerate(["ink", "faint", "line", "good", "bad", *SERIES])}
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a label may hold dollar signs
    "font.size": 10,
    "text.color": COLORS["ink"],
    "axes.edgecolor": COLORS["faint"],
    "axes.labelcolor": COLORS["faint"],
    "xtick.color": COLORS["faint"],
    "ytick.color": COLORS["faint"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": COLORS["line"],
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
}
MOST_POINTS = 400  # of one curve: more cannot be told apart and would make the page heavy
MOST_CLASSES = 120  # of a confusion matrix: names and cells of more cannot be read


@dataclass
class Curve:
    """One curve: `values` [n] over `steps` [n], NaN where there is none; a band where `low` and `high` are given."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    color: str = SERIES[0]


@dataclass
class Marks:
    """The steps to mark in every chart of a run."""

    resumes: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    best: int | None = None


def draw_curves(title: str, curves: list[Curve], marks: Marks) -> Markup:
    """Return a chart of curves over the steps as SVG, on a logarithmic scale where they span more than a factor 100."""

    def draw(axes: Axes) -> None:
        for curve in curves:
            color, shown = COLORS[curve.color], _thinned(curve)
            marker = "o" if np.isfinite(shown.values).sum() <= 40 else None
            axes.plot(shown.steps, shown.values, color=color, marker=marker, markersize=3)
            if shown.low is not None:
                axes.fill_between(shown.steps, shown.low, shown.high, color=color, alpha=0.2, linewidth=0)
            missing = curve.steps[~np.isfinite(curve.values)]
            axes.plot(missing, np.full(len(missing), 0.02), "x", color=COLORS["bad"], transform=_at_the_foot(axes))
        values = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
        if len(values) and values.min() > 0 and values.max() > 100 * values.min():
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        for step in marks.resumes:
            axes.axvline(step, color=COLORS["faint"], linewidth=1, linestyle=":")
        if marks.best is not None:
            axes.axvline(marks.best, color=COLORS["good"], linewidth=1)
        skipped = marks.skipped
        axes.plot(skipped, np.full(len(skipped), 0.02), "|", color=COLORS["bad"], transform=_at_the_foot(axes))
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)

    return _draw(title, (5.4, 3.0), draw)


def _at_the_foot(axes: Axes):
    return axes.get_xaxis_transform()  # x in steps, y from 0 (foot) to 1


def _thinned(curve: Curve) -> Curve:
    """Return a long curve as the means of its bins, with the band of their extremes."""
    if len(curve.steps) <= MOST_POINTS:
        return curve
    low, high = (curve.values if edge is None else edge for edge in (curve.low, curve.high))
    kept = []
    for first, last in pairwise(np.linspace(0, len(curve.steps), MOST_POINTS // 2 + 1).astype(int)):
        is_there = np.isfinite(curve.values[first:last])
        mean, *edges = (
            edge(values[first:last][is_there]) if is_there.any() else math.nan
            for edge, values in ((np.mean, curve.values), (np.min, low), (np.max, high))
        )
        kept.append((curve.steps[last - 1], mean, *edges))
    return Curve(curve.name, *np.array(kept).T, color=curve.color)


def draw_confusion(title: str, label_names: list[str], confusion: np.ndarray) -> Markup:
    """Return a confusion matrix [k, k] (row: label, column: prediction) as SVG; the colour is the share of the row."""
    k = len(label_names)
    names = [_short(name) for name in label_names]
    size = 10 if k <= 20 else 8
    is_turned = k > 4 or max(map(len, names)) > 10  # names below the matrix, where they would run into each other
    margin = 0.5 + 0.0085 * size * max(map(len, names))
    side = k * min(0.9, max(0.16, 9 / k))  # inches

    def draw(axes: Axes) -> None:
        share = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
        picture = np.zeros((k, k, 4))  # red, green, blue, opacity: so that it fits a light and a dark page
        picture[..., :3] = np.where(np.eye(k, dtype=bool)[..., None], (0.05, 0.62, 0.45), (0.86, 0.2, 0.2))
        picture[..., 3] = 0.85 * share**0.5  # the root shows rare errors too
        axes.imshow(picture, interpolation="none")
        if k <= 40:
            for row, column in zip(*confusion.nonzero(), strict=True):
                count = f"{confusion[row, column]:d}"
                axes.text(column, row, count, ha="center", va="center", fontsize=size if len(count) < 4 else size - 2)
        turned = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"} if is_turned else {}
        axes.set_xticks(range(k), names, fontsize=size, **turned)
        axes.set_yticks(range(k), names, fontsize=size)
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        edges = np.arange(k + 1) - 0.5
        axes.hlines(edges, edges[0], edges[-1], color=COLORS["line"], linewidth=0.5)
        axes.vlines(edges, edges[0], edges[-1], color=COLORS["line"], linewidth=0.5)
        axes.set_xlabel("predicted")
        axes.set_ylabel("label")

    foot = margin if is_turned else 0.6
    return _draw(title, (side + margin + 0.2, side + foot + 0.1), draw, (margin, foot, 0.2, 0.1))


def draw_calibration(title: str, bins: list[dict]) -> Markup:
    """Return the reliability diagram of kit.scores.calibration's bins as SVG."""

    def draw(axes: Axes) -> None:
        width = bins[0]["high"] - bins[0]["low"]
        for part in bins:
            left, accuracy = part["low"], part["accuracy"]
            axes.bar(left, accuracy, width * 0.94, align="edge", color=COLORS[SERIES[0]], alpha=0.6)
            axes.text(left + width / 2, 0.02, part["count"], ha="center", fontsize=9)
        axes.plot([0, 1], [0, 1], color=COLORS["faint"], linestyle="--", linewidth=1)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="probability of the prediction", ylabel="share that is right")
        axes.set_yticks(np.linspace(0, 1, 6))

    return _draw(title, (5.4, 3.4), draw)


def _short(name: str, longest: int = 24) -> str:
    name = "".join(sign if sign.isprintable() else " " for sign in name)
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _draw(title: str, inches: tuple[float, float], draw, margins=(0.75, 0.5, 0.2, 0.2)) -> Markup:
    """Return what `draw(axes)` draws as an SVG element to stand in a page, described by `title`.

    `inches` are width and height, `margins` are left, below, right and above the axes. They are given, since having
    matplotlib measure all texts takes longer than drawing.
    """
    # The names of parts must differ between the pictures of a page: hence the salt. Signs that matplotlib's own font
    # lacks are of no concern, since the browser's is used.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": title}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(inches)
        (width, height), (left, below, right, above) = inches, margins
        figure.subplots_adjust(left / width, below / height, 1 - right / width, 1 - above / height)
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(file.getvalue(), title)


def _for_page(svg: str, title: str) -> Markup:
    """Return a file of matplotlib's as an element of a page, with nothing in it that is not needed there."""
    svg = svg[svg.index("<svg") :]
    head, body = svg.split(">", 1)
    width, height, box = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt" viewBox="([^"]+)"', head).groups()
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # not unique within the page
    body = re.sub(
        r"font-family: [^;\"]*;? ?|font: ([\d.]+px) [^;\"]*", lambda m: f"font-size: {m[1]}" if m[1] else "", body
    )
    body = re.sub(r"[ \n]*\n *", "\n", body)
    for name, color in COLORS.items():
        body = body.replace(color, f"var(--{name})")
    return Markup(
        f'<svg role="img" aria-label="{html.escape(title)}" width="{width}" height="{height}" viewBox="{box}">{body}'
    )
