"""What differs between Linux, macOS and Windows: locks, stop signals, children, and files that somebody else has open.

Everything that only one of them has stands here and nowhere else, and every change that the recorder makes to a disk
goes through `make_folder`, `write_file`, `append_file`, `move` and `remove`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

try:
    import fcntl
    import termios
    import tty
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

# Ctrl-C, a polite kill, a closed terminal, Windows' Ctrl-Break: as far as the system has them
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
IN_USE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENOTEMPTY)  # Windows, while somebody reads a file or its folder
PATIENCE = 10.0 if os.name == "nt" else 0.2  # seconds: elsewhere these errors hardly ever pass
PAUSE = 0.05
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies
WINDOWS = hasattr(signal, "CTRL_BREAK_EVENT")


def patiently(work: Callable[[], None]) -> None:
    """Do `work`; where the system refuses because somebody has a file open, try again for a while."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno not in IN_USE or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk (files bring their content there themselves)."""
    if os.name != "posix":
        return  # Windows cannot open a folder, and does this by itself
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """A new folder; FileExistsError if there is one already, so that of two who want it one gets it."""
    folder.mkdir()


def write_file(path: Path, content: bytes) -> None:
    """A whole file, on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append_file(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def sync_file(path: Path) -> None:
    with path.open("ab") as file:
        os.fsync(file.fileno())


def move(source: Path, target: Path) -> None:
    """Give a file or folder another name; a file replaces what was there, a folder needs a free name."""
    patiently(lambda: os.replace(source, target) if source.is_file() else os.rename(source, target))
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Delete a file or a folder with all that is in it, if it is there."""

    def work() -> None:
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except FileNotFoundError:
            pass

    patiently(work)


def read_key() -> str:
    """The next key at the terminal, without Enter: a letter, or up, down, left, right; "" if the terminal is gone."""
    if sys.platform == "win32":
        key, arrows = msvcrt.getwch(), {"H": "up", "P": "down", "K": "left", "M": "right"}
        return arrows.get(msvcrt.getwch(), "?") if key in "\x00\xe0" else key
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSANOW)  # Ctrl-C still works, and what was typed ahead is not lost
        key = os.read(terminal, 8).decode(errors="replace")
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
    arrows = {"A": "up", "B": "down", "C": "right", "D": "left"}
    return arrows.get(key[2:3], "?") if key.startswith(("\033[", "\033O")) else key[:1]


def lock(path: Path) -> IO[bytes] | None:
    """Take the lock of a file, made if need be; None if another process holds it. The system frees it when the
    process ends, however it ends; closing the file frees it too."""
    while True:
        file = path.open("ab")
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            file.close()
            return None
        try:
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except FileNotFoundError:
            pass
        file.close()  # whoever held it before has removed the file since


def child_options() -> dict:
    """Of Popen, for a child that hears no Ctrl-C (its parent does, and passes it on) and that, on Linux, is asked to
    stop when its parent dies. Elsewhere it goes on alone, and the lock of its run folder says so."""
    if WINDOWS:
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
    if sys.platform != "linux":
        return {"start_new_session": True}
    prctl = ctypes.CDLL(None).prctl
    return {"start_new_session": True, "preexec_fn": lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)}


def ask_to_stop(child: subprocess.Popen) -> None:
    """The child saves and ends. On Windows `terminate` kills at once, but a Ctrl-Break is heard."""
    if WINDOWS:
        child.send_signal(signal.CTRL_BREAK_EVENT)  # type: ignore[attr-defined]
    else:
        child.terminate()


def link(source: Path, name: Path) -> None:
    """Another name for a file or folder; a copy where the system allows no links, as Windows seldom does."""
    try:
        name.symlink_to(source)
    except OSError:
        shutil.copytree(source, name) if source.is_dir() else shutil.copy(source, name)
