"""The command line of a template: `--config recipe.yaml` over the defaults, options over both; mistakes in one line."""

import argparse
import difflib
import json
import math
import re
import sys
import typing
from pathlib import Path

from kit.doctor import check_environment
from kit.errors import UserError, exit_codes, one_line, prepare_screen
from kit.settings import TrainingSettings
from kit.stopping import catch_signals
from kit.trackers import check_trackers

# Names that people bring from other training scripts, where the near match would not help.
ELSEWHERE = {
    "gradient_accumulation_steps": "it is derived from global_batch_size, micro_batch_size and the number of processes",
    "per_device_train_batch_size": "set micro_batch_size (one forward pass) and global_batch_size (one step)",
    "per_device_eval_batch_size": "set eval_batch_size",
    "batch_size": "set global_batch_size (one step) and micro_batch_size (one forward pass)",
    "fp16": "set mixed_precision: fp16",
    "bf16": "set mixed_precision: bf16",
    "max_steps": "set max_train_steps",
    "save_steps": "set checkpointing_steps",
    "save_total_limit": "set checkpoints_total_limit",
    "num_processes": "it belongs to the launcher: accelerate launch --num_processes N, or make ... NUM_PROCESSES=N",
}


def start(settings_class, check, description: str):
    """Return the settings that the command line asks for, checked: what a script does first, before its slow imports.

    From here on a signal ends the script in good order. A mistake ends it with one line and exit code 2.
    """
    catch_signals()
    prepare_screen()
    with exit_codes(is_start=True):
        check_environment()
        settings = parse_settings(settings_class, description)
        check(settings)
        return settings


def parse_settings(settings_class, description: str, args: list[str] | None = None):
    """Return an instance of `settings_class` from its defaults, the recipe given by --config and the command line.

    Raises `UserError` for an unknown name, a value of the wrong type or range, or an unreadable recipe;
    `SystemExit(0)` for --help and --print_config.
    """
    import jsonargparse

    args = [re.sub(r"^(--config=)?~(?=/|$)", _home, arg) for arg in (sys.argv[1:] if args is None else args)]
    parser = jsonargparse.ArgumentParser(
        prog=Path(sys.argv[0]).name,
        usage="%(prog)s [--config RECIPE.yaml] [--OPTION VALUE ...]",
        description=description,
        formatter_class=_help_formatter(jsonargparse.DefaultHelpFormatter),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help="A recipe: YAML with these settings.")
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    common = set(typing.get_type_hints(TrainingSettings))
    own = set(settings_class.__annotations__)  # also those of every training whose default the task changes
    parser.add_class_arguments(settings_class, skip=common - own)
    parser.add_class_arguments(TrainingSettings, skip=own)
    given = {name: value for recipe in _recipes(args) for name, value in _read_recipe(recipe).items()}
    try:
        values = parser.parse_args(args)
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise UserError(_explain(str(error), settings_class, args, given)) from None
    recipes = [str(path) for path in values.pop("config", None) or []]
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}: {value} is not a finite number ({_place(name, args)})")
    settings = settings_class(**json.loads(json.dumps(values.as_dict())))  # plain int and float, for YAML
    settings.sources = ["defaults", *recipes, *(["command line"] if _options(args) else [])]  # for the banner
    check_trackers(settings.report_to)
    return settings


def _help_formatter(default: type) -> type:
    """Return the library's formatter of --help, with the lines of the description as they are."""
    return type("HelpFormatter", (default, argparse.RawDescriptionHelpFormatter), {})


def _home(match: re.Match) -> str:
    return (match[1] or "") + str(Path.home())


def _options(args: list[str]) -> list[str]:
    """Return the names of the options given on the command line, without --config."""
    return [arg[2:].split("=")[0].rstrip("+") for arg in args if arg.startswith("--") and arg[2:8] != "config"]


