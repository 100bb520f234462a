"""Tiny compiled random streams: one 64-bit counter per env (or per env and player), hashed by SplitMix64.

Row k of a batch owns stream k, so what it draws depends only on (seed, k) and never on the batch size or on threads.
"""

from __future__ import annotations

import json

import numpy as np
from numba import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
U27, U30, U31, U32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
TO_UNIT = 1.0 / 9007199254740992.0  # 2^-53
U11 = np.uint64(11)


@njit(cache=True, nogil=True)
def scramble(z):
    z = (z ^ (z >> U30)) * MIX_1
    z = (z ^ (z >> U27)) * MIX_2
    return z ^ (z >> U31)


@njit(cache=True, nogil=True)
def below(streams, row, n):
    """A uniform integer in [0, n); moves stream `row` on by one. n is small, so the bias of 2^-32 n is nothing."""
    streams[row] += GOLDEN
    return np.int64(((scramble(streams[row]) >> U32) * np.uint64(n)) >> U32)


@njit(cache=True, nogil=True)
def unit(streams, row):
    """A uniform float in [0, 1); moves stream `row` on by one."""
    streams[row] += GOLDEN
    return np.float64(scramble(streams[row]) >> U11) * TO_UNIT


@njit(cache=True, nogil=True)
def unit_at(stream, k):
    """The k-th uniform float in [0, 1) that follows on `stream`, which stays where it is."""
    return np.float64(scramble(stream + np.uint64(k + 1) * GOLDEN) >> U11) * TO_UNIT


@njit(cache=True, nogil=True)
def fill_streams(seed, salt, streams):
    """Start stream k at a point hashed from (seed, salt, k); different salts give unrelated families of streams."""
    root = scramble(scramble(seed + GOLDEN) ^ (salt * MIX_1 + GOLDEN))
    for k in range(streams.shape[0]):
        streams[k] = scramble(root + np.uint64(k) * GOLDEN) ^ root


def make_streams(seed: int, num: int, salt: int = 0) -> np.ndarray:
    """(num,) uint64 streams for `seed`; the first k of them do not depend on `num`."""
    streams = np.empty(num, np.uint64)
    fill_streams(np.uint64(seed % 2**64), np.uint64(salt), streams)
    return streams


def draw_rows(probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(..., A) chances, not necessarily of sum 1 -> one draw of each row"""
    draws = rng.random(probs.shape[:-1])[..., None] * probs.sum(-1, keepdims=True)
    return np.minimum((np.cumsum(probs, -1) <= draws).sum(-1), probs.shape[-1] - 1)


def pack_generator(rng: np.random.Generator) -> np.ndarray:
    """The state of a generator as bytes, for checkpoints; always as many, whatever digits its numbers have."""
    return np.frombuffer(json.dumps(rng.bit_generator.state).ljust(256).encode(), np.uint8).copy()


def unpack_generator(rng: np.random.Generator, saved: np.ndarray) -> None:
    rng.bit_generator.state = json.loads(saved.tobytes())
