"""The recorder of a run: one folder with settings, metrics, checkpoints and the result, and everything that can happen
to a run: bad settings, Ctrl-C, a kill at any moment, NaN, a full disk. Every training script uses it the same way:

    def train(args: Args, run: Run) -> None:
        ...                                             # env, networks, optimizer
        run.start(net, env.spec, learners=[0], keep={"env": env, "optimizer": optimizer}, title="PPO on msh-4h1s-4x4")
        for iteration in run.iterations():              # goes on where the run stood; saves by itself
            ...                                         # run.count(info) after each env step, run.clock("env")
            if run.evaluation_due():
                run.evaluated(evaluate(...))            # the best weights are kept
            if run.log_due():
                run.log({"losses/policy_loss": loss})   # a new scalar needs no other line
        run.finish({"eval": evaluate(...)})

    if __name__ == "__main__":
        sys.exit(main(Args, train))

What is in the folder, and what survives what: docs/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numba
import numpy as np
import torch
import tyro
from torch import nn
from tqdm import tqdm

import envs
from envs import checkpoints, system
from envs.arguments import Count, Positive, Range, Rate, Share, Weight, Whole, check_ranges, parse
from envs.checkpoints import load_weights, read_weights, write_checkpoint, write_json
from envs.devices import Device, find_device
from envs.errors import ConfigError
from envs.folders import RunFolder, follow_paths, new_folder, old_folder
from envs.grid import EnvSpec, GridGame
from envs.guard import NO_PATH, Stop, StopSignals, fail, guarded
from envs.metrics import Metrics, draw_curve

__all__ = ["ConfigError", "Count", "Positive", "Range", "Rate", "Run", "RunArgs", "Share", "Weight", "Whole",
           "check_ranges", "descend", "fail", "guarded", "load_script", "main", "parse", "read_weights",
           "saved_args"]  # fmt: skip

PROJECT = Path(__file__).resolve().parent.parent


@dataclass
class RunArgs:
    # run
    exp_name: str = ""
    """name of this experiment, part of the run folder's name (default: the script's)"""
    seed: Whole = 1
    """seed of everything: env, policy, minibatches, evaluation"""
    run_dir: str = ""
    """folder of this run (default: runs/<env>__<exp>__<seed>__<time>)"""
    resume: str = ""
    """run folder to go on with; all other settings are then taken from it"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "hopplus-lab"
    """project of the tracked run"""
    wandb_entity: str | None = None
    """team of the tracked run"""
    wandb_group: str | None = None
    """group of the tracked run (a sweep sets it)"""
    wandb_tags: str = ""
    """comma-separated tags of the tracked run"""
    device: Device = "cpu"
    """where the networks are; the games are always played on the CPU"""
    torch_threads: Annotated[int, Range(1, 256), tyro.conf.arg(metavar="1..256")] = 1
    """threads of torch; small networks run best with one"""
    log_every: Positive = 10
    """iterations between two rows of metrics.csv and TensorBoard"""
    eval_every: Whole = 25_000
    """env steps between two evaluations; the last weights are evaluated too (0: only the final evaluation)"""
    eval_episodes: Count = 1024
    """episodes of each evaluation during training, always from the true starts"""
    final_eval_episodes: Count = 4096
    """episodes of the evaluation at the end"""
    capture_video: bool = False
    """write a GIF of one episode at each evaluation to <run>/videos, and a replay page of the final weights"""
    checkpoint_every: Positive = 20
    """iterations between two saves of checkpoints/last"""

    @property
    def batch_size(self) -> int:
        """Env steps of an iteration."""
        args: Any = self  # every training script has these fields, with defaults of its own
        return args.num_envs * args.num_steps

    @property
    def num_iterations(self) -> int:
        args: Any = self
        return max(1, args.total_timesteps // self.batch_size)


def main(args_class: type[RunArgs], train: Callable[[Any, Run], None], argv: list[str] | None = None) -> int:
    """The whole of a training script: settings, run folder, training; returns the exit code."""
    module = sys.modules[train.__module__]
    script = Path(str(module.__file__)).resolve()

    def work(signals: StopSignals) -> int:
        args = parse(args_class, module.__doc__, argv)
        folder = old_folder(args, script) if args.resume else new_folder(checked(args), script)
        if folder is None:
            return 0
        run = Run(folder, signals)
        try:
            checked(run.args)
            torch.set_num_threads(run.args.torch_threads)
            train(run.args, run)
            return 0
        except Stop as stop:
            print(run.stopped(), flush=True)
            return 128 + stop.number
        except ConfigError:
            run.forget()
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if run.metrics or not run.resumed:
                raise
            where = run.dir / "checkpoints" / "last"  # says what no run of this script says
            what = f"{type(error).__name__}: {checkpoints.one_line(error)}"
            raise ConfigError(f"'{where}' does not fit {script.name}: {what}") from error
        except FloatingPointError as error:
            print(f"stopped after step {run.steps_done}: {error}; {run.kept()}", file=sys.stderr)
            return 1
        except OSError as error:
            if error.errno in NO_PATH:
                run.forget()
                raise
            return fail(f"{error}; {run.kept()}", 1)
        finally:
            run.close()

    return guarded(work)


def checked(args: Any) -> Any:
    """The settings, once they fit each other."""
    find_device(args.device)
    if hasattr(args, "check"):
        args.check()
    if args.capture_video and not can_show(args.env_id):
        raise ConfigError(f"--capture-video has no pictures of {args.env_id}")
    return args


def saved_args(args_class: type[Any], spec: dict[str, Any]) -> Any:
    """The settings in the spec of a checkpoint; another version of its script may have had other ones."""
    known = {field.name for field in fields(args_class)}
    args = args_class(**{name: value for name, value in spec["args"].items() if name in known})
    check_ranges(args)
    return args


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor, max_norm: float) -> list[float]:
    """One step down the gradient, clipped in each group of parameters; a loss that is no number ends the run. Returns
    the norms of the gradient, group by group."""
    optimizer.zero_grad()
    loss.backward()
    norms = [nn.utils.clip_grad_norm_(group["params"], max_norm) for group in optimizer.param_groups]
    if not torch.isfinite(torch.stack([loss.detach(), *norms])).all():
        raise FloatingPointError(f"the loss became {loss.item()} with a gradient of norm {max(norms).item()}")
    optimizer.step()
    return [norm.item() for norm in norms]


