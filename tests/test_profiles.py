"""Profiles: those in configs/ start what they say, and what people and `accelerate config` write is understood."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import SageMakerConfig, load_config_from_file

from conftest import REPOSITORY, TEMPLATES
from kit import profile
from kit.errors import UserError

PROFILES = sorted((REPOSITORY / "configs").glob("*.yaml"))
NAMES = ["cpu", "mps", "multi_cpu", "multi_gpu", "multi_node", "sagemaker", "single_gpu", "tpu"]


def read(text: str, folder: Path) -> dict:
    path = folder / "own.yaml"
    path.write_text(text, "utf-8")
    return profile.read_profile(path)


# ------------------------------------------------------------------------------------------------------------ our own


def test_there_are_the_profiles_that_the_readme_names():
    assert [path.stem for path in PROFILES] == NAMES
    with pytest.raises(UserError, match=r"no such profile: .*configs/: cpu, mps, multi_cpu, multi_gpu"):
        profile.read_profile(REPOSITORY / "configs" / "eight_gpus.yaml")


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_is_known_to_accelerate_and_begins_with_its_command(path):
    ours = profile.read_profile(path)
    if path.stem == "sagemaker":
        with pytest.raises(ValueError, match="num_processes"):  # if not, launch.py need not go round it any more
            load_config_from_file(str(path))
        config = SageMakerConfig(**{"use_cpu": False, "debug": False} | ours)
    else:
        config = load_config_from_file(str(path))
    for key, value in ours.items():
        assert str(getattr(config, key)) in (str(value), f"{type(getattr(config, key)).__name__}.{value}"), key
    lines = path.read_text("utf-8").splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert lines[: len(head)] == head
    starters = ["python launch.py"] if path.stem in ("sagemaker", "tpu") else ["python launch.py", "accelerate launch"]
    for starter in starters:
        assert f"{starter} --config_file configs/{path.name}" in "\n".join(head)
    assert len(lines) - len(head) <= 10, "few keys"


@pytest.mark.parametrize(
    ("name", "world", "processes"),
    [
        ("cpu", "1 process on 1 node, cpu, precision no, ", 1),
        ("multi_cpu", "2 processes on 1 node, gloo, cpu, precision bf16, 1 thread each", 2),
    ],
)
def test_a_profile_starts_the_world_that_it_names(name, world, processes):
    """The doctor's probe on what a CPU machine can start; bf16 comes from the command line."""
    command = [sys.executable, str(TEMPLATES / "doctor.py"), "--config_file", f"configs/{name}.yaml", "--launch"]
    command += ["--mixed_precision", "bf16"] if "bf16" in world else []
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"world      {world}" in answer.stdout
    rows = re.findall(r"^process (\d+)  node (\d+) \(.+\), cpu.*$", answer.stdout, re.MULTILINE)
    assert rows == [(str(rank), "0") for rank in range(processes)]
    measured = re.search(r"all-reduce 4 bytes: ([\d.e+-]+) ms; 32 MiB: ([\d.e+-]+) ms", answer.stdout)
    assert (measured is not None) == (processes > 1)
    assert measured is None or 0 < float(measured[1]) < float(measured[2])


# ------------------------------------------------------------------------------------------------------- other people's


