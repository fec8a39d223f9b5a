"""`make export`: the ONNX file computes what PyTorch computes, for any batch and length, and knows its labels."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

import export
from kit.errors import UserError

LABELS = ["no", "yes", "vielleicht schön"]


def make_run(folder: Path, **settings) -> Path:
    (folder / "best").mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "done"}')
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="module")
def text_run(tiny, tmp_path_factory) -> Path:
    """A run of a tiny BERT with three labels, exported."""
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = make_run(tmp_path_factory.mktemp("text") / "a run", max_length=48, text_columns=["sentence1", "sentence2"])
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny / "bert", id2label=dict(enumerate(LABELS)), ignore_mismatched_sizes=True
    )
    model.save_pretrained(run / "best")
    AutoTokenizer.from_pretrained(tiny / "bert").save_pretrained(run / "best")
    export.main([str(run)])
    return run


def session_of(run: Path):
    import onnxruntime

    return onnxruntime.InferenceSession(run / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])


def metadata_of(session) -> dict:
    return session.get_modelmeta().custom_metadata_map


def test_a_text_model_gives_the_logits_of_pytorch_for_any_batch_and_length(text_run):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text_run / "best")
    model = AutoModelForSequenceClassification.from_pretrained(text_run / "best").eval()
    session = session_of(text_run)
    for first, second in (
        (["cat"], ["dog"]),
        (["cat", "the old tree"], ["dog runs", "a house"]),
        (["cat " * 40] * 3, ["dog"] * 3),
    ):
        inputs = tokenizer(first, second, truncation=True, max_length=48, padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).logits
        (logits,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
        assert logits.shape == (len(first), 3)
        # fp32 in another order of operations; the logits are about 0.1.
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-5)
    metadata = metadata_of(session)
    assert json.loads(metadata["labels"]) == LABELS
    assert metadata["task"] == "text-classification"
    assert json.loads(metadata["preprocessing"]) == {"text_columns": ["sentence1", "sentence2"], "max_length": 48}
    assert [path.name for path in text_run.glob("*onnx*")] == ["onnx"]  # nothing unfinished is left


def test_an_export_that_differs_from_pytorch_is_refused_and_the_old_file_stays(text_run, tmp_path, monkeypatch, capsys):
    import torch
    from transformers import AutoModelForSequenceClassification

    run = tmp_path / "run"
    shutil.copytree(text_run, run)
    before = (run / "onnx" / "model.onnx").read_bytes()
    monkeypatch.setattr(export, "convert", lambda exported, path: path.write_bytes(before))
    export.main([str(run)])
    assert capsys.readouterr().out.count("largest difference") == 5

    model = AutoModelForSequenceClassification.from_pretrained(run / "best")
    with torch.no_grad():
        model.classifier.bias[2] += 2e-4
    model.save_pretrained(run / "best")
    with pytest.raises(UserError, match=r"differ by more than 0\.0001: nothing is written"):
        export.main([str(run)])
    assert (run / "onnx" / "model.onnx").read_bytes() == before
    assert "2.0e-04" in capsys.readouterr().out


def test_an_image_model_gives_the_logits_of_pytorch_for_any_batch(tmp_path):
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    import timm
    import torch
    from timm.models import save_for_hf

    run = make_run(tmp_path / "run", image_size=32)
    torch.manual_seed(0)
    model = timm.create_model("test_convnext", num_classes=3)
    config = timm.data.resolve_data_config({"img_size": 32}, model=model)
    save_for_hf(model, str(run / "best"), {"label_names": LABELS}, data_config=config, safe_serialization=True)
    export.main([str(run)])
    session = session_of(run)
    for batch in (1, 4):
        images = torch.rand(batch, 3, 32, 32)
        with torch.no_grad():
            expected = model.eval()(images)
        (logits,) = session.run(["logits"], {"image": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-5)
    metadata = metadata_of(session)
    assert json.loads(metadata["labels"]) == LABELS
    preprocessing = json.loads(metadata["preprocessing"])
    assert preprocessing["input_size"] == [3, 32, 32]
    assert preprocessing["mean"] == list(config["mean"])


def test_a_mistake_is_one_line(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", max_length=8)
    for arguments, words in (
        ([str(tmp_path / "none")], "no such run directory"),
        ([str(run), "--which", "final"], "has no final/: its status is done"),
        ([str(run)], r"best has no config\.json"),
    ):
        with pytest.raises(UserError, match=words) as mistake:
            export.main(arguments)
        assert len(str(mistake.value).splitlines()) == 1
    (run / "best" / "config.json").write_text("{}")
    monkeypatch.setattr(export, "PACKAGES", ("onnx_that_nobody_has",))
    with pytest.raises(UserError, match=r"needs onnx_that_nobody_has, not installed here: pip install '\.\[onnx\]'"):
        export.main([str(run)])
