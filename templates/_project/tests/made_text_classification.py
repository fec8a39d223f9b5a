"""A tiny BERT with random weights and made sentence pairs, for `make demo` and the tests.

python tests/made_text_classification.py made
"""

import sys
from pathlib import Path

from tiny import make_tiny, settings_for


def make(folder: Path, learnable: bool = False) -> dict:
    """Fill `folder`; return the settings of a run on it: 37 pairs in steps of 8, micro-batches of 3."""
    folder.mkdir(parents=True, exist_ok=True)
    return settings_for(make_tiny(folder, learnable))


if __name__ == "__main__":
    make(Path(sys.argv[1]), learnable=True)
