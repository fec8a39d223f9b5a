"""Options of the image template that can be refused before anything heavy is imported."""

from pathlib import Path

from kit.errors import UserError

PETS = "oxford-iiit-pet"  # torchvision's name of the folder, and our dataset_name


def check_image_source(data_dir: str | None, dataset_name: str | None) -> None:
    """Refuse settings that name no images."""
    if not data_dir and dataset_name in (None, PETS):
        raise UserError(f"no images: give data_dir (a folder) or dataset_name; for {PETS} both")
    if data_dir and dataset_name is None and not Path(data_dir).is_dir():
        raise UserError(f"data_dir: no such folder: {data_dir}")


def check_model_source(name: str) -> None:
    """Refuse a path that holds no saved timm model. Imports nothing heavy."""
    path = Path(name)
    is_path = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or path.suffix == ".safetensors"
    if is_path and not path.exists():
        raise UserError(f"model_name_or_path: no such file or folder: {name}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"model_name_or_path: folder {name} has no config.json: it holds no saved timm model")
