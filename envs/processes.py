"""Other processes, for sweep.py: children that end with their parent. How each system does that: `envs/system.py`."""

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

from envs import system

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}


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
            **system.child_options(),
        )


def machine() -> str:
    """The machine in words: processor, cores, system, Python. No names, no paths."""
    try:
        cpu = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))[0]
    except (OSError, IndexError):
        cpu = platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
