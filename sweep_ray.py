"""The runs of a sweep on a Ray cluster: `python sweep.py run FILE --engine ray`.

No shared disk is needed. The code is shipped to the workers, each run works in a temporary folder there, its
checkpoints come back while it goes on, and a run whose worker died is sent out again with its newest one.
"""

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from envs import processes, system
from envs.errors import ConfigError

LOST = "lost"  # instead of an exit code
NOT_SHIPPED = ["/.git/", "/runs/", "/wandb/", "/vae_ckpts/", "/docs/", "__pycache__/", ".venv/", "venv/", ".*_cache/"]
Files = dict[str, bytes]


def read_files(folder: Path) -> Files:
    """All files of a run folder, the checkpoints first: the metrics are never behind them."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    paths.sort(key=lambda path: (path.parts[0] != "checkpoints", path))
    return {path.as_posix(): (folder / path).read_bytes() for path in paths}


def write_files(folder: Path, files: Files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(folder.name + ".old"), folder.with_name(folder.name + ".incoming")


def install(files: Files, folder: Path) -> None:
    """Puts what came back in a run folder's place: all of it or nothing, even if killed here (see `mend`)."""
    old, incoming = beside(folder)
    shutil.rmtree(incoming, ignore_errors=True)
    write_files(incoming, files)
    if folder.exists():
        folder.rename(old)
    incoming.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def mend(folder: Path) -> None:
    """Takes back an `install` that was cut off."""
    old, incoming = beside(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (old, incoming):
        shutil.rmtree(leftover, ignore_errors=True)


class Worker:
    """Somewhere in the cluster: one run as a process, in a temporary folder of its own."""

    def begin(self, folder: str, files: Files, inputs: Files, command: list[str]) -> str:
        """Starts it; returns the machine's name."""
        self.temporary = tempfile.TemporaryDirectory(prefix="sweep-", ignore_cleanup_errors=True)
        work = Path(self.temporary.name)
        self.folder = work / folder
        write_files(work, inputs)
        write_files(self.folder, files)
        for entry in Path.cwd().iterdir():  # the code as it was shipped
            if not (work / entry.name).exists():
                system.link(entry, work / entry.name)
        self.sent = self.stamp()
        self.child = processes.start(command, work, self.folder / "log.txt")
        return processes.machine()

    def stamp(self) -> list:
        """Changes whenever a checkpoint does."""
        paths = (self.folder / "checkpoints").rglob("*")
        return sorted((str(path), path.stat().st_mtime_ns) for path in paths if path.is_file())

    def look(self) -> tuple[int | None, Files | None]:
        """The exit code, once there is one, and the folder, if there is a new checkpoint or an end."""
        code = self.child.poll()
        if code is not None:
            files = read_files(self.folder)
            self.temporary.cleanup()
            return code, files
        try:
            before = self.stamp()
            if before == self.sent:
                return None, None
            files = read_files(self.folder)
            if before != self.stamp():  # not of one moment
                return None, None
        except FileNotFoundError:  # renamed this very moment
            return None, None
        self.sent = before
        files.pop("result.json", None)  # counts only once the script has ended
        return None, files

    def stop(self) -> None:
        system.ask_to_stop(self.child)


@dataclass
class Call:
    """What a worker was asked last. The first answer comes when it has found a place in the cluster."""

    worker: object
    answer: object
    machine: str = ""
    answered: float = 0.0


class RayEngine:
    def __init__(self, address: str | None, cpus: float, gpus: float, every: float, runs_dir: Path):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import: nothing is reported to anybody
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ModuleNotFoundError:
            raise ConfigError('--engine ray needs Ray: pip install ray (the extra "sweep")') from None

        if runs_dir.is_absolute() or ".." in runs_dir.parts:
            raise ConfigError(f"--runs-dir must be inside the current folder with --engine ray, not {runs_dir}")
        where = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        where = {"address": address} if address else where
        code = {"working_dir": str(Path.cwd()), "excludes": [*NOT_SHIPPED, f"/{runs_dir.as_posix()}/"]}
        try:
            if address and (match := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)):
                socket.create_connection((match[1], int(match[2])), timeout=10).close()  # Ray itself tries for minutes
            ray.init(**where, runtime_env=code, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no Ray cluster at {address}: {str(error).splitlines()[0]}") from None
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # wherever sweep.py is started
        self.ray, self.every, self.slots = ray, every, 1000
        self.worker = ray.remote(Worker).options(num_cpus=cpus, num_gpus=gpus)
        self.calls: dict = {}  # run -> Call

    def start(self, run, command: list[str]) -> None:
        inputs: Files = {}  # files that the settings name and that are not shipped with the code
        for path in {Path(part) for word in run.cell.flags for part in word.split(",") if part}:
            if path.exists() and not path.is_absolute() and ".." not in path.parts:
                files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
                inputs |= {file.as_posix(): file.read_bytes() for file in files}
        worker = self.worker.remote()
        answer = worker.begin.remote(run.folder.as_posix(), read_files(run.folder), inputs, command)
        self.calls[run] = Call(worker, answer)

    def poll(self, run) -> int | str | None:
        """None while it runs or waits, else its exit code, or LOST."""
        call = self.calls[run]
        if call.answer is None and time.monotonic() - call.answered >= self.every:
            call.answer = call.worker.look.remote()
        if call.answer is None or not self.ray.wait([call.answer], timeout=0)[0]:
            return None
        code, files = None, None
        try:
            answer = self.ray.get(call.answer)
            if call.machine:
                code, files = answer
            else:
                call.machine = answer
        except self.ray.exceptions.RayTaskError as error:  # our own code failed there
            run.error, code = str(error.cause).splitlines()[0], 1
        except self.ray.exceptions.RayError:  # worker or node gone
            code = LOST
        call.answer, call.answered = None, time.monotonic()
        if files:
            install(files, run.folder)
            run.note(engine="ray", machine=call.machine)
        if code is not None:
            del self.calls[run]
        return code

    def waits(self, run) -> bool:
        return not self.calls[run].machine

    def stop(self, hard: bool) -> None:
        for run, call in self.calls.items():
            if hard or self.waits(run):  # nothing to save
                self.ray.kill(call.worker)
            else:
                call.worker.stop.remote()

    def close(self) -> None:
        self.ray.shutdown()
