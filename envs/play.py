"""Watch players, or play yourself in the terminal, and see afterwards what they thought of you.

    python -m envs.play --env-id msh-4h1s-4x4 --roles ns,ns,nh,random --episodes 3 --gif hunt.gif
    python -m envs.play --env-id msd-4x4 --roles human,nd,nd,fix
    python -m envs.play --roles human,runs/<hop>,ns,nh --replay mine.html
    python -m envs.play --env-id msh-4h1s-8x8 --set max_block_comp=3 --set num_stags=2 --episodes 1000 --quiet
    python -m envs.play --env-id smac-3m --policy nearest --gif battle.gif

Episode k is the k-th of row 0 of envs.make(env_id, seed=seed).
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

import envs
from envs import system
from envs.arguments import Positive, Whole, parse
from envs.errors import ConfigError
from envs.grid import FIRST_INTERACTION, STAY, GridEnv, GridGame
from envs.render import View, ansi, legend, picture, write_gif
from envs.replay import Replay, label_of, play_grid
from envs.roles import Seats

HUMAN = "human"
KEYS = {"w": "UP", "a": "LEFT", "s": "DOWN", "d": "RIGHT", " ": "STAY"}  # the arrows are called as the actions
HUNT_KEY, QUIT_KEY, CTRL_D = "h", "q", "\x04"


@dataclass
class Args:
    env_id: str = "msh-4h1s-4x4"
    """the game; a wrong id lists the valid ones"""
    roles: str = ""
    """one role per seat, separated by commas: human, a rule-based player, FILE.py:CLASS, a run folder (empty: a mix)"""
    policy: str = "nearest"
    """the team of a battle (smac ids), a rule-based one or a run folder; the grid games use roles instead"""
    episodes: Positive = 3
    """how many episodes to play"""
    seed: Whole = 1
    """of the start positions and of the players' random choices"""
    gif: str | None = None
    """file to write the episodes to, as an animation"""
    replay: str | None = None
    """page to write what was played and thought to (default: replay.html, if a person plays)"""
    fps: float | None = None
    """steps per second in the GIF (default: 2.5 for grid games, 16 for battles)"""
    quiet: bool = False
    """print the results only, no boards"""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """a setting of the game as name=value, such as max_block_comp=2; may be given several times"""


class Quit(Exception):
    """A person wants to stop."""


# ---------------------------------------------------------------------------------------------------------------------
# reading what was asked for
# ---------------------------------------------------------------------------------------------------------------------


def parse_override(text: str) -> tuple[str, Any]:
    """Text `max_block_comp=2` -> ("max_block_comp", 2); values are Python literals, true, false, none, or words."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"--set needs name=value, not '{text}'")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def default_roles(game: GridGame) -> list[str]:
    """Half of the seats to the game's first seeker, then its other seekers and `random` in turn."""
    first, *others = game.seekers or ("random",)
    half = (game.num_players + 1) // 2
    rest = [*others, "random"]
    return [first] * half + [rest[k % len(rest)] for k in range(game.num_players - half)]


def parse_roles(game: GridGame, text: str) -> list[str]:
    """One role per seat; whether each is one is asked where it is seated."""
    roles = [role.strip() for role in text.split(",")] if text else default_roles(game)
    if len(roles) != game.num_players:
        raise ConfigError(f"{game.env_id} has {game.num_players} players, not the {len(roles)} of '{','.join(roles)}'")
    return roles


def check(args: Args) -> None:
    if args.fps is not None and not args.fps > 0:
        raise ConfigError(f"--fps must be above 0, not {args.fps}")
    for name, file, ending in (("gif", args.gif, ".gif"), ("replay", args.replay, ".html")):
        if file is None:
            continue
        path = Path(file)
        if path.suffix.lower() != ending:
            raise ConfigError(f"--{name} must be a file name ending in {ending}, not '{file}'")
        if not path.parent.is_dir():
            raise ConfigError(f"--{name} cannot be written: there is no folder '{path.parent}'")


# ---------------------------------------------------------------------------------------------------------------------
# a person at the keyboard
# ---------------------------------------------------------------------------------------------------------------------


def understand(text: str, action_names: tuple[str, ...], legal: np.ndarray) -> int | str:
    """The action that a typed line means, or a sentence about why it means none."""
    word = " " if text.isspace() else text.strip().lower()
    allowed = [action_names[a] for a in np.flatnonzero(legal)]
    if word == HUNT_KEY:
        here = np.flatnonzero(legal[FIRST_INTERACTION:])
        return FIRST_INTERACTION + int(here[0]) if len(here) else "there is nothing to take on your cell"
    wanted = KEYS.get(word, word.upper())
    if wanted.isdigit() and int(wanted) < len(action_names):
        wanted = action_names[int(wanted)]
    if wanted not in action_names:
        return f"'{text.strip()}' is no action; legal are {', '.join(allowed)}"
    if wanted not in allowed:
        return f"{wanted} is illegal here; legal are {', '.join(allowed)}"
    return action_names.index(wanted)


