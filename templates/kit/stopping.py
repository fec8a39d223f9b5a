"""When a run ends: signals, the time limit and non-finite numbers, as decisions that all processes share.

Imports nothing heavy: `catch_signals` has to run before the slow imports of a script.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: nothing is lost, the same command goes on
NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")  # of schedulers and people; the last when the terminal is closed
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
STARTED = time.monotonic()

_received: tuple[int, float] | None = None  # the first signal and when it came
_is_deferred = False  # True while a Stopper polls; before, there is nothing to save and a signal ends the script
_is_waiting = False  # True while a batch is waited for, which may never come
GRACE = 5.0  # seconds that such a batch may still take when the run should stop


class Blocked(BaseException):
    """The run should stop, and the batch that a process waits for does not come. Not for `except Exception`."""


def catch_signals() -> None:
    """Make SIGTERM, SIGINT, SIGUSR1 and SIGHUP end the script in good order, with exit code 75.

    A launcher of one process does not pass signals on; on Linux its death is taken as SIGTERM.
    """
    for number in SIGNALS:
        if signal.Signals(number).name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # not under nohup
            signal.signal(number, _on_signal)
    if sys.platform == "linux" and is_launcher(parent_command()):
        # Only then: a run that was put into the background of a shell must outlive the shell.
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # 1 is PR_SET_PDEATHSIG


def parent_command() -> list[bytes]:
    """Return the command line of the parent process, word by word; empty where it cannot be asked."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def is_launcher(command: list[bytes]) -> bool:
    """Return whether a command line starts training processes; a folder that is called accelerate does not make one."""
    commands = (b"accelerate", b"accelerate-launch", b"torchrun", b"launch.py", b"sweep.py")
    modules = (b"accelerate.commands.launch", b"accelerate.commands.accelerate_cli", b"torch.distributed.run")
    return any(word.rsplit(b"/", 1)[-1] in commands or word in modules for word in command[:3])


def _on_signal(number, frame) -> None:
    global _received
    now = time.monotonic()
    if _received is None:
        _received = (number, now)
    # The same signal often comes twice (from the terminal or scheduler, and from the launcher): only a person who
    # presses Ctrl-C again, seconds later, wants it to end at once.
    if number == signal.SIGINT and now - _received[1] > 3:
        raise SystemExit(EXIT_STOPPED)
    if not _is_deferred:
        os._exit(EXIT_STOPPED)  # an exception could be swallowed in the middle of an import; there is nothing to save
    if _is_waiting:
        _set_alarm(GRACE)


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _on_alarm(number, frame) -> None:
    if _is_waiting:
        raise Blocked


