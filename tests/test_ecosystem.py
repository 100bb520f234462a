"""At home in the ecosystem: gymnasium's vector envs and wrappers, runners of the PyMARL family, and, where they are
installed, SuperSuit with stable-baselines3, TorchRL and RLlib (marked `ecosystem`)."""

import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, vector
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector as wrappers

import envs

HUNT, BATTLE = "msh-4h1s-4x4", "smac-3m"
ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs" / "ecosystem.md").read_text()
ecosystem = pytest.mark.ecosystem
OLD = tuple(map(int, gymnasium.__version__.split(".")[:2])) < (1, 4)  # its statistics miscount in the same-step mode
COUNTED = AutoresetMode.NEXT_STEP if OLD else AutoresetMode.SAME_STEP


# gymnasium -----------------------------------------------------------------------------------------------------------


def make_vec(env_id=HUNT, per_player=False, **options):
    return envs.make_vec(env_id, num_envs=3, seed=5, per_player=per_player, **options)


@pytest.mark.parametrize("env_id", [HUNT, "msd-6x6", BATTLE])
def test_spaces(env_id):
    spec = envs.spec(env_id)
    for per_player in (False, True):
        env = make_vec(env_id, per_player)
        assert isinstance(env, vector.VectorEnv) and env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        assert env.num_envs == 3 * (spec.num_players if per_player else 1)
        obs, _ = env.reset(seed=1)
        assert obs in env.observation_space and obs[0] in env.single_observation_space
        assert env.action_space.sample()[0] in env.single_action_space
        assert isinstance(env.single_action_space, spaces.Discrete if per_player else spaces.MultiDiscrete)
        obs, rewards, terminated, truncated, infos = env.step(env.action_space.sample())
        assert obs in env.observation_space and infos["action_mask"].shape[-1] == spec.num_actions
        for array, dtype in ((rewards, np.float64), (terminated, np.bool_), (truncated, np.bool_)):
            assert array.shape == (env.num_envs,) and array.dtype == dtype


@pytest.mark.parametrize("env_id", [HUNT, BATTLE])
def test_rows_are_the_games_of_the_batched_env(env_id):
    """By game and by player, through several ends: the same observations, rewards, ends and legal actions."""
    batched, games, players = envs.make(env_id, num_envs=3, seed=5), make_vec(env_id), make_vec(env_id, True)
    num_players, ends = batched.spec.num_players, 0
    for env in (games, players):
        np.testing.assert_array_equal(env.reset(seed=5)[0].reshape(batched.obs.shape), batched.obs)
    generator = np.random.default_rng(0)
    for _ in range(150):
        actions = generator.integers(batched.spec.num_actions, size=(3, num_players))
        obs, reward, _, truncated, info = batched.step(actions)
        done = info["done"]
        for env in (games, players):
            seen, paid, over, late, infos = env.step(actions.reshape(env.action_space.shape))
            np.testing.assert_array_equal(seen.reshape(obs.shape), obs)
            np.testing.assert_array_equal(infos["action_mask"].reshape(batched.legal.shape), batched.legal)
            np.testing.assert_array_equal(infos["alive"].reshape(batched.alive.shape), batched.alive)
            if env is games:
                np.testing.assert_allclose(paid, reward.mean(1), rtol=1e-6)
                np.testing.assert_array_equal(infos["player_rewards"], reward)
                np.testing.assert_array_equal(late, truncated.any(1))
            else:
                np.testing.assert_array_equal(paid, reward.ravel())
                np.testing.assert_array_equal(late, truncated.ravel())
            rows = done if env is games else done.repeat(num_players)
            np.testing.assert_array_equal(over | late, rows)
            assert not (over & late).any() and ("final_obs" in infos) == done.any()
            if done.any():
                np.testing.assert_array_equal(infos["_final_obs"], rows)
                last = np.stack(list(infos["final_obs"][rows])).reshape(-1, *obs.shape[1:])
                np.testing.assert_array_equal(last, info["final_obs"][done])
                returns = infos["final_info"]["episode_return"][rows].reshape(-1, num_players)
                np.testing.assert_array_equal(returns, info["episode_return"][done])
        ends += done.sum()
    assert ends > 6


