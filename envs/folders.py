"""Run folders: claimed by one process alone, and opened again with all that was saved in them."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from envs import system
from envs.arguments import check_ranges
from envs.checkpoints import Tensors, read_json, read_last, write_json
from envs.errors import ConfigError

ABOUT = ("script", "code_version", "started_in", "args")  # of args.json; whatever else is in it are facts


class RunFolder:
    """The folder of a run, held by a lock as long as the run lives; a killed process leaves no lock behind."""

    def __init__(self, path: Path, args: Any, script: Path, started_in: Path, made: bool = False):
        self.path, self.args, self.script, self.made = path, args, script, made
        self.started_in, self.is_new = started_in, not (path / "args.json").exists()
        self.code_version = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
        self.facts: dict[str, Any] = {}
        self.saved: tuple[Tensors, Tensors, dict[str, Any]] | None = None
        try:
            lock = system.lock(path / ".lock")
        except OSError as error:
            raise ConfigError(f"the run folder '{path}' cannot be written: {error.strerror}") from None
        if lock is None:
            raise ConfigError(f"'{path}' is in use: another process is at work on this very run")
        self.lock = lock

    @property
    def about(self) -> Path:
        return self.path / "args.json"

    def write_about(self) -> None:
        """args.json: what decides this run."""
        args = asdict(self.args) | {"resume": ""}
        about = (self.script.name, self.code_version, self.started_in, args)
        write_json(self.about, dict(zip(ABOUT, about, strict=True)) | self.facts)

    def close(self) -> None:
        """Free the folder; one in which no run began goes again."""
        if not self.about.exists():
            self.lock.close()  # Windows removes no open file
            system.remove(self.path / ".lock")
            if self.made and not any(self.path.iterdir()):
                self.path.rmdir()
        self.lock.close()


def new_folder(args: Any, script: Path) -> RunFolder:
    """Claim a folder: of two starts at once each gets one of its own."""
    args.exp_name = args.exp_name or script.stem
    if re.search(r"[/\\:\0]|\.\.", args.exp_name):
        raise ConfigError(f"--exp-name is part of a folder's name and cannot be '{args.exp_name}'")
    env_name = re.sub(r"[^\w.+-]+", "_", getattr(args, "env_id", script.stem))  # a map of one's own is a path
    now = int(time.time())
    names = [f"runs/{env_name}__{args.exp_name}__{args.seed}__{now + later}" for later in range(1000)]
    for path in map(Path, [args.run_dir] if args.run_dir else names):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            system.make_folder(path)
            return RunFolder(path, args, script, Path.cwd(), made=True)
        except FileExistsError:
            if args.run_dir:
                return given_folder(path, args, script)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"the run folder '{path}' cannot be made: {reason}") from None
    raise ConfigError("no name in runs/ is free; give one by --run-dir")


def given_folder(path: Path, args: Any, script: Path) -> RunFolder:
    """A folder that was there before, if it holds no run."""
    if not path.is_dir():
        raise ConfigError(f"the run folder '{path}' cannot be made: there is a file of that name")
    refuse_old_run(path)
    folder = RunFolder(path, args, script, Path.cwd())
    refuse_old_run(path)  # another start may have been faster
    return folder


def refuse_old_run(path: Path) -> None:
    if (path / "args.json").exists():
        raise ConfigError(f"'{path}' already holds a run; go on with --resume {path}")
    for name in ("checkpoints", "metrics.csv", "result.json"):
        if (path / name).exists():
            raise ConfigError(f"'{path}' holds {name} of another run, but no args.json; choose another --run-dir")


def old_folder(args: Any, script: Path) -> RunFolder | None:
    """A run folder with all that was saved in it; None if its run is finished."""
    path = Path(args.resume)
    if not (path / "args.json").exists():
        raise ConfigError(f"'{path}' cannot be resumed: it has no args.json")
    about = read_json(path / "args.json", script=str, code_version=str, started_in=str, args=dict)
    if about["script"] != script.name:
        raise ConfigError(f"'{path}' is a run of {about['script']}, not of {script.name}")
    found = load_args(type(args), about["args"], path / "args.json")
    if is_finished(path):
        print(f"{path} is finished already: {path / 'result.json'}", flush=True)
        return None
    folder = RunFolder(path, found, script, Path(about["started_in"]))
    folder.facts = {name: fact for name, fact in about.items() if name not in ABOUT}
    folder.saved = read_last(path / "checkpoints")
    if folder.saved:
        check_same_run(folder.saved[2], asdict(found) | folder.facts, folder)
    return folder


def is_finished(path: Path) -> bool:
    """Whether the final result is there; an empty or broken result.json is no finish."""
    try:
        return read_json(path / "result.json", finished=bool)["finished"]
    except ConfigError:
        return False


def load_args(args_class: type, saved: dict[str, Any], path: Path) -> Any:
    """The settings in an args.json: exactly those that the script has, each of its type and in its range."""
    hints = get_type_hints(args_class)
    unknown, missing = sorted(saved.keys() - hints.keys()), sorted({f.name for f in fields(args_class)} - saved.keys())
    for what, names in (("settings that this version does not know", unknown), ("no setting", missing)):
        if names:
            raise ConfigError(f"'{path}' has {what}: {', '.join(names)}")
    tuples = {name for name, hint in hints.items() if get_origin(hint) is tuple and isinstance(saved.get(name), list)}
    args = args_class(**{name: tuple(value) if name in tuples else value for name, value in saved.items()})
    try:
        check_ranges(args)
    except ConfigError as error:
        raise ConfigError(f"'{path}' is damaged: {error}") from None
    return args


def check_same_run(spec: dict[str, Any], known: dict[str, Any], folder: RunFolder) -> None:
    """Whether a save is one of the run that args.json describes."""
    where = folder.path / "checkpoints" / "last" / "spec.json"
    then = {
        **(spec["args"] if isinstance(spec["args"], dict) else {}),
        **{name: spec.get(name) for name in folder.facts},
    }
    for name, value in known.items():
        value = list(value) if isinstance(value, tuple) else value
        if then.get(name) != value:
            said = f"its {name} is {then.get(name)!r}, here it is {value!r}"
            raise ConfigError(f"'{where}' is of another run than args.json: {said}")
    most, each = folder.args.num_iterations, folder.args.batch_size
    if not 1 <= spec["iteration"] <= most or spec["global_step"] != spec["iteration"] * each:
        at = f"it is of iteration {spec['iteration']} and step {spec['global_step']}"
        raise ConfigError(f"'{where}' is damaged: {at}, this run has {most} iterations of {each} steps")
    if spec["code_version"] != folder.code_version:
        versions = f"code version {spec['code_version']} then, {folder.code_version} now"
        print(f"note: {folder.script.name} has changed since this run was saved ({versions})", flush=True)


def check_output(setting: str, text: str | Path) -> None:
    """ConfigError unless a file can be written at a path: asked before the work that it is for."""
    path = Path(text)
    draft = path.with_name(f"{path.name}.tmp")
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"{setting} {path}: there is no folder '{path.parent}'")
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise ConfigError(f"{setting} {path} cannot be written: it is a folder or read-only")
        system.write_file(draft, b"")
        system.remove(draft)
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be written: {error.strerror}") from None


# relative paths among the settings


def follow_paths(args: Any, started_in: Path) -> Any:
    """The same settings with paths as seen from here: they are meant from the folder in which the run was started."""
    if started_in == Path.cwd():
        return args
    texts = [name for name, hint in get_type_hints(type(args)).items() if hint is str]
    followed = {
        name: ",".join(follow_path(entry, started_in) for entry in getattr(args, name).split(","))
        for name in texts
        if name not in ("exp_name", "run_dir", "resume")
    }
    return replace(args, **followed)


def follow_path(entry: str, started_in: Path) -> str:
    """One entry of a setting, if it is a path that is there: runs/a, runs/a@2, runs/a*, smac-file:a.toml, a.py:Name. A
    single word is one only if it is clear that no name is meant: a run folder, or a file with an ending."""
    pattern = r"(smac-file:)?(.*?)(@\d+|(?<=\.py):\w+)?"
    ((prefix, text, learner),) = re.findall(rf"^{pattern}\Z", entry.strip(), re.DOTALL)
    path = started_in / text
    if not text or Path(text).is_absolute() or not (path.exists() or glob.glob(text, root_dir=started_in)):
        return entry
    clear = len(Path(text).parts) > 1 or (path.is_file() and path.suffix)
    clear = clear or any((path / name).is_file() for name in ("args.json", "spec.json"))
    return f"{prefix}{path}{learner}" if clear else entry
