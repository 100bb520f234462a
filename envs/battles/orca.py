"""Collision avoidance: ORCA (van den Berg, Guy, Lin, Manocha 2011, "Reciprocal n-body collision avoidance"), compiled.

Every neighbour and every wall forbids a half plane of velocities. A forbidden half plane is one row of `lines`
[px, py, dx, dy, single]: a point on its border and the border's direction, allowed velocities on the left. The chosen
velocity is the allowed one nearest to the preferred one; if nothing is allowed, walls stay hard and the units' half
planes are broken as little as possible.

Avoidance brings units to rest in contact, where the last bit says whether they overlap; from there on the battle goes
another way. So ours rounds where the reference game does: positions are single precision, and so is a velocity while
the unit heads for a target and nothing turns it aside. What is made of singles alone is rounded to single (`single`).

`walls` rows are rectangles [x0, y0, x1, y1]; their corners and edges run counter-clockwise:

    corner 3 <-- edge 2 --- corner 2
       |                       ^
     edge 3                  edge 1
       v                       |
    corner 0 --- edge 0 --> corner 1
"""

import numpy as np
from numba import njit

HORIZON = 1.0  # seconds ahead within which nobody may be hit
TICKS_PER_SECOND = 16.0  # units that already overlap must part within one tick
PARALLEL = 1e-5


@njit(cache=True, nogil=True, error_model="numpy")
def rounded(value, single):
    """The value, to single precision if `single`."""
    return np.float64(np.float32(value)) if single else value


@njit(cache=True, nogil=True, error_model="numpy")
def dot(ax, ay, bx, by, single):
    if single:
        return np.float64(np.float32(ax) * np.float32(bx) + np.float32(ay) * np.float32(by))
    return ax * bx + ay * by


@njit(cache=True, nogil=True, error_model="numpy")
def cross(ax, ay, bx, by, single):
    if single:
        return np.float64(np.float32(ax) * np.float32(by) - np.float32(ay) * np.float32(bx))
    return ax * by - ay * bx


@njit(cache=True, nogil=True, error_model="numpy")
def length_of(x, y, single):
    return rounded(np.sqrt(dot(x, y, x, y, single)), single)


@njit(cache=True, nogil=True, error_model="numpy")
def direction_of(x, y, single):
    """The vector at unit length (east for no vector at all)."""
    length = length_of(x, y, single)
    if length == 0.0:
        return 1.0, 0.0
    return rounded(x / length, single), rounded(y / length, single)


@njit(cache=True, nogil=True, error_model="numpy")
def add_line(lines, count, px, py, dx, dy, single):
    lines[count, 0], lines[count, 1], lines[count, 2], lines[count, 3], lines[count, 4] = px, py, dx, dy, single
    return count + 1


@njit(cache=True, nogil=True, error_model="numpy")
def line_at(lines, k):
    return lines[k, 0], lines[k, 1], lines[k, 2], lines[k, 3], lines[k, 4] != 0.0


@njit(cache=True, nogil=True, error_model="numpy")
def depth_in(px, py, dx, dy, line_single, vx, vy, v_single):
    """How deep a velocity lies in a forbidden half plane (below 0: outside)."""
    single = line_single and v_single
    return cross(dx, dy, rounded(px - vx, single), rounded(py - vy, single), single)


# ---------------------------------------------------------------------------------------------------------------------
# which velocities a neighbour or a wall forbids
# ---------------------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def avoid_unit(lines, count, px, py, vx, vy, other_vx, other_vy, single, combined_radius, share, parting):
    """Add the half plane of a neighbour at (px, py) from here; returns the new count.

    `single` if both velocities are; `share` is the part of the evasion that this unit takes on; `parting` (+1 or -1)
    says which way to go from a neighbour on exactly the same spot with the same velocity.
    """
    distance = np.sqrt(px * px + py * py)
    distance_sq, radius_sq = distance * distance, combined_radius * combined_radius
    px, py = rounded(px, True), rounded(py, True)
    relative_vx, relative_vy = rounded(vx - other_vx, single), rounded(vy - other_vy, single)
    horizon = HORIZON if distance_sq > radius_sq else 1.0 / TICKS_PER_SECOND
    wx, wy = rounded(relative_vx - px / horizon, single), rounded(relative_vy - py / horizon, single)
    if distance_sq > radius_sq:
        # the forbidden relative velocities: a cone with its tip cut off by a circle around position / horizon
        along, w_sq = dot(wx, wy, px, py, single), dot(wx, wy, wx, wy, single)
        if not (along < 0.0 and rounded(along * along, single) > rounded(radius_sq * w_sq, single)):
            leg = np.sqrt(distance_sq - radius_sq)
            side_x, side_y = rounded(px * combined_radius, True), rounded(py * combined_radius, True)
            if cross(px, py, wx, wy, single) > 0.0:
                dx, dy = px * leg - side_y, side_x + py * leg
            else:
                dx, dy = -px * leg - side_y, side_x - py * leg
            dx, dy = dx / distance_sq, dy / distance_sq
            shadow = relative_vx * dx + relative_vy * dy
            line_x = vx + share * (shadow * dx - relative_vx)
            line_y = vy + share * (shadow * dy - relative_vy)
            return add_line(lines, count, line_x, line_y, dx, dy, False)
    length = length_of(wx, wy, single)
    if length == 0.0:
        nx, ny = parting, 0.0
    else:
        nx, ny = rounded(wx / length, single), rounded(wy / length, single)
    push = rounded(combined_radius / horizon - length, single)
    line_x = rounded(vx + share * rounded(push * nx, single), single)
    line_y = rounded(vy + share * rounded(push * ny, single), single)
    return add_line(lines, count, line_x, line_y, ny, -nx, single)


