"""Predict the labels of images: one file, or all below a folder, with or without a folder for each class."""

from collections.abc import Iterator
from pathlib import Path

from kit.errors import UserError
from kit.predictions import FinishedRun


def check_data(data: str) -> None:
    """Refuse what is no image and no folder."""
    path = Path(data).expanduser()
    if not path.exists():
        raise UserError(f"DATA: no such file or folder: {data}")
    if path.is_file():
        from kit.image_files import SUFFIXES

        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"DATA: {data} is no image ({', '.join(sorted(SUFFIXES))}): this run classifies images")


def find_images(data: str, label_names: tuple[str, ...]):
    """Return the images sorted by name, as `ImageItem`s, and notes.

    The label is a folder that has the name of a class, or is in the file's name as class_number.jpg; else -1.
    """
    from kit.image_files import ImageItem
    from kit.image_folders import class_from_name, list_folder

    path, notes = Path(data).expanduser(), []
    if path.is_file():
        files = {path.name: str(path)}
    else:
        listing = list_folder(path.resolve())
        files, notes = listing.files, listing.notes
        ignored = ", ".join(f"{kind} ({count})" for kind, count in sorted(listing.ignored.items()))
        if not files:
            raise UserError(f"DATA: no images in {data}, only: {ignored or 'nothing'}")
        if ignored:
            notes.append(f"ignored in {data}: {ignored}")
    ids = {name: number for number, name in enumerate(label_names)}

    def label_of(name: str) -> int:
        known = [part for part in [*name.split("/")[:-1], class_from_name(name)] if part in ids]
        return ids[known[0]] if known else -1

    items = [ImageItem(name, label_of(name), place) for name, place in sorted(files.items())]
    unlabelled = [item.name for item in items if item.label < 0]
    if 0 < len(unlabelled) < len(items):
        notes.append(f"{len(unlabelled)} images are in no folder of a known class, such as {unlabelled[0]}")
    return items, notes


class ImagePredictor:
    """The model of a run of the image template, and the images for it."""

    def __init__(self, template, settings, run: FinishedRun, data: str):
        import timm
        from huggingface_hub.constants import HF_HOME

        from kit.image_checks import check_images
        from kit.image_models import loading, timm_arguments
        from kit.image_sources import ImageSplits

        items, self.notes = find_images(data, run.label_names)
        splits = ImageSplits([], [], items, run.label_names, {"data_dir": data, "dataset_name": None}, [])
        try:
            splits = check_images(splits, Path(HF_HOME) / "image_scans", skip_bad_images=False)
        except UserError as error:  # without the option of the training
            raise UserError(str(error).split(", or leave them out")[0]) from None
        self.notes += splits.notes
        with loading(str(run.model)):
            # Not build_model: it gives a model a new head.
            arguments = timm_arguments(str(run.model), settings.image_size, len(run.label_names))
            self.model = timm.create_model(pretrained=True, **arguments)
        self.preprocessing = timm.data.resolve_data_config({"img_size": settings.image_size}, model=self.model)
        self.rows = template.build_datasets(settings, splits, self.preprocessing)[2]
        self.items, self.lengths, self.collate, self.names = splits.test, None, template.collate, ["name"]
        self.label_names = run.label_names

    def inputs(self) -> Iterator[list]:
        for item in self.items:
            yield [item.name]

    def on_device(self, loader, device):
        """Return the batches as the model takes them: normalised on the device."""
        from kit.images import NormalisedBatches, layout_for

        self.model.to(memory_format=layout_for(device))
        mean, std = self.preprocessing["mean"], self.preprocessing["std"]
        return NormalisedBatches(loader, mean, std, len(self.label_names), device)
