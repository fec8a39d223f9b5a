"""A launch profile (configs/*.yaml): read as people and `accelerate config` write it; its keys are Accelerate's own.

Imports neither torch nor Accelerate, so that a mistake is answered at once.
"""

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path

from kit.errors import UserError, one_line

PRECISIONS = ("no", "fp16", "bf16", "fp8")
# The sections of a profile, and the options of `accelerate launch` that their keys stand for (fsdp_config may leave out
# the prefix, and so may fp8_config and dynamo_config).
SECTIONS = {
    "fsdp_config": "fsdp_",
    "fp8_config": "fp8_",
    "dynamo_config": "dynamo_",
    "megatron_lm_config": "megatron_lm_",
    "parallelism_config": "parallelism_config_",
    "mpirun_config": "mpirun_",
    "deepspeed_config": "",
}
# Keys that older versions of `accelerate config` wrote and that have no effect any more.
OBSOLETE = {
    "ipex_config": "delete it: Accelerate no longer uses IPEX",
    "use_xpu": "delete it: an XPU is found without it",
    "use_mps_device": "delete it: an Apple GPU is found without it",
    "tp_config": "tensor parallelism is not supported by these scripts",
    "mpirun_ccl": "delete it: oneCCL is no longer set up by Accelerate",
}
RENAMED = {"TPU": "XLA", "MPS": "NO"}  # values of distributed_type
WHOLE_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
SWITCHES = (
    "use_cpu",
    "debug",
    "same_network",
    "enable_cpu_affinity",
    "downcast_bf16",
    "tpu_use_cluster",
    "tpu_use_sudo",
)


@cache
def _source(name: str) -> ast.Module:
    """Return the syntax tree of a module of Accelerate, which is not imported: that would import torch."""
    folder = importlib.util.find_spec("accelerate").submodule_search_locations[0]
    return ast.parse((Path(folder) / name).read_text("utf-8"))


def _classes(name: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _source(name).body if isinstance(node, ast.ClassDef)}


@cache
def known_keys(kind: str = "ClusterConfig") -> set[str]:
    """Return the top-level keys of a profile: the fields of Accelerate's `ClusterConfig` or `SageMakerConfig`."""
    classes = _classes("commands/config/config_args.py")
    fields = [node for name in ("BaseConfig", kind) for node in classes[name].body if isinstance(node, ast.AnnAssign)]
    return {field.target.id for field in fields}


@cache
def launch_options() -> dict[str, str]:
    """Return the options of `accelerate launch`, and for each the name of its group."""
    calls = [node for node in ast.walk(_source("commands/launch.py")) if isinstance(node, ast.Call)]
    options = {}
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            group = ast.unparse(call.func.value)
            names = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            options |= {name[2:]: group for name in names if name.startswith("--")}
    return options


@cache
def known_values(enumeration: str) -> list[str]:
    """Return the values of an enumeration of Accelerate, such as `DistributedType`."""
    body = _classes("utils/dataclasses.py")[enumeration].body
    return [node.value.value for node in body if isinstance(node, ast.Assign)]


def section_keys(section: str) -> set[str]:
    """Return the keys that may stand in a section of a profile."""
    prefix = SECTIONS[section]
    if not prefix:
        return {option for option, group in launch_options().items() if group == "deepspeed_args"}
    options = {option for option in launch_options() if option.startswith(prefix)}
    short = section in ("fsdp_config", "fp8_config", "dynamo_config")
    return options | ({option.removeprefix(prefix) for option in options} if short else set())


def read_profile(path: Path) -> dict:
    """Return a profile as Accelerate wants it: old keys in their new place, numbers and switches of the right type.

    Raises `UserError` for a missing or unreadable file, and for keys and values that Accelerate does not know.
    """
    import yaml

    path = path.expanduser()
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
        raise UserError(f"no such profile: {path}; profiles in {path.parent}/: {there}")
    try:
        text = path.read_text("utf-8-sig")
        profile, tree = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"profile {path} cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(profile, dict) or "distributed_type" not in profile:
        raise UserError(f"profile {path} has no distributed_type: write one with `accelerate config`")
    names = [key.value for key, _ in tree.value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"profile {path}: the key {twice[0]} occurs twice")
    try:
        return normalize(profile)
    except UserError as error:
        raise UserError(f"profile {path}: {error}") from None