@njit(cache=True, nogil=True, error_model="numpy")
def corner_of(walls, w, k):
    """Corner k of rectangle w, and the direction of the edge that starts there."""
    k %= 4
    if k == 0:
        return walls[w, 0], walls[w, 1], 1.0, 0.0
    if k == 1:
        return walls[w, 2], walls[w, 1], 0.0, 1.0
    if k == 2:
        return walls[w, 2], walls[w, 3], -1.0, 0.0
    return walls[w, 0], walls[w, 3], 0.0, -1.0


@njit(cache=True, nogil=True, error_model="numpy")
def is_covered(lines, count, ax, ay, bx, by, radius):
    """Whether an earlier wall's half plane already forbids everything that the edge a-b would."""
    for k in range(count):
        px, py, dx, dy = lines[k, 0], lines[k, 1], lines[k, 2], lines[k, 3]
        a_depth = (ax - px) * dy - (ay - py) * dx - radius
        b_depth = (bx - px) * dy - (by - py) * dx - radius
        if a_depth >= -PARALLEL and b_depth >= -PARALLEL:
            return True
    return False


@njit(cache=True, nogil=True, error_model="numpy")
def add_shifted(lines, count, px, py, dx, dy, radius):
    """Geometry would shift a wall's border by radius (-dy, dx). The reference game shifts it by radius (-dy, -dy), so
    a horizontal wall leaves no margin until contact; ours follows, so that results carry over."""
    return add_line(lines, count, px - radius * dy, py - radius * dy, dx, dy, False)


