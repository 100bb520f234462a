"""Other processes, for sweep.py: children that end with their parent. Locks and stop signals: `envs/system.py`."""

import ctypes
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies
WINDOWS = hasattr(signal, "CTRL_BREAK_EVENT")


def options() -> dict:
    """Of Popen, for a child that hears no Ctrl-C (its parent does, and passes it on) and that, on Linux, is asked to
    stop when its parent dies. Elsewhere it goes on alone, and the lock of its run folder says so."""
    if WINDOWS:
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
    if sys.platform != "linux":
        return {"start_new_session": True}
    prctl = ctypes.CDLL(None).prctl
    return {"start_new_session": True, "preexec_fn": lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)}


def start(command: list[str], cwd: Path, log: Path) -> subprocess.Popen:
    """A script as a child of one thread that prints into a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as out:
        out.write(f"\n$ {shlex.join(command)}\n")
        out.flush()
        return subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=cwd,
            env=os.environ | ONE_THREAD | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            **options(),
        )


def ask_to_stop(child: subprocess.Popen) -> None:
    """The child saves and ends. On Windows `terminate` kills at once, but a Ctrl-Break is heard."""
    if WINDOWS:
        child.send_signal(signal.CTRL_BREAK_EVENT)  # type: ignore[attr-defined]
    else:
        child.terminate()


def machine() -> str:
    """The machine in words: processor, cores, system, Python. No names, no paths."""
    try:
        cpu = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[0]
    except (OSError, IndexError):
        cpu = platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