def episodes(env, steps):
    """What each row lives through, as (observation, reward, terminated, truncated) per env step of that row; the k-th
    of them is done with the row's k-th action, whatever the autoreset mode."""
    plan = np.random.default_rng(1).integers(7, size=(steps, *env.action_space.shape))
    obs, _ = env.reset(seed=3)
    rows = [[obs[row].tobytes()] for row in range(env.num_envs)]
    made, waits = np.zeros(env.num_envs, int), np.zeros(env.num_envs, bool)
    for _ in range(steps):
        obs, rewards, terminated, truncated, infos = env.step(plan[made, np.arange(env.num_envs)])
        for row in range(env.num_envs):
            if waits[row]:
                assert rewards[row] == 0 and not terminated[row] and not truncated[row]
                rows[row].append(obs[row].tobytes())
                continue
            made[row] += 1
            over = terminated[row] or truncated[row]
            same_step = over and "final_obs" in infos
            rows[row] += [(infos["final_obs"][row] if same_step else obs[row]).tobytes(), float(rewards[row])]
            rows[row] += [bool(terminated[row]), bool(truncated[row])] + ([obs[row].tobytes()] if same_step else [])
        if env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
            waits = terminated | truncated
    return rows


@pytest.mark.parametrize("per_player", [False, True])
def test_both_autoreset_modes_play_the_same_episodes(per_player):
    """Gymnasium's next-step mode spends one step more per episode, and is the same otherwise, for every row."""
    same = episodes(make_vec(HUNT, per_player, horizon=6), 60)
    following = episodes(make_vec(HUNT, per_player, horizon=6, autoreset_mode=AutoresetMode.NEXT_STEP), 60)
    for one, two in zip(same, following, strict=True):
        assert len(two) > 100 and two == one[: len(two)]


def test_seeds_and_masks_of_reset():
    env, one = make_vec("msh-4h1s-8x8"), envs.parallel_env("msh-4h1s-8x8")
    first = env.reset(seed=7)[0]
    np.testing.assert_array_equal(first, envs.make("msh-4h1s-8x8", num_envs=3, seed=7).obs)
    assert not np.array_equal(env.reset()[0], first)
    np.testing.assert_array_equal(env.reset(seed=7)[0], first)
    listed = env.reset(seed=[4, 5, 4])[0]
    np.testing.assert_array_equal(listed[0], listed[2])
    seen, _ = one.reset(seed=5)
    np.testing.assert_array_equal(listed[1], [seen[agent]["observation"] for agent in one.agents])
    obs = env.step(np.full((3, 4), 4))[0]
    again, infos = env.reset(seed=7, options={"reset_mask": np.array([False, True, False]), "something": "else"})
    np.testing.assert_array_equal(again[[0, 2]], obs[[0, 2]])
    np.testing.assert_array_equal(again[1], first[1])
    assert env.env.t.tolist() == [1, 0, 1] and infos["action_mask"].shape == (3, 4, 7)
    for wrong in (np.ones(2, bool), np.ones(3)):
        with pytest.raises(ValueError, match="reset_mask must be 3 bools"):
            env.reset(options={"reset_mask": wrong})
    with pytest.raises(ValueError, match="same for all players"):
        make_vec(HUNT, True).reset(options={"reset_mask": np.arange(12) < 5})
    with pytest.raises(ValueError, match="3 games, not for 2"):
        env.reset(seed=[1, 2])
    with pytest.raises(envs.ConfigError, match="seed must be an integer of at least 0, not -1"):
        env.reset(seed=-1)


