"""Pretrained text models: whether a folder holds one, and whether what was loaded can do its work."""

from contextlib import contextmanager
from pathlib import Path

from kit.errors import UserError, one_line


def check_model_folder(name: str) -> None:
    """Refuse a path that holds no saved model with its tokenizer. Imports nothing heavy."""
    folder = Path(name)
    if (folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2) and not folder.is_dir():
        raise UserError(f"model_name_or_path: no such folder: {name}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"model_name_or_path: folder {name} has no config.json: it holds no saved model")
    if folder.is_dir() and not any(path for kind in ("tokenizer*", "vocab*", "*.model") for path in folder.glob(kind)):
        raise UserError(
            f"model_name_or_path: folder {name} has no tokenizer: save one there with tokenizer.save_pretrained"
        )


@contextmanager
def loading(name: str):
    """Turn what goes wrong while a model is loaded into one line; silence the library's own report about new layers."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()  # they load and write in moments, and every process would draw one
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model_name_or_path {name}: cannot be loaded ({one_line(error)[:200]}). Ways on: a folder with a saved"
            " model, a cache (HF_HOME) filled on a machine with a network, or `make demo`"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def renew_head(model, saved, label_names: tuple[str, ...]) -> list[str]:
    """Give a loaded model a new classification layer unless the saved one is for these labels; return a note.

    `saved` is the configuration of the saved model. A head that was trained for other labels would give its outputs
    wrong names.
    """
    from transformers import AutoModelForSequenceClassification

    names = tuple(saved.id2label.values())
    if not any("ForSequenceClassification" in name for name in saved.architectures or ()):
        return ["the classification layer is new: the saved model has none"]
    if len(names) == len(label_names) and (names == label_names or names[0] == "LABEL_0"):
        return ["the classification layer is the saved one: it has the same labels"]
    fresh = AutoModelForSequenceClassification.from_config(model.config)
    for name, layer in fresh.named_children():
        if name != model.base_model_prefix:
            getattr(model, name).load_state_dict(layer.state_dict())
    return [f"the classification layer is new: the saved one has the labels {', '.join(names[:20])}"]


def padding_notes(tokenizer) -> list[str]:
    """Return what the user should know about how inputs are padded."""
    if tokenizer.padding_side == "right":
        return []
    return ["the tokenizer pads on the left: dropout masks depend on the length of the micro-batch"]


def assert_fits(model, tokenizer, name: str, max_length: int, num_texts: int, missing_keys: set[str]) -> None:
    """Raise `UserError` where a loaded model cannot do its work; `missing_keys` are those that its files lacked."""
    if fault := _misfit(model, tokenizer, max_length, num_texts, missing_keys):
        raise UserError(f"model_name_or_path {name}: {fault}")


def _misfit(model, tokenizer, max_length: int, num_texts: int, missing_keys: set[str]) -> str | None:
    import torch

    body = {name for name, _ in model.base_model.named_parameters(prefix=model.base_model_prefix)}
    if len(body & missing_keys) > len(body) / 2:  # some layers may be new, such as a pooler
        return f"its weights are of another model: {len(body & missing_keys)} of {len(body)} tensors are missing"
    if len(tokenizer) > (known := model.get_input_embeddings().num_embeddings):
        return (
            f"its tokenizer has {len(tokenizer)} tokens, the model knows {known}: save the model's own tokenizer there"
        )
    if tokenizer.pad_token_id is None:
        return "its tokenizer has no padding token: take an encoder such as bert-base-cased, or set and save one"
    special = tokenizer.num_special_tokens_to_add(pair=num_texts == 2)
    if max_length <= special:
        return f"max_length {max_length} leaves no room for text beside {special} special tokens: raise it"
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            reserved = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            if max_length > (longest := module.num_embeddings - reserved):
                return f"it reads {longest} tokens at most: set max_length to that or less, not {max_length}"
    return None