@njit(cache=True, nogil=True, error_model="numpy")
def avoid_wall_edge(lines, count, walls, w, k, x, y, vx, vy, radius):
    """Add the half plane of edge k of rectangle w, if it forbids anything new; returns the new count."""
    ax, ay, adx, ady = corner_of(walls, w, k)
    bx, by, bdx, bdy = corner_of(walls, w, k + 1)
    edge_x, edge_y = bx - ax, by - ay
    if (ax - x) * edge_y - (ay - y) * edge_x >= 0.0:
        return count  # the unit is not on the outer side of this edge
    ax, ay, bx, by = ax - x, ay - y, bx - x, by - y  # seen from the unit
    if is_covered(lines, count, ax, ay, bx, by, radius):
        return count
    a_sq, b_sq, radius_sq = ax * ax + ay * ay, bx * bx + by * by, radius * radius
    s = -(ax * edge_x + ay * edge_y) / (edge_x * edge_x + edge_y * edge_y)  # nearest point of the edge: a + s (b - a)
    off_x, off_y = ax + s * edge_x, ay + s * edge_y
    off_sq = off_x * off_x + off_y * off_y

    # in contact: no velocity towards the wall at all
    if s < 0.0 and a_sq < radius_sq:
        dx, dy = direction_of(-ay, ax, False)
        return add_line(lines, count, 0.0, 0.0, dx, dy, False)
    if s > 1.0 and b_sq <= radius_sq:
        if bx * bdy - by * bdx < 0.0:
            return count  # the next edge takes care of it
        dx, dy = direction_of(-by, bx, False)
        return add_line(lines, count, 0.0, 0.0, dx, dy, False)
    if 0.0 <= s <= 1.0 and off_sq <= radius_sq:
        return add_line(lines, count, 0.0, 0.0, -adx, -ady, False)

    # the two legs of the cone of velocities that hit the edge; seen end on, only one corner counts
    one_corner = off_sq <= radius_sq
    if one_corner and s < 0.0:
        bx, by, b_sq, bdx, bdy = ax, ay, a_sq, adx, ady
    elif one_corner:
        ax, ay, a_sq, adx, ady = bx, by, b_sq, bdx, bdy
    leg_a, leg_b = np.sqrt(a_sq - radius_sq), np.sqrt(b_sq - radius_sq)
    left_x, left_y = (ax * leg_a - ay * radius) / a_sq, (ax * radius + ay * leg_a) / a_sq
    right_x, right_y = (bx * leg_b + by * radius) / b_sq, (by * leg_b - bx * radius) / b_sq
    _, _, before_x, before_y = corner_of(walls, w, k + 3)
    left_foreign = left_y * before_x - left_x * before_y >= 0.0  # a neighbouring edge hides that leg
    if left_foreign:
        left_x, left_y = -before_x, -before_y
    right_foreign = right_x * bdy - right_y * bdx <= 0.0
    if right_foreign:
        right_x, right_y = bdx, bdy

    # project the current velocity on the nearest border: a corner, the edge itself, or a leg
    ax, ay, bx, by = ax / HORIZON, ay / HORIZON, bx / HORIZON, by / HORIZON
    cut_x, cut_y = bx - ax, by - ay
    t = 0.5 if one_corner else ((vx - ax) * cut_x + (vy - ay) * cut_y) / (cut_x * cut_x + cut_y * cut_y)
    t_left = (vx - ax) * left_x + (vy - ay) * left_y
    t_right = (vx - bx) * right_x + (vy - by) * right_y
    if (t < 0.0 and t_left < 0.0) or (one_corner and t_left < 0.0 and t_right < 0.0):
        nx, ny = direction_of(vx - ax, vy - ay, False)
        return add_line(lines, count, ax + radius / HORIZON * nx, ay + radius / HORIZON * ny, ny, -nx, False)
    if t > 1.0 and t_right < 0.0:
        nx, ny = direction_of(vx - bx, vy - by, False)
        return add_line(lines, count, bx + radius / HORIZON * nx, by + radius / HORIZON * ny, ny, -nx, False)
    to_edge = to_left = to_right = np.inf
    if 0.0 <= t <= 1.0 and not one_corner:
        to_edge = (vx - ax - t * cut_x) ** 2 + (vy - ay - t * cut_y) ** 2
    if t_left >= 0.0:
        to_left = (vx - ax - t_left * left_x) ** 2 + (vy - ay - t_left * left_y) ** 2
    if t_right >= 0.0:
        to_right = (vx - bx - t_right * right_x) ** 2 + (vy - by - t_right * right_y) ** 2
    if to_edge <= to_left and to_edge <= to_right:
        return add_shifted(lines, count, ax, ay, -adx, -ady, radius / HORIZON)
    if to_left <= to_right:
        return count if left_foreign else add_shifted(lines, count, ax, ay, left_x, left_y, radius / HORIZON)
    return count if right_foreign else add_shifted(lines, count, bx, by, -right_x, -right_y, radius / HORIZON)


@njit(cache=True, nogil=True, error_model="numpy")
def avoid_wall(lines, count, walls, w, x, y, vx, vy, radius, reach):
    """Add the half planes of rectangle w if it is within `reach`; returns the new count."""
    gap_x = max(0.0, walls[w, 0] - x, x - walls[w, 2])
    gap_y = max(0.0, walls[w, 1] - y, y - walls[w, 3])
    if gap_x * gap_x + gap_y * gap_y > reach * reach:
        return count
    for k in range(4):
        count = avoid_wall_edge(lines, count, walls, w, k, x, y, vx, vy, radius)
    return count


