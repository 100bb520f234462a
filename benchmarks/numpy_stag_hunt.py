"""The Stag Hunt written in numpy, as well as numpy allows: what the compiled core is compared with.

Every step advances all games at once and brings observations, masks, terminations, truncations and the automatic
reset with the final observation, just as the core does; positions that did not change are not drawn again.

    game = NumpyStagHunt(num_envs=1024, seed=1)
    obs, info = game.reset()
    obs, reward, terminated, truncated, info = game.step(actions)      # actions (B, N)
"""

import numpy as np

STAY, STAG, HARE = 4, 5, 6


class NumpyStagHunt:
    """A batch of Stag Hunts. Boards with blocks can be put in by `set_states`; fresh starts have none."""

    def __init__(
        self,
        num_envs,
        seed=0,
        height=4,
        width=4,
        num_players=4,
        num_stags=1,
        num_hares=4,
        horizon=35,
        stag_reward=10.0,
        hare_reward=1.0,
        hunters_needed=2,
        player_strength=None,
        time_reward=0.0,
        prosocial=False,
        final_time_after_first_hunt=None,
    ):
        self.num_envs, self.num_players, self.horizon = num_envs, num_players, horizon
        self.height, self.width, self.num_cells = height, width, height * width
        self.num_stags, self.num_hares = num_stags, num_hares
        self.stag_reward, self.hare_reward, self.hunters_needed = stag_reward, hare_reward, hunters_needed
        self.strength = np.asarray(player_strength or (1,) * num_players, dtype=np.float64)
        self.time_reward, self.prosocial = time_reward, prosocial
        self.final_time = final_time_after_first_hunt
        self.rng = np.random.default_rng(seed)

        # Every array has one more cell: "left the board" is cell num_cells, and so is everything off the grid
        # (a block). Where a move leads: target[cell, action]; off the grid and from nowhere it leads nowhere.
        outside = self.num_cells
        rows, columns = np.divmod(np.arange(self.num_cells), width)
        self.target = np.full((self.num_cells + 1, 5), outside)  # (cells + 1, 5)
        self.target[:outside, 0] = np.where(rows > 0, np.arange(outside) - width, outside)
        self.target[:outside, 1] = np.where(rows < height - 1, np.arange(outside) + width, outside)
        self.target[:outside, 2] = np.where(columns > 0, np.arange(outside) - 1, outside)
        self.target[:outside, 3] = np.where(columns < width - 1, np.arange(outside) + 1, outside)
        self.target[:outside, 4] = np.arange(outside)

        batch, players, planes = num_envs, num_players, num_players + 3
        self.t = np.zeros(batch, dtype=np.int32)
        self.deadline = np.full(batch, horizon, dtype=np.int32)
        self.cells = np.full((batch, players), outside)  # (B, N)
        self.board = np.zeros((batch, outside + 1), dtype=np.uint8)  # (B, cells + 1): 0 free, 1 block, 2 stag, 3 hare
        self.board[:, outside] = 1
        self.prey = np.zeros(batch, dtype=np.int32)  # prey left
        self.returns = np.zeros((batch, players))

        # One cell too many per observation: planes of a player that left are drawn there. `obs` is a view without it.
        self.canvas = np.zeros((batch, players, outside + 1, planes), dtype=np.uint8)
        self.obs = self.canvas[:, :, :outside].reshape(batch, players, height, width, planes)  # a view
        # where in the flat canvas player j stands in player i's observation: base[b, i, j] + cell * planes
        observer = (np.arange(batch)[:, None] * players + np.arange(players)) * (outside + 1) * planes  # (B, N)
        plane = (np.arange(players)[None, :] - np.arange(players)[:, None]) % players  # (i, j)
        self.base = observer[:, :, None] + plane[None]  # (B, N, N)
        self.drawn = self.base + outside * planes  # what is drawn now
        self.final_obs = np.zeros((batch, players, height, width, planes), dtype=np.uint8)
        self.legal = np.zeros((batch, players, 7), dtype=bool)
        self.legal[:, :, STAY] = True
        self.offset = np.repeat(np.arange(batch) * (outside + 1), players).reshape(batch, players)  # of each board

    @property
    def alive(self):
        """Players on the board (B, N)."""
        return self.cells != self.num_cells

    def reset(self):
        """Fresh starts everywhere."""
        self._start(np.arange(self.num_envs))
        self._draw_players(slice(None))
        self._draw_boards(slice(None))
        return self.obs, {}

    def set_states(self, states):
        """Puts in states as the core writes them: t, deadline, players' cells (-1 left), board."""
        players = self.num_players
        self.t[:], self.deadline[:] = states[:, 0], states[:, 1]
        self.cells[:] = np.where(states[:, 2 : 2 + players] < 0, self.num_cells, states[:, 2 : 2 + players])
        self.board[:, : self.num_cells] = states[:, 2 + players :]
        self.prey[:] = (self.board >= 2).sum(1)
        self.returns[:] = 0
        self._draw_players(slice(None))
        self._draw_boards(slice(None))

    def get_states(self):
        cells = np.where(self.alive, self.cells, -1)
        return np.concatenate([self.t[:, None], self.deadline[:, None], cells, self.board[:, :-1]], 1).astype(np.int16)

    def step(self, actions, auto_reset=True):
        alive = self.alive
        wanted = np.take_along_axis(self.legal, actions[:, :, None], 2)[:, :, 0]
        illegal = (alive & ~wanted).sum(1)
        actions = np.where(wanted & alive, actions, STAY)

        # move: hunters and players that left stay where they are
        before = self.cells
        self.cells = self.target[before, np.minimum(actions, STAY)]

        # hunt: only the few rows in which somebody does
        reward = np.zeros((self.num_envs, self.num_players))
        taken = np.zeros((self.num_envs, self.num_players), dtype=np.int8)
        hunting = actions > STAY
        hunted = np.flatnonzero(hunting.any(1))
        if len(hunted):
            cells, stag, hare = before[hunted], actions[hunted] == STAG, actions[hunted] == HARE
            together = cells[:, :, None] == cells[:, None, :]  # (b, N, N)
            stag_party = together & stag[:, :, None] & stag[:, None, :]
            stag &= stag_party.sum(2) >= self.hunters_needed
            hare_party = (together & hare[:, :, None] & hare[:, None, :]).sum(2)
            shares = self.stag_reward * self.strength / np.maximum(stag_party @ self.strength, 1e-300)
            reward[hunted] = np.where(stag, shares, np.where(hare, self.hare_reward / np.maximum(hare_party, 1), 0.0))
            taken[hunted] = stag + 2 * hare
            who, player = np.nonzero(stag | hare)
            rows, cell = hunted[who], cells[who, player]
            self.board[rows, cell] = 0
            self.cells[rows, player] = self.num_cells
            changed = np.unique(rows)
            self.prey[changed] = (self.board[changed] >= 2).sum(1)
            if self.final_time is not None:
                self.deadline[changed] = np.minimum(self.deadline[changed], self.t[changed] + 1 + self.final_time)
        else:
            changed = hunted

        if self.time_reward:
            reward += self.time_reward * alive
        if self.prosocial:
            reward = alive * reward.mean(1, keepdims=True)
        self.t += 1
        self.returns += reward

        # ends
        still = self.alive
        no_prey, late = self.prey == 0, self.t >= self.deadline
        terminated = alive & (~still | no_prey[:, None])
        truncated = still & (late & ~no_prey)[:, None]
        done = no_prey | late | ~still.any(1)

        # observations and masks, then the automatic reset
        self._draw_players(slice(None))
        self._draw_boards(changed)
        info = {"done": done, "taken": taken, "illegal_actions": illegal, "final_obs": self.final_obs}
        ended = np.flatnonzero(done)
        if len(ended) and auto_reset:
            self.final_obs[ended] = self.obs[ended]
            info["episode_return"], info["episode_length"] = self.returns.copy(), self.t.copy()
            self._start(ended)
            self._draw_players(ended)
            self._draw_boards(ended)
        return self.obs, reward.astype(np.float32), terminated, truncated, info

    def _start(self, rows):
        """Prey on distinct cells, players anywhere."""
        prey = self.num_stags + self.num_hares
        places = np.argpartition(self.rng.random((len(rows), self.num_cells)), prey - 1, axis=1)[:, :prey]
        places = self.rng.permuted(places, axis=1)
        self.board[rows, :-1] = 0
        self.board[rows[:, None], places] = np.repeat([2, 3], [self.num_stags, self.num_hares]).astype(np.uint8)
        self.cells[rows] = self.rng.integers(self.num_cells, size=(len(rows), self.num_players))
        self.t[rows], self.deadline[rows], self.prey[rows], self.returns[rows] = 0, self.horizon, prey, 0.0

    def _draw_players(self, rows):
        """Player planes and masks of the present states in `rows`."""
        nowhere, planes = self.num_cells, self.num_players + 3
        cells = self.cells[rows]
        seen = np.where((cells != nowhere)[:, :, None], cells[:, None, :], nowhere)  # a player that left sees nothing
        flat = self.canvas.reshape(-1)
        flat[self.drawn[rows]] = 0
        drawn = self.base[rows] + seen * planes
        flat[drawn] = 1
        self.drawn[rows] = drawn
        boards = self.board.reshape(-1)
        offset = self.offset[rows]
        under = boards.take(offset + cells)
        legal = self.legal[rows]
        legal[:, :, :4] = boards.take(offset[:, :, None] + self.target[:, :4].take(cells, axis=0)) != 1
        legal[:, :, STAG] = under == 2
        legal[:, :, HARE] = under == 3
        self.legal[rows] = legal

    def _draw_boards(self, rows):
        """Planes of blocks, stags and hares: drawn only where something changed."""
        items = self.board[rows, :-1, None] == np.array([1, 2, 3], dtype=np.uint8)  # (b, cells, 3)
        self.canvas[rows, :, :-1, self.num_players :] = items[:, None] & self.alive[rows][:, :, None, None]
