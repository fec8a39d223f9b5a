"""Pretrained image models of timm: how to load one, why one cannot be loaded, and its frozen parts."""

from contextlib import contextmanager
from pathlib import Path
from types import MethodType

from kit.errors import UserError, one_line


@contextmanager
def loading(name: str):
    """Turn what goes wrong while timm loads a model into one line: an unknown name, or a missing network."""
    import timm
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, TypeError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        where, reason = f"model_name_or_path {name}", one_line(error)[:200]
        ways = "a cache (HF_HOME) filled on a machine with one, a folder or file with timm weights, --pretrained false"
        if timm.is_model(name):
            raise UserError(
                f"{where}: timm knows the name, but could not load its weights: is there a network? Ways on: {ways}"
                f" ({reason})"
            ) from error
        similar = timm.list_models(f"*{Path(name).stem.split('.')[0]}*")[:3]
        hint = f"a timm name such as {', '.join(similar)}, " if similar else ""
        raise UserError(f"{where}: cannot be loaded ({reason}). Ways on: {hint}{ways}") from error


def timm_arguments(name: str, image_size: int, num_classes: int) -> dict:
    """Return the arguments of `timm.create_model` for a timm name, a folder in timm's form or a .safetensors file."""
    import timm

    path, overlay = Path(name), None
    if path.is_dir():
        name = f"local-dir:{path}"
    elif path.suffix == ".safetensors":
        name, overlay = path.stem, {"file": str(path)}
    return timm.models.resolve_model_input_args(
        name, {"img_size": image_size}, pretrained_cfg_overlay=overlay, num_classes=num_classes
    )


def head_parameters(model) -> list:
    """Return the parameters of the classification layer, or layers: some models have two."""
    layers = model.get_classifier()
    return [
        parameter for layer in (layers if isinstance(layers, tuple) else (layers,)) for parameter in layer.parameters()
    ]


def freeze_backbone(model) -> None:
    """Leave only the head to train. Frozen layers stay in evaluation mode: their BatchNorm statistics do not move."""
    model.requires_grad_(False)
    for parameter in head_parameters(model):
        parameter.requires_grad_(True)
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
            module.train = MethodType(_stay, module)


def _stay(module, mode: bool = True):
    return module