def offers(action_names: tuple[str, ...], legal: np.ndarray) -> str:
    """What can be done with which key; what is illegal now stands in brackets."""
    keys = {action: "space" if key == " " else key for key, action in KEYS.items()}
    words = []
    for action, name in enumerate(action_names):
        if action < FIRST_INTERACTION or legal[action]:
            word = f"{keys.get(name, HUNT_KEY)} {name}"
            words.append(word if legal[action] else f"({word})")
    return ", ".join(words)


class Person:
    """Somebody at the keyboard in one seat: single keys and arrows at a terminal, lines where there is none."""

    def __init__(self, seat: int):
        self.seat = seat

    def act(self, env: GridEnv) -> np.ndarray:
        """Ask until the answer is a legal action."""
        if not env.alive[0, self.seat]:
            return np.array([STAY])
        names, legal = env.spec.action_names, env.legal[0, self.seat]
        while True:
            choices = f"arrows or {offers(names, legal)}, {QUIT_KEY} quits"
            text = self.ask(f"player {self.seat + 1}, your action ({choices}): ")
            if text.strip().lower() == QUIT_KEY:
                raise Quit
            answer = understand(text, names, legal)
            if isinstance(answer, int):
                return np.array([answer])
            print(answer)

    def ask(self, question: str) -> str:
        if sys.stdin.isatty():
            print(question, end="", flush=True)
            text = system.read_key()
            if text in ("", CTRL_D):
                raise Quit
            print("space" if text == " " else text)
            return text
        try:
            text = input(question)
        except EOFError:
            print()
            raise Quit from None
        print(text)  # what was piped in, where a terminal would show what was typed
        return text


# ---------------------------------------------------------------------------------------------------------------------
# playing
# ---------------------------------------------------------------------------------------------------------------------


def play_episodes(args: Args, game: GridGame, roles: list[str]) -> None:
    """Play the episodes, print them and the means, and write the GIF and the replay page."""
    env = GridEnv(game, 1, args.seed)
    humans: dict[int, Any] = {seat: Person(seat) for seat, role in enumerate(roles) if role == HUMAN}
    seats = Seats(env, roles, HUMAN, args.seed, policies=humans)
    labels = ["you" if role == HUMAN else label_of(role, env) for role in roles]
    page = args.replay or ("replay.html" if humans else "")
    replay = Replay(env, labels, args.seed) if page else None
    frames: list[np.ndarray] = []
    ends: list[int] = []  # numbers of the frames that end an episode
    views: list[View] = []  # the last one of each episode
    if not args.quiet or humans:
        print(f"{legend(game)}\n")
    try:
        for view in play_grid(env, seats, labels, args.episodes, replay):
            if not args.quiet or humans:
                print(ansi(view, sys.stdout.isatty()), end="\n\n")
            if args.gif is not None:
                frames.append(picture(view))
            if view.ending:
                views.append(view)
                ends.append(len(frames) - 1)
                each, mean = " ".join(f"{total:.2f}" for total in view.returns), np.mean(view.returns)
                print(f"episode {len(views)}: {view.t} steps, {view.ending}; returns {each}; mean {mean:.3f}")
    except Quit:
        print(f"stopped after {len(views)} whole episodes")
    if views:
        print_means(game, labels, np.array([view.returns for view in views]), np.array([view.took for view in views]))
    if args.gif and frames:
        write_gif(args.gif, frames, args.fps or 2.5, [end for end in ends if end >= 0])
        print(f"wrote {args.gif} ({len(frames)} frames)")
    if replay and (views or replay.episode["steps"]):
        replay.write(page)
        print(f"wrote {page}: what was played and thought; open it in a browser")


def print_means(game: GridGame, roles: list[str], returns: np.ndarray, took: np.ndarray) -> None:
    """returns (E, N) and took (E, N, kinds) -> a table of means over episodes."""
    print(f"\nmeans of {len(returns)} episodes of {game.env_id}")
    space = max(8, *map(len, roles))
    print(f"{'seat':<10} {'role':<{space}} {'return':>8}" + "".join(f" {kind + 's':>8}" for kind in game.kinds))
    for i, role in enumerate(roles):
        counts = "".join(f" {count:8.3f}" for count in took[:, i].mean(axis=0))
        print(f"{f'player {i + 1}':<10} {role:<{space}} {returns[:, i].mean():8.3f}{counts}")
    counts = "".join(f" {count:8.3f}" for count in took.mean(axis=(0, 1)))
    print(f"{'mean':<10} {'':<{space}} {returns.mean():8.3f}{counts}")


def run(command_line: list[str]) -> None:
    args = parse(Args, __doc__, command_line, prog="python -m envs.play")
    check(args)
    overrides = dict(parse_override(text) for text in args.set)
    if args.env_id.startswith(envs.BATTLES):
        if args.roles:
            raise ConfigError("--roles are for the grid games; a battle takes --policy")
        from envs import battles

        how = (args.episodes, args.seed, args.gif, args.fps or 16, args.replay or "")
        battles.play(args.env_id, args.policy, *how, **overrides)
        return
    if args.env_id not in GridGame.registry:
        raise ConfigError(f"unknown env id '{args.env_id}'; valid ids are {', '.join(envs.ids())}")
    game = envs.game(args.env_id, **overrides)
    play_episodes(args, game, parse_roles(game, args.roles))


def main() -> None:
    try:
        run(sys.argv[1:])
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