def test_a_profile_that_accelerate_config_writes_is_taken_with_all_its_keys(tmp_path):
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.config.default import write_basic_config

    full = {
        **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "mixed_precision": "bf16"},
        **{
            "use_cpu": False,
            "debug": False,
            "num_processes": 8,
            "machine_rank": 1,
            "num_machines": 2,
            "gpu_ids": "all",
        },
        **{"main_process_ip": "10.0.0.1", "main_process_port": 29500, "rdzv_backend": "static", "same_network": True},
        **{"main_training_function": "main", "enable_cpu_affinity": False, "downcast_bf16": "no"},
        **{"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False}},
        **{"tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False},
    }
    ClusterConfig(**full).to_yaml_file(tmp_path / "full.yaml")
    ours = profile.read_profile(tmp_path / "full.yaml")
    assert ours == yaml.safe_load((tmp_path / "full.yaml").read_text()) | {"downcast_bf16": False}
    assert write_basic_config(save_location=str(tmp_path / "basic.yaml"))
    assert profile.read_profile(tmp_path / "basic.yaml")["distributed_type"] == "NO"


V015 = """
command_file: null
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
gpu_ids: null
megatron_lm_config: {}
mixed_precision: 'no'
num_machines: 1
num_processes: 1
tpu_zone: null
use_cpu: true
"""


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("distributed_type: NO\nmixed_precision: no\n", "mixed_precision", "no"),
        ("distributed_type: no\n", "distributed_type", "NO"),
        ("distributed_type: multi_gpu\n", "distributed_type", "MULTI_GPU"),
        ("distributed_type: 'NO'\ngpu_ids: 0\n", "gpu_ids", "0"),
        ("distributed_type: MULTI_GPU\ngpu_ids: [0, 2]\n", "gpu_ids", "0,2"),
        ("distributed_type: MULTI_GPU\ngpu_ids: '0, 2'\n", "gpu_ids", "0,2"),
        ('distributed_type: MULTI_GPU\nnum_processes: "4"\n', "num_processes", 4),
        ("distributed_type: MULTI_GPU\nuse_cpu: 'false'\n", "use_cpu", False),
        ("distributed_type: 'NO'\nfp16: true\n", "mixed_precision", "fp16"),
        ("distributed_type: TPU\n", "distributed_type", "XLA"),
        ("distributed_type: 'NO'\nuse_mps_device: false\n", "distributed_type", "NO"),
        ("distributed_type: 'NO'\ndynamo_backend: inductor\n", "dynamo_config", {"dynamo_backend": "INDUCTOR"}),
        ("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: no}\n", "dynamo_config", {"dynamo_backend": "no"}),
        ("distributed_type: FSDP\nfsdp_config: {version: 2, fsdp_offload_params: true}\n", "distributed_type", "FSDP"),
        ('{"distributed_type": "NO", "use_cpu": true}', "use_cpu", True),
        (V015, "use_cpu", True),
    ],
)
def test_what_people_write_is_understood_and_accelerate_reads_the_same(text, key, value, tmp_path):
    ours = read(text, tmp_path)
    assert ours[key] == value
    (tmp_path / "normal.yaml").write_text(yaml.safe_dump(ours))
    config = load_config_from_file(str(tmp_path / "normal.yaml"))
    assert getattr(getattr(config, key), "value", getattr(config, key)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("foo: 1\ndistributed_type: 'NO'\n", "unknown key foo: delete it; known here: command_file"),
        ("num_process: 1\ndistributed_type: 'NO'\n", "unknown key num_process: did you mean num_processes"),
        ("max_restarts: 3\ndistributed_type: 'NO'\n", "give --max_restarts on the command line"),
        ("fsdp_offload_params: true\ndistributed_type: FSDP\n", "it belongs in fsdp_config"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding: 1}\n",
            "unknown key fsdp_sharding in fsdp_config: did you",
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stag: 3}\n", "did you mean zero_stage"),
        ("distributed_type: 'NO'\ndynamo_config: {dynamo_back: EAGER}\n", "did you mean dynamo_backend"),
        ("distributed_type: 'NO'\nfp8_config: {bogus: 1}\n", "unknown key bogus in fp8_config"),
        ("distributed_type: 'NO'\nfsdp_config: true\n", "fsdp_config: True is not a section"),
        ("distributed_type: MULTI_GPUS\n", "unknown value MULTI_GPUS: did you mean MULTI_GPU"),
        ("distributed_type: 'NO'\nmixed_precision: bogus\n", "unknown value bogus: it is one of no, fp16, bf16, fp8"),
        ("distributed_type: 'NO'\nmixed_precision: bf-16\n", "did you mean bf16"),
        ("distributed_type: MULTI_GPU\nnum_processes: two\n", "num_processes: 'two' is not a whole number"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2.5\n", "num_processes: 2.5 is not a whole number"),
        ("distributed_type: MULTI_GPU\nuse_cpu: maybe\n", "use_cpu: 'maybe' is neither true nor false"),
        ("distributed_type: 'NO'\nnum_processes: 1\nnum_processes: 2\n", "the key num_processes occurs twice"),
        ("distributed_type: MULTI_CPU\nipex_config: {ipex: true}\n", "delete it: Accelerate no longer uses IPEX"),
        ("num_processes: 1\n", "has no distributed_type"),
        ("- a\n", "has no distributed_type"),
        ("", "has no distributed_type"),
        ("a: [\n", "cannot be read as YAML"),
    ],
)
def test_a_wrong_profile_is_one_line(text, words, tmp_path):
    with pytest.raises(UserError, match=re.escape(words)) as mistake:
        read(text, tmp_path)
    assert "own.yaml" in str(mistake.value)
    assert len(str(mistake.value).splitlines()) == 1


def test_the_keys_are_those_of_accelerate():
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DistributedType

    assert profile.known_keys() == {*ClusterConfig.__dataclass_fields__}
    assert profile.known_keys("SageMakerConfig") == {*SageMakerConfig.__dataclass_fields__}
    assert profile.known_values("DistributedType") == [kind.value for kind in DistributedType]
    names = [name for action in launch_command_parser()._actions for name in action.option_strings]
    options = {name[2:] for name in names if name.startswith("--") and "-" not in name[2:]}
    assert len(options) > 100
    assert options <= {*profile.launch_options()}
    sections = {section for section, annotation in ClusterConfig.__annotations__.items() if section.endswith("_config")}
    assert sections == {*profile.SECTIONS}
    assert {"zero_stage", "zero3_init_flag", "deepspeed_multinode_launcher"} <= profile.section_keys("deepspeed_config")


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("distributed_type: 'NO'\n")
    assert profile.read_profile(Path("~/mine.yaml"))["distributed_type"] == "NO"