def _read_recipe(path: str) -> dict[str, str]:
    """Return the names in a recipe and their values as written. Raises `UserError` for what YAML would misread."""
    import yaml

    try:
        text = Path(path).read_text("utf-8")
        tree = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"--config: {path} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"recipe {path}: it is not YAML ({one_line(error)})") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe {path}: not a line for each setting, as 'seed: 42'")
    names = [key.value for key, _ in tree.value]
    written = {
        key.value: node.value if isinstance(node, yaml.ScalarNode) else str(values[key.value])
        for key, node in tree.value
        if key.value in values
    }
    twice = [name for name in names if names.count(name) > 1]
    wrong = [key for key in values if not isinstance(key, str)]
    if twice or wrong:
        fault = f"{twice[0]} is there twice" if twice else f"{wrong[0]!r} is no name of a setting"
        raise UserError(f"recipe {path}: {fault}")
    for key, node in tree.value:  # YAML 1.1 has octal numbers (012) and numbers of base 60 (1:30)
        if isinstance(values[key.value], int) and re.match(r"[-+]?0\d|.*:", node.value):
            raise UserError(
                f"recipe {path}: {key.value}: YAML reads {node.value} as {values[key.value]}: write that number"
            )
    return written


def _explain(message: str, settings_class, args: list[str], given: dict) -> str:
    """Return the parser's message as one line with the name, the value, the place and the cure."""
    types = typing.get_type_hints(settings_class)
    unknown = re.search(
        r"unrecognized arguments: -*([^\s=]+)|(?:Option|Key|Group key) '([^']+)' is not accepted", message
    )
    if unknown:
        name = unknown[1] or unknown[2]
        if unknown[1] and f"--{name}" not in " ".join(args):
            return f"'{name}' stands alone on the command line: options are written --name value"
        plain = name.replace("-", "_")
        near = difflib.get_close_matches(plain, types, n=1)
        cure = ELSEWHERE.get(plain) or (f"did you mean {near[0]}?" if near else "see --help for the options there are")
        return f"unknown option {name} ({_place(name, args)}): {cure}"
    key = re.search(r'Parser key "([^"]+)"', message)
    if key and key[1] == "config":
        return f"--config: {one_line(message.split(':', 1)[1])}"
    if key and key[1] in types:
        found = re.search(r"(?:Given value|Got value): (.*)|: (\S+) does not conform|'(.*)'$", message)
        value = f"{next(text for text in found.groups() if text is not None).strip()!r} " if found else "it "
        wanted, hint = _spell(types[key[1]]), ""
        if key[1] in given and key[1] not in _options(args):
            value, is_text = f"{given[key[1]]!r} ", wanted == "a text" or "of no," in wanted
            hint = f"; quote it in YAML: '{given[key[1]]}'" if is_text else ""
        return f"{key[1]}: {value}is not {wanted} ({_place(key[1], args)}){hint}"
    recipes = _recipes(args)
    return (f"recipe {', '.join(recipes)}: " if recipes and "onfig" in message else "") + one_line(message)


def _place(name: str, args: list[str]) -> str:
    return "command line" if name in _options(args) or not _recipes(args) else f"recipe {', '.join(_recipes(args))}"


def _recipes(args: list[str]) -> list[str]:
    after = [value for option, value in zip(args, args[1:], strict=False) if option == "--config"]
    return after + [arg.split("=", 1)[1] for arg in args if arg.startswith("--config=")]


def _spell(annotation) -> str:
    """Return a type in words: 'a whole number > 0', 'one of no, fp16, bf16', ..."""
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return f"one of {', '.join(map(str, parts))}"
    if typing.get_origin(annotation) is list:
        return "a list such as '[a, b]'"
    if parts:
        return " or ".join(_spell(part) for part in parts)
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = " and ".join(
        f"{signs[compare.__name__]} {bound}" for compare, bound in getattr(annotation, "_restrictions", ())
    )
    words = next((kind[base] for base in annotation.__mro__ if base in kind), annotation.__name__)
    return f"{words} {limits}".strip()
