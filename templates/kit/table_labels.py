"""Turn the labels people write into class names, and name those that look like a mistake."""

import ast
import numbers
import re
import reprlib
import unicodedata
from collections.abc import Iterable

HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON can hold one, UTF-8 cannot
INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
DECIMAL = re.compile(r"[+-]?[0-9]*\.[0-9]+([eE][+-]?[0-9]+)?")
INVISIBLE = re.compile("[\u034f\u115f\u1160\u3164\ufe00-\ufe0f]")  # beside the format characters (category Cf)
MULTI_LABEL = "multi-label data are not supported: one label a row is needed, without brackets"


def label_name(value, class_names: list[str] | None = None) -> str | None:
    """Return a label as a class name: words, 'True', whole numbers of any type as '3'; None for empty, null and -1.

    `class_names` are those of a ClassLabel column. Raises `ValueError` with the reason for everything else.
    """
    if isinstance(value, str):
        value = value.strip()
        if INTEGER.fullmatch(value):
            value = int(value)
        elif DECIMAL.fullmatch(value):
            value = float(value)
        elif _is_list(value):
            raise ValueError(f"is {reprlib.repr(value)}: {MULTI_LABEL}")
        elif not HALF_CHARACTER.search(value):
            return value if _visible(value) else None
    if value is None or (isinstance(value, numbers.Number) and (value == -1 or value != value)):
        return None
    if isinstance(value, (list, tuple, set)):
        raise ValueError(f"is {reprlib.repr(value)}: {MULTI_LABEL}")
    if isinstance(value, numbers.Number) and value == value // 1:
        if class_names is None:
            return str(value) if isinstance(value, bool) else str(int(value))
        if not 0 <= value < len(class_names):
            raise ValueError(f"is {value}, but the file names {len(class_names)} classes, 0 to {len(class_names) - 1}")
        return class_names[int(value)]
    cure = " (bytes: cast the column to strings)" if isinstance(value, bytes) else ""
    raise ValueError(
        f"is {reprlib.repr(value)}: a label is a word or a whole number (regression is not supported){cure}"
    )


def class_order(labels: Iterable[str]) -> list[str]:
    """Return the labels in the order of their class ids: by value where all are numbers, else by code point."""
    labels = list(labels)
    return sorted(labels, key=int if all(re.fullmatch(r"-?[0-9]{1,4000}", label) for label in labels) else str)


def as_truth_values(names: list[str], known: Iterable[str]) -> list[str]:
    """Return the labels with 'true' and FALSE as True and False, where the known ones are nothing but truth values."""
    truth = {name.lower(): name for name in known}
    is_truth = truth.keys() == {"true", "false"} and len(truth) == len(list(known))
    return [truth.get(name.lower(), name) for name in names] if is_truth else names


def look_alikes(labels: Iterable[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Return groups of labels that look the same on a screen, and groups that differ in case or spelling of form only.

    The first differ in invisible characters, kinds of blanks or Unicode forms; the second in upper and lower case,
    in '-', '_' and blanks, or in what Unicode calls compatible characters (NFKC).
    """
    seen, close = {}, {}
    for label in labels:
        seen.setdefault(_visible(label), []).append(label)
    for visible, group in seen.items():
        words = " ".join(re.split(r"[-_\s]+", unicodedata.normalize("NFKC", visible).casefold()))
        close.setdefault(words if any(map(str.isalpha, words)) else visible, []).extend(group)
    same = [group for group in seen.values() if len(group) > 1]
    return same, [group for group in close.values() if len(group) > 1 and group not in same]


def look_alike_of(label: str, labels: Iterable[str]) -> str | None:
    """Return the one of `labels` that `label` was probably meant to be."""
    same, close = look_alikes(dict.fromkeys([label, *labels]))
    return next((group[1] for group in [*same, *close] if group[0] == label), None)


def _visible(text: str) -> str:
    """Return what a screen shows of `text`, blanks as one space."""
    if text.isascii() and text.isprintable() and "  " not in text:
        return text.strip()
    shown = (
        c for c in unicodedata.normalize("NFC", text) if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc")
    )
    return " ".join(INVISIBLE.sub("", "".join(shown)).split())


def _is_list(text: str) -> bool:
    """Return whether `text` is how a program prints a list, a tuple or a set."""
    if not re.fullmatch(r"\[.*\]|\(.*\)|\{.*\}", text, re.DOTALL):
        return False
    if re.fullmatch(r"\[[\s0-9.]*\]|\[.*,.*\]|\[\s*(['\"]).*\1\s*\]", text, re.DOTALL):  # NumPy prints no commas
        return True
    try:
        return isinstance(ast.literal_eval(text), (list, tuple, set, dict))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
