"""How a script ends: the user's mistakes and the machine's refusals as one line, everything else as a traceback."""

import atexit
import os
import sys
import threading
import traceback
from contextlib import contextmanager

EXIT_MISTAKE = 2
WRITER = "checkpoint"  # the name of the thread that writes a checkpoint, which is always completed


class UserError(ValueError):
    """A mistake of the user's: one line that names the value, the place and the cure."""


class MachineError(OSError):
    """What the machine refused, such as a full disk: one line that names the path and the cause."""


@contextmanager
def exit_codes():
    """Turn a `UserError` (exit 2) or `MachineError` (exit 1) into one line; everything else keeps its traceback."""
    code = 0
    try:
        yield
    except (UserError, MachineError) as error:
        rank = os.environ.get("RANK", "0")
        print(f"{'' if rank == '0' else f'[process {rank}] '}error: {one_line(error)}", file=sys.stderr, flush=True)
        code = EXIT_MISTAKE if isinstance(error, UserError) else 1
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        traceback.print_exc()
        code = 1
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Where processes worked together, torch 2.14 sometimes aborts while the interpreter is taken down, after
        # everything is done ("terminate called without an active exception"): leave before that.
        for thread in threading.enumerate():
            if thread.name == WRITER:  # other threads may wait for the exit functions below
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def one_line(error: BaseException) -> str:
    text = str(error)
    if text.startswith("Caught "):  # in a data-loading worker: torch puts that process's traceback into the message
        text = text.rsplit(f"{type(error).__name__}: ", 1)[-1]
    return " ".join(text.split())