def test_what_is_returned_is_copied_unless_told_otherwise():
    for per_player in (False, True):
        kept, reused = make_vec(HUNT, per_player), make_vec(HUNT, per_player, copy=False)
        for env in (kept, reused):
            obs, _ = env.reset(seed=1)
            before = obs.copy()
            moves = np.full(env.action_space.shape, 1)
            answer = env.step(moves)
            assert np.array_equal(obs, before) == (env is kept)
            own = [env.env.obs, env.env.legal, env.env.out.reward, env.env.out.terminated, env.env.out.truncated]
            returned = [answer[0], answer[4]["action_mask"], *answer[1:4]]
            shared = [any(np.shares_memory(one, two) for two in own) for one in returned]
            assert shared == ([False] * 5 if env is kept else [True, True, False, False, False])


def test_wrappers_of_gymnasium():
    """Statistics and rewards in the same-step mode, observations too in the next-step mode (gymnasium refuses else)."""
    for per_player in (False, True):
        env = wrappers.RecordEpisodeStatistics(make_vec(HUNT, per_player, horizon=9, autoreset_mode=COUNTED))
        env.action_space.seed(0)
        env.reset(seed=1)
        for _ in range(40):
            _, _, terminated, truncated, infos = env.step(env.action_space.sample())
            done = terminated | truncated
            if done.any():
                returns = infos["final_info"]["episode_return"][done]
                means = returns if per_player else returns.mean(1)
                np.testing.assert_allclose(infos["episode"]["r"][done], means, rtol=1e-6)
                np.testing.assert_array_equal(infos["episode"]["l"][done], infos["final_info"]["episode_length"][done])
        assert env.episode_count >= 12
        shaped = wrappers.DictInfoToList(wrappers.NormalizeReward(wrappers.ClipReward(env, -1, 1)))
        _, infos = shaped.reset(seed=1)
        assert len(infos) == env.num_envs and infos[0]["action_mask"].shape[-1] == 7
        with pytest.raises((ValueError, AssertionError)):
            wrappers.FlattenObservation(make_vec(HUNT, per_player))
        env = make_vec(HUNT, per_player, autoreset_mode=AutoresetMode.NEXT_STEP, horizon=9)
        env = wrappers.NormalizeObservation(wrappers.FlattenObservation(wrappers.RecordEpisodeStatistics(env)))
        env.reset(seed=1)
        for _ in range(30):
            obs, *_ = env.step(env.action_space.sample())
        assert obs.shape == (env.num_envs, 112 * (1 if per_player else 4)) and np.isfinite(obs).all()
        env.close()