# ---------------------------------------------------------------------------------------------------------------------
# the best allowed velocity: an incremental linear programme
# ---------------------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, error_model="numpy")
def best_on_line(lines, k, speed, wish_x, wish_y, wish_single, towards):
    """The best velocity on border k that respects borders 0..k-1 and the speed limit: (found, vx, vy, single).

    Nearest to the wish, or with `towards` as far as possible in the wish's direction.
    """
    px, py, dx, dy, single = line_at(lines, k)
    middle = dot(px, py, dx, dy, single)
    square = rounded(rounded(middle * middle, single) + rounded(speed * speed, single), single)
    square = rounded(square - dot(px, py, px, py, single), single)
    if square < 0.0:
        return False, 0.0, 0.0, False
    root = rounded(np.sqrt(square), single)
    low, high = rounded(-middle - root, single), rounded(-middle + root, single)
    low_single, high_single = single, single
    for j in range(k):
        ox, oy, odx, ody, other_single = line_at(lines, j)
        both = single and other_single
        across = cross(dx, dy, odx, ody, both)
        ahead = cross(odx, ody, rounded(px - ox, both), rounded(py - oy, both), both)
        if abs(across) < PARALLEL:
            if ahead < 0.0:
                return False, 0.0, 0.0, False
            continue
        t = rounded(ahead / across, both)
        if across >= 0.0 and t < high:
            high, high_single = t, both
        elif across < 0.0 and t > low:
            low, low_single = t, both
        if low > high:
            return False, 0.0, 0.0, False
    single = single and wish_single
    if towards:
        forwards = dot(wish_x, wish_y, dx, dy, single) > 0.0
        t = np.inf if forwards else -np.inf
    else:
        t = dot(dx, dy, rounded(wish_x - px, single), rounded(wish_y - py, single), single)
    if t < low:
        t, single = low, low_single
    elif t > high:
        t, single = high, high_single
    return True, rounded(px + rounded(t * dx, single), single), rounded(py + rounded(t * dy, single), single), single


@njit(cache=True, nogil=True, error_model="numpy")
def best_velocity(lines, count, speed, wish_x, wish_y, wish_single, towards):
    """The best velocity within all half planes: (index of the first that cannot be met, or count; vx, vy, single)."""
    vx, vy, single = wish_x, wish_y, wish_single
    too_fast = dot(vx, vy, vx, vy, single) > rounded(speed * speed, single)
    if too_fast and not towards:
        vx, vy = direction_of(vx, vy, single)
    if too_fast or towards:
        limit = rounded(speed, single)
        vx, vy = rounded(vx * limit, single), rounded(vy * limit, single)
    for k in range(count):
        px, py, dx, dy, line_single = line_at(lines, k)
        if depth_in(px, py, dx, dy, line_single, vx, vy, single) > 0.0:
            found, new_x, new_y, new_single = best_on_line(lines, k, speed, wish_x, wish_y, wish_single, towards)
            if not found:
                return k, vx, vy, single
            vx, vy, single = new_x, new_y, new_single
    return count, vx, vy, single


@njit(cache=True, nogil=True, error_model="numpy")
def least_intrusion(lines, num_walls, count, first, speed, vx, vy, single, projected):
    """When no velocity is allowed: the one that goes least deep into a forbidden half plane; walls stay hard."""
    depth = 0.0
    for i in range(first, count):
        px, py, dx, dy, line_single = line_at(lines, i)
        if depth_in(px, py, dx, dy, line_single, vx, vy, single) <= depth:
            continue
        # borders of equal depth between half plane i and each earlier one
        num = 0
        for j in range(num_walls):
            num = add_line(projected, num, lines[j, 0], lines[j, 1], lines[j, 2], lines[j, 3], False)
        for j in range(num_walls, i):
            ox, oy, odx, ody, other_single = line_at(lines, j)
            both = line_single and other_single
            across = cross(dx, dy, odx, ody, both)
            if abs(across) <= PARALLEL:
                if dot(dx, dy, odx, ody, both) > 0.0:
                    continue
                qx, qy = 0.5 * rounded(px + ox, both), 0.5 * rounded(py + oy, both)
            else:
                t = rounded(cross(odx, ody, rounded(px - ox, both), rounded(py - oy, both), both) / across, both)
                qx, qy = rounded(px + rounded(t * dx, both), both), rounded(py + rounded(t * dy, both), both)
            ndx, ndy = direction_of(rounded(odx - dx, both), rounded(ody - dy, both), both)
            num = add_line(projected, num, qx, qy, ndx, ndy, both)
        solved, new_x, new_y, new_single = best_velocity(projected, num, speed, -dy, dx, line_single, True)
        if solved == num:
            vx, vy, single = new_x, new_y, new_single
        depth = depth_in(px, py, dx, dy, line_single, vx, vy, single)
    return vx, vy, single


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def choose_velocity(lines, num_walls, count, speed, wish_x, wish_y, wish_single, projected):
    """The velocity nearest to the wish that avoids everything, or breaks the units' half planes least, and its
    precision."""
    solved, vx, vy, single = best_velocity(lines, count, speed, wish_x, wish_y, wish_single, False)
    if solved < count:
        vx, vy, single = least_intrusion(lines, num_walls, count, solved, speed, vx, vy, single, projected)
    return vx, vy, single