def can_show(env_id: str) -> bool:
    """Whether there are films and replays of a game: of grid games and battles."""
    return env_id in GridGame.registry or env_id.startswith(envs.BATTLES)


def load_script(path: str | Path) -> ModuleType:
    """A script as a module of its own, whatever its name and folder; loaded once in each process."""
    path = Path(path).resolve()
    name = f"script_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    for folder in (str(path.parent), str(PROJECT)):
        if folder not in sys.path:
            sys.path.append(folder)  # for what the script itself imports
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"'{path}' is no Python script")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"the script '{path}' cannot be loaded: {type(error).__name__}: {error}") from error
    keep_compiled_apart(module)
    return module


def keep_compiled_apart(module: ModuleType) -> None:
    """numba's cache goes by the file, but remembers the name of the module that compiled: what a script compiles under
    the name it has here must not be found when it runs as a program."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(Path(before or PROJECT / "__pycache__") / module.__name__)
    for thing in list(vars(module).values()):
        cache: Any = getattr(thing, "_cache", None)
        if hasattr(thing, "py_func") and thing.py_func.__module__ == module.__name__ and hasattr(cache, "cache_path"):
            if cache.cache_path is not None:  # None: it is not cached at all
                thing.enable_caching()
    numba.config.CACHE_DIR = before


class Run:
    """One run, from its folder to its result. What a script may use is described in the head of this file."""

    def __init__(self, folder: RunFolder, signals: StopSignals):
        self.folder, self.dir, self.signals = folder, folder.path, signals
        self.args = follow_paths(folder.args, folder.started_in)
        self.spec: dict[str, Any] = folder.saved[2] if folder.saved else {}  # of the save that this run goes on from
        self.iteration = self.step = 0
        self.stage = "before the first iteration"
        self.spent: dict[str, float] = {}
        self.started = self.clock_at = time.perf_counter()
        self.best: tuple[float, ...] | None = None
        self.next_eval = self.args.eval_every
        self.scores: dict[str, float] = {}
        self.is_battle = False
        self.metrics: Metrics = None  # type: ignore[assignment]  # until `start`

    # before the training

    @property
    def resumed(self) -> bool:
        """Whether there is a save to go on from (a run killed before its first one starts anew)."""
        return bool(self.spec)

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return find_device(self.args.device)

    @property
    def facts(self) -> dict[str, Any]:
        """What was recorded in args.json besides the settings."""
        return self.folder.facts

    def record(self, **facts: Any) -> None:
        """Note in args.json, at once, what else decides this run, e.g. which of several files was taken."""
        if self.folder.facts | facts != self.folder.facts:  # a resume that is refused later on changes nothing
            self.folder.facts |= facts
            self.folder.write_about()

    def start(
        self, net: nn.Module, env_spec: EnvSpec, *, learners: list[int], facts: dict[str, Any] | None = None,
        keep: dict[str, Any] | None = None, title: str = "", say: tuple[str, ...] | list[str] = (),
    ) -> None:  # fmt: skip
        """Everything is made: restore it if the run goes on, open the logs.

        net: its weights are in every checkpoint. learners: the seats that learn. facts: further entries of spec.json.
        keep: whatever else must survive a kill, by name: modules, optimizers, random generators, arrays and tensors,
        dicts of them, lists of dicts of arrays, and things with get_state() and set_state() in dicts of arrays (which
        always hold the same names, shapes and types).
        """
        self.net, self.learners, self.title = net, learners, title
        kinds = [name.removesuffix("s") for name in env_spec.plane_names[env_spec.num_players + 1 :]]
        self.player_names = [f"return-player{i + 1}" for i in range(env_spec.num_players)] if kinds else []
        self.rate_names = [f"{kind}_rate" for kind in kinds]
        # since the last row: episodes, steps, battles won, returns of the players, items taken of each kind
        self.window = np.zeros(3 + env_spec.num_players + len(kinds))
        self.keep = {"run": self.window, **(keep or {})}
        self.facts_of_spec: dict[str, Any] = {
            "script": self.folder.script.name, "code_version": self.folder.code_version, "env_id": env_spec.env_id,
            "obs_shape": list(env_spec.obs_shape), "num_actions": env_spec.num_actions, "learners": learners,
            "env_config": env_spec.config, "args": asdict(self.folder.args) | {"resume": ""},
        } | self.facts | (facts or {})  # fmt: skip
        wall_time = self.restore() if self.resumed else 0.0
        if not self.folder.about.exists():
            self.folder.write_about()
        self.metrics = Metrics(self.args, self.dir, self.folder.script, self.step, self.spec.get("metrics", ""))
        total = self.args.num_iterations * self.args.batch_size
        going_on = f", from step {self.step}" if self.step else ""
        print(f"{title or env_spec.env_id}, {total} env steps{going_on} -> {self.dir}", *say, sep="\n", flush=True)
        self.started = time.perf_counter() - wall_time

    def restore(self) -> float:
        """Bring everything back to where the save stood; returns the seconds that the run has taken so far."""
        folder, spec = self.dir / "checkpoints" / "last", self.spec
        for name in ("obs_shape", "num_actions", "learners"):
            if spec[name] != self.facts_of_spec[name]:
                here = self.facts_of_spec[name]
                raise ConfigError(f"'{folder / 'spec.json'}' does not fit: {name} is {spec[name]}, not {here}")
        if spec["best"] is not None and (folder.with_name("best")).exists():
            checkpoints.read_checkpoint(folder.with_name("best"))
        weights, state, _ = self.folder.saved  # type: ignore[misc]  # there is one: this run is resumed
        load_weights(self.net, weights, folder / "weights.safetensors")
        for name in {key.partition(".")[0] for key in state} - self.keep.keys():
            raise ConfigError(f"'{folder / 'resume.safetensors'}' does not fit: it has an unknown '{name}'")
        for name, thing in self.keep.items():
            checkpoints.unpack(thing, checkpoints.part(state, name), folder / "resume.safetensors", name)
        self.folder.saved = None
        self.iteration, self.step = spec["iteration"], spec["global_step"]
        self.best = None if spec["best"] is None else tuple(spec["best"])
        self.next_eval, self.spent = spec["next_eval"], dict(spec["time"])
        return float(spec["wall_time"])

    # the training

    def iterations(self) -> Iterator[int]:
        """The numbers of the iterations that are left; saves after one when it is time, and on a stop signal."""
        last, each = self.args.num_iterations, self.args.batch_size
        self.clock_at = time.perf_counter()
        self.next_line = self.step + last * each / 10
        self.signals.hold, self.stage = True, "in the training"
        self.bar = tqdm(
            total=last * each, initial=self.step, unit=" steps", unit_scale=True, disable=not sys.stderr.isatty()
        )
        for iteration in range(self.iteration + 1, last + 1):
            self.iteration, self.step = iteration, iteration * each
            yield iteration
            self.bar.update(each)
            if iteration % self.args.checkpoint_every == 0 or iteration == last or self.signals.received:
                self.save()
            if self.signals.received:
                self.stage = "saved"
                raise Stop(self.signals.received[0])
        self.bar.close()
        self.signals.hold, self.stage = False, "in the final evaluation"

    @property
    def progress(self) -> float:
        """Share of the training that lies behind, from 0 in the first iteration."""
        return (self.iteration - 1) / self.args.num_iterations

    @property
    def wall_time(self) -> float:
        return time.perf_counter() - self.started

    def clock(self, name: str) -> None:
        """Book the time since the last call on one part of the loop."""
        now = time.perf_counter()
        self.spent[name] = self.spent.get(name, 0.0) + now - self.clock_at
        self.clock_at = now

    def count(self, info: dict[str, np.ndarray], num: int | None = None) -> None:
        """Note the episodes that ended in this step, and the items taken, in the first `num` envs (default: all)."""
        done, players = info["done"][:num], len(info["episode_return"][0])
        if done.any():
            self.window[:2] += done.sum(), info["episode_length"][:num][done].sum()
            self.window[3 : 3 + players] += info["episode_return"][:num][done].sum(0)
        if "battle_won" in info:
            self.is_battle = True
            self.window[2] += info["battle_won"][:num][done].sum()
        for kind in range(len(self.rate_names)):
            self.window[3 + players + kind] += (info["taken"][:num] == 1 + kind).sum()

    def evaluation_due(self) -> bool:
        """Every `eval_every` env steps, and the last weights."""
        every = self.args.eval_every
        return every > 0 and (self.step >= self.next_eval or self.iteration == self.args.num_iterations)

    def evaluated(self, scores: dict[str, float], by: tuple[str, ...] = ("return",)) -> None:
        """Scores become eval/* of the next row. The weights are kept as the best ones unless an evaluation before was
        clearly better: scores are compared in the order of `by`, and within the interval of the first (`<name>_ci95`)
        the later weights win, or the luckiest of many evaluations would."""
        self.next_eval = (self.step // self.args.eval_every + 1) * self.args.eval_every
        self.scores, names = dict(scores), [name for name in by if name in scores]
        rank, spread = tuple(float(scores[name]) for name in names), scores.get(f"{names[0]}_ci95", -math.inf)
        best = self.best or rank
        if np.isfinite(rank).all() and (rank >= best or rank[0] + spread >= best[0]):
            self.best = max(best, rank)
            spec = self.spec_of_now() | {"eval": scores}
            write_checkpoint(self.dir / "checkpoints" / "best", self.net.state_dict(), None, spec)
        self.show_itself("eval/film")

    def show_itself(self, name: str, page: bool = False) -> None:
        """A film or a replay page of the present weights, for the folder, TensorBoard and wandb, if that is wanted."""
        if self.args.capture_video or (self.args.track and can_show(self.args.env_id)):
            from envs.film import capture

            self.metrics.picture(name, capture(self, page), self.step)

    def log_due(self) -> bool:
        """Every `log_every` iterations, at the last one, and after every evaluation."""
        every, last = self.args.log_every, self.args.num_iterations
        return self.iteration % every == 0 or self.iteration == last or bool(self.scores)

    def log(self, scalars: dict[str, float]) -> None:
        """One row of metrics: these scalars, and what the recorder knows itself. What is no number is left out."""
        wall_time, total = self.wall_time, sum(self.spent.values())
        row = {**self.episodes(), "charts/SPS": self.step / wall_time, **scalars}
        row |= {f"eval/{name}": x for name, x in self.scores.items()}
        row |= {f"time/{name}": seconds / total for name, seconds in self.spent.items()}
        row = {name: float(x) for name, x in row.items() if math.isfinite(x)}
        self.metrics.write(self.step, wall_time, row)
        self.window[:] = 0.0
        self.scores = {}
        self.show(row)

    def episodes(self) -> dict[str, float]:
        """Means over the episodes that ended since the last row."""
        if not self.window[0]:
            return {}
        _, length, won, *sums = self.window / self.window[0]
        players = len(sums) - len(self.rate_names)
        returns, taken = np.array(sums[:players]), np.array(sums[players:]) / players
        charts = {"episodic_return": returns[self.learners].mean()}
        charts |= {f"episodic_{name}": x for name, x in zip(self.player_names, returns, strict=False)}
        charts |= {"episodic_length": length} | dict(zip(self.rate_names, taken, strict=True))
        charts |= {"win_rate": won} if self.is_battle else {}
        return {f"charts/{name}": float(x) for name, x in charts.items()}

    def show(self, row: dict[str, float]) -> None:
        """The few figures that matter, on the progress bar, or ten times in a run as a line."""
        names = ["return", "win_rate"] if self.is_battle else ["return"]
        columns = {"return": "charts/episodic_return", "win_rate": "charts/win_rate"}
        shown = {name: f"{row[columns[name]]:.3f}" if columns[name] in row else "none yet" for name in names}
        best = "best_win_rate" if self.is_battle else "best_eval"
        shown[best] = "none yet" if self.best is None else f"{self.best[0]:.3f}"
        self.bar.set_postfix(shown, refresh=False)
        if self.bar.disable and (self.step >= self.next_line or self.iteration == self.args.num_iterations):
            total = self.args.num_iterations * self.args.batch_size
            self.next_line += total / 10
            figures = " ".join(f"{name} {x}" for name, x in shown.items())
            print(f"step {self.step}/{total} {figures} SPS {row['charts/SPS']:.0f}", flush=True)

    def save(self) -> None:
        """checkpoints/last: all that is needed to go on exactly from here."""
        for name, thing in self.keep.items():
            if isinstance(thing, nn.Module):
                checkpoints.refuse_non_finite(thing.state_dict(), f"the weights of {name}", FloatingPointError)
        self.metrics.flush()
        target, state = self.dir / "checkpoints" / "last", checkpoints.pack_all(self.keep)
        write_checkpoint(target, self.net.state_dict(), state, self.spec_of_now(), keep="previous")

    def spec_of_now(self) -> dict[str, Any]:
        """The spec of a checkpoint that is made now."""
        return self.facts_of_spec | {
            "iteration": self.iteration, "global_step": self.step, "wall_time": self.wall_time, "best": self.best,
            "next_eval": self.next_eval, "time": self.spent, "metrics": self.metrics.digest.hexdigest(),
        }  # fmt: skip

    # the end

    def load_best(self) -> bool:
        """Take the weights of the best evaluation, if there was one."""
        folder = self.dir / "checkpoints" / "best"
        if not folder.exists():
            return False
        read_weights(folder, self.net)
        return True

    def finish(self, results: dict[str, dict[str, float] | None]) -> None:
        """The final scores, by name: "eval" for the last weights, "eval_greedy", "eval_best", ..."""
        results = {"eval_best": None, **results}
        wall_time = self.wall_time
        self.metrics.write_final(self.step, results)
        draw_curve(self.dir / "curve.png", self.metrics.rows, f"{self.title}, seed {self.args.seed}")
        summary = {"finished": True, "global_step": self.step, "wall_time": wall_time, **results}
        self.show_itself("final/replay", page=True)
        write_json(self.dir / "result.json", summary | {"time": self.spent})
        print(f"finished in {wall_time:.0f} s; on fresh episodes:")
        for name, scores in sorted(results.items(), key=lambda item: item[0] == "eval_best"):
            if scores:
                name = "best" if name == "eval_best" else name.replace("eval", "last", 1)
                print(f"  {name:<12} {self.in_words(scores)}")
        print(f"curve: {self.dir / 'curve.png'}", flush=True)
        self.metrics.show_pictures(self.dir, self.step)

    def in_words(self, scores: dict[str, float]) -> str:
        """One line of the final table."""
        words = []
        for name in ("return", "win_rate", *self.rate_names, "length"):
            spread = f" +- {scores[f'{name}_ci95']:.3f}" if f"{name}_ci95" in scores else ""
            words += [f"{name} {scores[name]:.3f}{spread}"] if name in scores else []
        players = [f"{scores[name]:.3f}" for name in self.player_names if name in scores]
        words += [f"players {' '.join(players)}"] if players else []
        return "  ".join(words) + (f"  ({scores['episodes']:.0f} episodes)" if "episodes" in scores else "")

    @property
    def steps_done(self) -> int:
        """Env steps of the iterations that ended."""
        return max(0, self.iteration - 1) * self.args.batch_size

    def kept(self) -> str:
        last = self.dir / "checkpoints" / "last"
        return f"the last good checkpoint is {last}" if last.exists() else "no checkpoint was saved yet"

    def stopped(self) -> str:
        """What to say after a stop signal."""
        script = self.folder.script
        name = script.name if Path.cwd() == script.parent else script
        command = f"python {name} --resume {self.dir}"
        if self.stage == "saved":
            return f"stopped and saved at step {self.step}; go on with: {command}"
        if not self.folder.about.exists():
            return f"stopped {self.stage}: there is nothing to save"
        return f"stopped {self.stage}: nothing is lost; go on with: {command}"

    def forget(self) -> None:
        """A run that could not begin leaves nothing behind."""
        if self.folder.is_new and not (self.dir / "metrics.csv").exists():
            system.remove(self.folder.about)

    def close(self) -> None:
        """End the logs and free the folder."""
        if hasattr(self, "bar"):
            self.bar.close()
        if self.metrics:
            self.metrics.close()
        self.folder.close()