def test_closing_and_wrong_actions():
    with make_vec(HUNT, threads=2) as env:
        env.reset(seed=1)
        with pytest.raises(ValueError, match=r"actions must have shape \(3, 4\), not \(4,\)"):
            env.step(np.zeros(4, int))
        with pytest.raises(ValueError, match=r"action 9 is not one of 0\.\.6"):
            env.step(np.full((3, 4), 9))
    assert env.closed
    with pytest.raises(envs.ConfigError, match="autoreset_mode must be one of"):
        make_vec(HUNT, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(envs.ConfigError, match="no setting 'copies'"):
        make_vec(HUNT, copies=True)


# SMAC's face ---------------------------------------------------------------------------------------------------------


class EpisodeRunner:
    """A runner as those of the PyMARL family write it: nothing in it knows our envs."""

    def __init__(self, env, agents):
        self.env, self.agents, self.t_env, self.logs = env, agents, 0, []
        self.episode_limit = self.env.episode_limit

    def get_env_info(self):
        return self.env.get_env_info()

    def save_replay(self):
        return self.env.save_replay()

    def close_env(self):
        self.env.close()

    def run(self):
        batch = {"state": [], "avail_actions": [], "obs": [], "actions": [], "reward": [], "terminated": []}
        self.env.reset()
        terminated, t, episode_return, env_info = False, 0, 0.0, {}
        while not terminated:
            batch["state"].append(self.env.get_state())
            batch["avail_actions"].append(self.env.get_avail_actions())
            batch["obs"].append(self.env.get_obs())
            actions = self.agents(batch, t)
            reward, terminated, env_info = self.env.step(actions[0])
            episode_return += reward
            batch["actions"].append(actions[0])
            batch["reward"].append((reward,))
            batch["terminated"].append((terminated != env_info.get("episode_limit", False),))
            t += 1
        batch["state"].append(self.env.get_state())
        batch["avail_actions"].append(self.env.get_avail_actions())
        batch["obs"].append(self.env.get_obs())
        self.t_env += t
        self.logs.append({"return": episode_return, "ep_length": t, **env_info})
        return {name: np.array(column) for name, column in batch.items()}


def nearest_enemy(batch, t):
    """Attacks the last target that is legal, else walks east, as tensors of shape (1, agents) like a PyMARL agent's."""
    import torch

    legal = torch.tensor(batch["avail_actions"][t])
    walk = torch.where(legal[:, 4] > 0, 4, legal.argmax(1))
    best = legal.shape[1] - 1 - legal.flip(1).argmax(1)
    return torch.where(best >= 6, best, walk)[None]


@pytest.mark.parametrize("name", ["3m", "2s3z"])
def test_a_pymarl_runner_works_unchanged(name, tmp_path):
    env = envs.smac_env(name, seed=3, replay_dir=str(tmp_path))
    runner = EpisodeRunner(env, nearest_enemy)
    info, batched = runner.get_env_info(), envs.make(f"smac-{name}", num_envs=1, seed=3)
    assert info["n_agents"] == batched.spec.num_players and info["episode_limit"] == runner.episode_limit
    played = [runner.run() for _ in range(3)]
    for batch, log in zip(played, runner.logs, strict=True):
        steps = log["ep_length"]
        assert batch["obs"].shape == (steps + 1, info["n_agents"], info["obs_shape"])
        assert batch["state"].shape == (steps + 1, info["state_shape"])
        assert batch["avail_actions"].shape == (steps + 1, info["n_agents"], info["n_actions"])
        assert batch["terminated"].sum() == (0 if log.get("episode_limit") else 1)
        won, all_dead = log["battle_won"], log["dead_enemies"] == len(batched.rules.enemies)
        assert won == all_dead and log["illegal_actions"] == 0
    for batch in played:  # the same battles as the batched env plays
        for k, actions in enumerate(batch["actions"]):
            np.testing.assert_array_equal(batch["obs"][k], batched.obs[0])
            _, reward, _, _, _ = batched.step(actions[None])
            assert reward[0, 0] == np.float32(batch["reward"][k][0])
    stats = env.get_stats()
    wins = sum(log["battle_won"] for log in runner.logs)
    assert stats["battles_game"] == 3 and stats["battles_won"] == wins and stats["win_rate"] == wins / 3
    assert set(stats) == {"battles_won", "battles_game", "battles_draw", "win_rate", "timeouts", "restarts"}
    replay = runner.save_replay()
    assert replay.parent == tmp_path and replay.read_bytes()[:4] == b"GIF8"
    runner.close_env()


def test_time_running_out_is_told_apart():
    env = envs.smac_env("smac-3m", seed=1, horizon=4)
    env.reset()
    for step in range(4):
        _, terminated, info = env.step([1, 1, 1])
        assert terminated == (step == 3) and ("episode_limit" in info) == (step == 3) and not info["battle_won"]
    assert env.get_stats()["timeouts"] == env.get_stats()["battles_draw"] == 1
    with pytest.raises(RuntimeError, match="reset"):
        env.step([1, 1, 1])


def test_seed_of_smac_env():
    env, other = envs.smac_env("3m", seed=9, start_jitter=1.0), envs.smac_env("3m", start_jitter=1.0)
    assert env.seed() == 9 and isinstance(other.seed(), int)
    starts = [env.reset()[1] for _ in range(2)]
    assert not np.array_equal(*starts) and not np.array_equal(other.reset()[1], starts[0])
    assert other.seed(9) == 9
    for start in starts:
        np.testing.assert_array_equal(other.reset()[1], start)
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        env.step([1, 1])
    with pytest.raises(RuntimeError, match="reset"):
        envs.smac_env("3m").save_replay()
    with pytest.raises(envs.ConfigError, match="4m"):
        envs.smac_env("4m")


# libraries that may be installed -------------------------------------------------------------------------------------


def installed(*names):
    """Skips a test with a reason if one of the packages is missing; returns the first."""
    reason = f"needs the package {names[-1]} (pip install it, or the extra 'ecosystem')"
    modules = [pytest.importorskip(name, reason=reason) for name in names]
    return modules[0]


def plain(env_id):
    return envs.parallel_env(env_id, flat=True, keep_agents=True)


@ecosystem
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", [HUNT, BATTLE])
def test_supersuit_and_stable_baselines3(env_id):
    """PPO with shared weights learns for some seconds; the copies that SuperSuit makes play different games."""
    supersuit, sb3 = installed("supersuit"), installed("stable_baselines3")
    games = supersuit.pettingzoo_env_to_vec_env_v1(plain(env_id))
    games = supersuit.concat_vec_envs_v1(games, 4, num_cpus=1, base_class="stable_baselines3")
    model = sb3.PPO("MlpPolicy", games, n_steps=64, batch_size=256, device="cpu")
    model.learn(2 * 64 * games.num_envs)
    assert model.num_timesteps == 2 * 64 * games.num_envs
    obs = games.reset()
    actions, _ = model.predict(obs)
    _, rewards, _, infos = games.step(actions)
    assert rewards.shape == (games.num_envs,) and "action_mask" in infos[0]
    if env_id == HUNT:
        assert len({part.tobytes() for part in obs[:: len(obs) // 4]}) > 1


@ecosystem
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", [HUNT, BATTLE])
def test_torchrl(env_id):
    """Its own check passes, masks are used, and a rollout ends for all agents at once."""
    torchrl = installed("torchrl.envs", "torchrl")
    from torchrl.envs.utils import check_env_specs

    env = torchrl.PettingZooWrapper(plain(env_id), seed=0)
    check_env_specs(env)
    (group,) = env.group_map
    for _ in range(5):
        rollout = env.rollout(500)
        assert rollout[group, "action_mask"].gather(-1, rollout[group, "action"].unsqueeze(-1)).all(), "legal actions"
        done = rollout["next", group, "done"].squeeze(-1)
        assert done[-1].all() and not done[:-1].any() and rollout["next", "done"][-1].item()


@ecosystem
@pytest.mark.filterwarnings("ignore")
def test_rllib_sees_every_end():
    """With agents that leave, RLlib's adapter misses the ends in which one hunts as the others time out."""
    adapter = installed("ray.rllib.env.wrappers.pettingzoo_env", "ray").ParallelPettingZooEnv
    missed = {}
    for keep_agents in (False, True):
        game = envs.parallel_env(HUNT, flat=True, keep_agents=keep_agents)
        env, rng, missed[keep_agents] = adapter(game), np.random.default_rng(0), 0
        for episode in range(300):
            env.reset(seed=episode)
            while game.agents:
                _, _, terminated, truncated, _ = env.step({agent: int(rng.integers(7)) for agent in game.agents})
            missed[keep_agents] += not (terminated["__all__"] or truncated["__all__"])
    assert missed[True] == 0 and missed[False] > 0


@ecosystem
def test_optuna_tries_settings(tmp_path):
    installed("optuna")
    command = [sys.executable, str(ROOT / "experiments/optuna_search.py"), "--trials", "2", "--total-timesteps", "256"]
    more = "--more=--num-envs 4 --eval-every 0 --final-eval-episodes 4"
    done = subprocess.run([*command, more], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0 and "best return" in done.stdout, done.stderr


@ecosystem
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
def test_samples_of_the_guide_run(sample, capsys):
    assert sample.count("\n") <= 13, "about ten lines"
    for package in re.findall(r"^(?:import|from) (supersuit|torchrl|ray)", sample, re.MULTILINE):
        installed(package)
        if package == "ray":
            pytest.skip("starts a Ray cluster: run it by hand")
    exec(compile(sample, "docs/ecosystem.md", "exec"), {"__name__": "sample"})
