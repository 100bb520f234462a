"""The figures of a run: metrics.csv, TensorBoard and, if asked for, wandb, under the same names; and the curve."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from envs import system
from envs.checkpoints import one_line, read_bytes
from envs.errors import ConfigError

FIRST_COLUMNS = ["global_step", "wall_time"]

Row = dict[str, str]  # the cells that are not empty


class Metrics:
    """One row at a time. A scalar with a new name is a new column; rows before it have an empty cell there."""

    def __init__(self, args: Any, folder: Path, script: Path, step: int, digest: str):
        """`step`: env steps of the checkpoint from which the run goes on; rows after it are forgotten. `digest` is
        that of the rows up to it, so that a damaged file is not taken for the run's."""
        self.path = folder / "metrics.csv"
        if self.path.is_dir():
            raise ConfigError(f"'{self.path}' cannot be used: it is a folder")
        self.columns, self.digest = list(FIRST_COLUMNS), hashlib.sha256()
        self.rows: list[Row] = []
        for row in read_rows(self.path, step) if digest else []:
            self.note(row)
        if digest and self.digest.hexdigest() != digest:
            raise ConfigError(f"'{self.path}' is damaged: its rows up to step {step} are not those of checkpoints/last")
        self.rewrite()
        self.tensorboard = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        self.settings = asdict(args)
        table = "\n".join(f"|{name}|{value}|" for name, value in self.settings.items())
        self.tensorboard.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        self.wandb = start_wandb(args, folder, script) if args.track else None

    def note(self, row: Row) -> bool:
        """Remember a row; returns whether it has a new column."""
        new = [name for name in row if name not in self.columns]
        self.columns += new
        self.rows.append(row)
        self.digest.update(json.dumps(sorted(row.items())).encode())
        return bool(new)

    def rewrite(self) -> None:
        """The whole file anew, in one step."""
        draft = self.path.with_name("metrics.csv.tmp")
        lines = [self.columns, *([row.get(name, "") for name in self.columns] for row in self.rows)]
        system.write_file(draft, as_csv(lines))
        system.move(draft, self.path)

    def write(self, step: int, wall_time: float, scalars: dict[str, float]) -> None:
        row = {"global_step": str(step), "wall_time": f"{wall_time:.3f}"}
        row |= {name: str(value) for name, value in scalars.items()}
        if self.note(row):
            self.rewrite()
        else:
            system.append_file(self.path, as_csv([[row.get(name, "") for name in self.columns]]))
        for name, value in scalars.items():
            self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(scalars, step=step)

    def write_final(self, step: int, results: dict[str, dict[str, float] | None]) -> None:
        """The final scores as final/<name>/<score>, on TensorBoard and wandb."""
        final = {name: scores for name, scores in results.items() if scores}
        scalars = {f"final/{name}/{score}": x for name, scores in final.items() for score, x in scores.items()}
        for name, value in scalars.items():
            self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(scalars, step=step)
        settings = {name: x if isinstance(x, (bool, int, float)) else str(x) for name, x in self.settings.items()}
        shown = {name: x for name, x in scalars.items() if name.startswith("final/eval/")}
        for summary in hparams(settings, shown) if shown else ():  # TensorBoard's page of hyperparameters
            self.tensorboard._get_file_writer().add_summary(summary)

    def show_pictures(self, folder: Path, step: int) -> None:
        """All pictures of a run folder, for wandb."""
        if self.wandb:
            import wandb

            self.wandb.log({path.stem: wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))}, step=step)

    def picture(self, name: str, path: Path, step: int) -> None:
        """A film (GIF) to TensorBoard; a film or a page to wandb, to look at and as an artefact."""
        if path.suffix == ".gif":
            with Image.open(path) as film:
                image = Summary.Image(width=film.width, height=film.height, colorspace=3)
            image.encoded_image_string = path.read_bytes()
            writer: Any = self.tensorboard.file_writer
            writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)
        if self.wandb:
            import wandb

            media = wandb.Video(str(path)) if path.suffix == ".gif" else wandb.Html(str(path))
            self.wandb.log({name: media}, step=step)
            artefact = wandb.Artifact(f"{self.wandb.id}-{name.replace('/', '-')}", type="replay")
            artefact.add_file(str(path))
            self.wandb.log_artifact(artefact)

    def flush(self) -> None:
        """Bring all rows to the disk."""
        self.tensorboard.flush()
        system.sync_file(self.path)

    def close(self) -> None:
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def as_csv(lines: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


def read_rows(path: Path, step: int) -> list[Row]:
    """The rows of a metrics.csv up to an env step, or up to the first that is none."""
    text = read_bytes(path).decode(errors="replace")
    lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))  # a kill can cut off the last one
    rows = []
    try:
        columns = next(lines, [])
        for line in lines:
            if len(line) != len(columns) or not line[0].isdecimal() or int(line[0]) > step:
                break
            rows.append({name: cell for name, cell in zip(columns, line, strict=True) if cell})
    except (csv.Error, ValueError):
        pass
    return rows


def start_wandb(args: Any, folder: Path, script: Path) -> Any:
    """A tracked run, the same one for the same folder; with the script that made it."""
    try:
        import wandb

        run = wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, group=args.wandb_group, dir=str(folder),
            tags=[tag for tag in args.wandb_tags.split(",") if tag], name=folder.name, config=asdict(args),
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16], resume="allow",
        )  # fmt: skip
        run.save(str(script), base_path=str(script.parent), policy="now")
        return run
    except Exception as error:
        raise ConfigError(f"--track: wandb could not be started: {one_line(error)}") from error


def draw_curve(path: Path, rows: list[Row], title: str) -> None:
    """Return, and in battles the win rate, in training and in all evaluations over env steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = sorted({name for row in rows for name in row})
    panels = [("charts/episodic_return", "return", "mean return of the learners")]
    panels += [("charts/win_rate", "win_rate", "battles won")] if "charts/win_rate" in columns else []
    figure, axes = plt.subplots(1, len(panels), figsize=(6.5 * len(panels), 4), layout="constrained", squeeze=False)
    for panel, (training, ending, label) in zip(axes[0], panels, strict=True):
        evaluations = [name for name in columns if name.startswith("eval/") and name.endswith(ending)]
        for name in (training, *evaluations):
            points = [(int(row["global_step"]), float(row[name])) for row in rows if name in row]
            extra = name.removeprefix("eval/").removesuffix(ending).strip("_")
            who = "training" if name == training else f"evaluation ({extra})" if extra else "evaluation"
            if points:
                style, alpha = ("-", 0.6) if name == training else ("o-", 1.0)
                panel.plot(*zip(*points, strict=True), style, markersize=4, label=who, alpha=alpha)
        panel.set(xlabel="env steps", ylabel=label, title=title)
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
