"""How a script ends: the user's mistakes and the machine's refusals as one line, everything else as a traceback."""

import atexit
import json
import os
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

EXIT_MISTAKE = 2
WRITER = "checkpoint"  # the name of the thread that writes a checkpoint, which is always completed


class UserError(ValueError):
    """A mistake of the user's: one line that names the value, the place and the cure."""


class MachineError(OSError):
    """What the machine refused, such as a full disk: one line that names the path and the cause."""


@contextmanager
def exit_codes(is_start: bool = False):
    """Turn a `UserError` (exit 2) or `MachineError` (exit 1) into one line; everything else keeps its traceback.

    Ends the script, except at its start where nothing went wrong: what is wrong there, every process finds.
    """
    code = 0
    try:
        yield
        if is_start:
            return
    except (UserError, MachineError) as error:
        rank, line = os.environ.get("RANK", "0"), f"error: {one_line(error)}"
        if rank == "0" or not is_start:
            print(line if rank == "0" else f"[process {rank}] {line}", file=sys.stderr, flush=True)
        _tell_launcher(line)
        code = EXIT_MISTAKE if isinstance(error, UserError) else 1
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # as after `| head`: the interpreter must not try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Where processes worked together, torch 2.14 sometimes aborts while the interpreter is taken down, after
        # everything is done ("terminate called without an active exception"): leave before that.
        for thread in threading.enumerate():
            if thread.name == WRITER:  # other threads may wait for the exit functions below
                thread.join()
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _tell_launcher(line: str) -> None:
    """Let torch's launcher end its own traceback with this line."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), "utf-8")


def prepare_screen() -> None:
    """Make sure that printing never ends a run: not without a screen, nor on one that cannot show every character."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def one_line(error: BaseException) -> str:
    text = str(error)
    if text.startswith("Caught "):  # in a data-loading worker: torch puts that process's traceback into the message
        text = text.rsplit(f"{type(error).__name__}: ", 1)[-1]
    return " ".join(text.split())
