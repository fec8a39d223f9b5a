"""What a run ran with: versions of the libraries against those that were tested, and the commit of this code."""

import subprocess
from importlib import metadata
from pathlib import Path

# What the tests ran with: from this version to below that one, as in pyproject.toml.
TESTED = {
    "torch": ("2.14", "3"),
    "accelerate": ("1.15", "2"),
    "transformers": ("5.20", "6"),
    "datasets": ("5.2", "6"),
    "evaluate": ("0.4.6", "0.5"),
    "timm": ("1.0.31", "2"),
    "torchvision": ("0.29", "1"),
    "scikit-learn": ("1.7", "2"),
    "numpy": ("2.2", "3"),
    "safetensors": ("0.8", "1"),
}


def versions() -> dict[str, str]:
    """Return the version of each library that a template may use and that is installed."""
    found = {}
    for name in TESTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def untested(versions: dict[str, str]) -> list[str]:
    """Return a line for each library whose version lies outside the tested range."""
    from packaging.version import Version

    return [
        f"{name} {version} is outside the tested range ({TESTED[name][0]} to below {TESTED[name][1]})"
        for name, version in versions.items()
        if not Version(TESTED[name][0]) <= Version(version) < Version(TESTED[name][1])
    ]


def git_commit() -> str | None:
    """Return the commit that this file belongs to, with '-dirty' where files differ; None outside of a repository."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