def normalize(profile: dict) -> dict:
    """Return a profile in Accelerate's own form. Raises `UserError` for what it does not know."""
    profile = dict(profile)
    _move_old_keys(profile)
    is_sagemaker = profile.get("compute_environment") == "AMAZON_SAGEMAKER"
    known = known_keys("SageMakerConfig" if is_sagemaker else "ClusterConfig")
    for key in profile:
        if key not in known:
            raise UserError(f"unknown key {key}: {_cure(str(key), known)}")
    for section in SECTIONS:
        inner = profile[section] = profile.get(section) or {}
        if not isinstance(inner, dict):
            raise UserError(f"{section}: {inner!r} is not a section with keys of its own")
        for key in inner:
            if key not in section_keys(section):
                raise UserError(f"unknown key {key} in {section}: {_cure(str(key), section_keys(section))}")
        if section == "dynamo_config":
            inner = profile[section] = {k: _word(v) if k.endswith(("backend", "mode")) else v for k, v in inner.items()}
        if not inner:
            del profile[section]
    for name in WHOLE_NUMBERS:
        if profile.get(name) is not None:
            profile[name] = _whole_number(name, profile[name])
    for name in SWITCHES:
        if profile.get(name) is not None:
            profile[name] = _switch(name, profile[name])
    if profile.get("gpu_ids") is not None:
        ids = profile["gpu_ids"]
        profile["gpu_ids"] = ",".join(map(str, ids)) if isinstance(ids, list) else str(ids).replace(" ", "")
    kinds = known_values("SageMakerDistributedType" if is_sagemaker else "DistributedType")
    profile["distributed_type"] = _one_of("distributed_type", _word(profile["distributed_type"]).upper(), kinds)
    profile["mixed_precision"] = _one_of("mixed_precision", _word(profile.get("mixed_precision")).lower(), PRECISIONS)
    return profile


def _move_old_keys(profile: dict) -> None:
    """Give keys and values of older versions of Accelerate their present place."""
    if profile.pop("fp16", False) and profile.get("mixed_precision") is None:
        profile["mixed_precision"] = "fp16"
    if "dynamo_backend" in profile:
        backend = _word(profile.pop("dynamo_backend")).upper()
        if backend != "NO":
            profile["dynamo_config"] = (profile.get("dynamo_config") or {}) | {"dynamo_backend": backend}
    kind = _word(profile["distributed_type"]).upper()
    profile["distributed_type"] = RENAMED.get(kind, kind)
    if isinstance(profile.get("mpirun_config"), dict):
        profile["mpirun_config"] = {k: v for k, v in profile["mpirun_config"].items() if k != "mpirun_ccl"}
    for key in ("ipex_config", "use_xpu", "use_mps_device"):
        if key in profile and not profile[key]:
            del profile[key]


def _cure(key: str, known: set[str]) -> str:
    if key in OBSOLETE:
        return OBSOLETE[key]
    if near := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {near[0]}?"
    for section in SECTIONS:
        if key in section_keys(section):
            return f"it belongs in {section}"
    if key in launch_options():
        return f"it is an option of the launcher, not a key: give --{key} on the command line"
    return f"delete it; known here: {', '.join(sorted(known))}"


def _word(value) -> str:
    """Return a word that YAML may have taken for something else: an unquoted no is False to it, an empty value None."""
    return "no" if value in (False, None) else str(value)


def _one_of(name: str, value: str, known) -> str:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(known)}"
        raise UserError(f"{name}: unknown value {value}: {hint}")
    return value


def _whole_number(name: str, value) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name}: {value!r} is not a whole number")
    return value


def _switch(name: str, value) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).strip().lower() not in words:
        raise UserError(f"{name}: {value!r} is neither true nor false")
    return words[str(value).strip().lower()]