class Stopper:
    """Collects each process's reasons to stop; all processes learn of them at the same step.

    The flags travel in one small collective on the CPU that is started at one poll and read at the next one, so
    no device waits for it. `reason` is None until then. While this context is open a signal does not end the script:
    the loop does, when it has saved.
    """

    def __init__(self, accelerator, max_train_time: float | None, timeout: float):
        import torch

        self.reason: str | None = None
        self.failure: tuple[int, int | None] | None = None  # step and process (None: all) of a non-finite number
        self.max_train_time = max_train_time
        self.process_index, self.is_shared = accelerator.process_index, accelerator.num_processes > 1
        # A group of its own: the order of these small collectives never mixes with that of the gradients.
        timeout = timedelta(seconds=timeout)
        self.group = torch.distributed.new_group(backend="gloo", timeout=timeout) if self.is_shared else None
        self._measured = None  # (step, [loss, gradient norm] on their way to the CPU, event)
        self._travelling = None  # (flags, work)

    def __enter__(self):
        global _is_deferred
        _is_deferred = True
        if hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, _on_alarm)
        return self

    def __exit__(self, kind, error, trace) -> None:
        global _is_deferred
        _is_deferred = False

    def next_of(self, batches):
        """Return the next batch, None at the end. Raises `Blocked` if none comes though the run should stop."""
        global _is_waiting
        _is_waiting = True
        try:
            if self.max_train_time is not None:
                _set_alarm(max(self.max_train_time - (time.monotonic() - STARTED), 0.0) + GRACE)
            if _received is not None:
                _set_alarm(GRACE)
            return next(batches, None)
        finally:
            _is_waiting = False
            if self.max_train_time is not None or _received is not None:
                _set_alarm(0.0)

    def describe_reason(self) -> str:
        """Return why this process should stop, by itself: what the processes could not agree on any more."""
        if _received is not None:
            return f"signal {signal.Signals(_received[0]).name}"
        return f"max_train_time of {self.max_train_time:g} s is up"

    def poll(self, step: int | None = None, loss=None, grad_norm=None) -> str | None:
        """Send this process's flags; return the reason to stop that all agreed on at the poll before, or None.

        `loss` of this process and `grad_norm` (scalar tensors) of the step are only started on their way to the CPU:
        they travel with the next poll.
        """
        self._read()
        self._send()
        if step is not None:
            self._measure(step, loss, grad_norm)
        return self.reason

    def settle(self) -> str | None:
        """Do as `poll`, but wait for everything up to now: before a checkpoint is written or a model is judged."""
        self._read()
        self._send()
        self._read()
        return self.reason

    def on_any_process(self, flag: bool) -> bool:
        """Return whether `flag` is true on any process; waits for the others, but not for their devices."""
        import torch
        import torch.distributed as dist

        flags = torch.tensor([flag], dtype=torch.int64)
        if self.is_shared:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return bool(flags.item())

    def raise_if_failed(self, sampler) -> None:
        """Raise `FloatingPointError` on all processes if any number up to now is not finite; waits for the answer."""
        self.settle()
        if self.failure is None:
            return
        step, process = self.failure
        what = "the gradient norm" if process is None else f"the loss of process {process}"
        samples = sampler.samples(step) if process is None else sampler.share(step, process)
        raise FloatingPointError(
            f"{what} is not finite at step {step}; samples of that step: {samples}. No checkpoint was written since."
            " Look at those samples. Ways on: a lower learning rate in another --output_dir; where the script has it,"
            " the same command with --skip_nonfinite_steps N"
        )

    def _measure(self, step: int, loss, grad_norm) -> None:
        import torch

        values = torch.stack([loss.detach().float().reshape(()), grad_norm.detach().float().reshape(())])
        if values.device.type == "cuda":
            host = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = values.cpu(), None
        self._measured = (step, host, event)

    def _send(self) -> None:
        import torch
        import torch.distributed as dist

        flags = torch.zeros(4, dtype=torch.int64)  # signal, time is up, step and origin of a non-finite number
        flags[0] = _received[0] if _received else 0
        flags[1] = self.max_train_time is not None and time.monotonic() - STARTED > self.max_train_time
        if self._measured is not None:
            step, host, event = self._measured
            if event is not None:
                event.synchronize()  # of the step before: it has long ended when the next one is queued
            loss_is_finite, norm_is_finite = host.isfinite().tolist()
            if not (loss_is_finite and norm_is_finite):
                flags[2] = step
                flags[3] = 1 if loss_is_finite else self.process_index + 2  # 1: the gradient, which all share
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group, async_op=True) if self.is_shared else None
        self._travelling = (flags, work)

    def _read(self) -> None:
        if self._travelling is None:
            return
        flags, work = self._travelling
        self._travelling = None
        if work is not None:
            work.wait()
        number, is_late, step, origin = flags.tolist()
        if step and self.failure is None:  # the first: from there on everything is spoilt
            self.failure = (step, None if origin == 1 else origin - 2)
            self.reason = f"non-finite number at step {step}"
        elif self.reason is None and number:
            self.reason = f"signal {signal.Signals(number).name}"
        elif self.reason is None and is_late:
            self.reason = f"max_train_time of {self.max_train_time:g} s is up"


def begin_worker(worker_id: int) -> None:
    """Make a data-loading worker (as its `worker_init_fn`) live as long as its training process, and no longer.

    A scheduler or a terminal signals every process of a job, workers too, though the training process still needs
    batches until it has saved; and where workers are forked by a server they do not see their trainer die.
    """
    trainer = multiprocessing.parent_process()
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # first: the threads below inherit it
        threading.Thread(target=_obey_only, args=(trainer.pid,), daemon=True).start()
    else:  # macOS and Windows; the trainer ends its workers by SIGTERM, which has to stay
        for number in SIGNALS:
            if number != signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()


def _end_with(trainer) -> None:
    trainer.join()
    os._exit(1)


def _obey_only(pid: int) -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != pid:
        pass
    os._exit(0)
