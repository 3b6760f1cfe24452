"""Ranks of interest, as people name them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from crystalllm.errors import UserError

# In one range: far more than any world has, and far fewer than fill the memory.
_MOST = 1 << 24


def ranks_from(text: str, axes: pd.DataFrame) -> tuple[int, ...]:
    """Ranks from such as "0,137", "8-15", "pp=5,tp=0" (all there), or several of these: "0;pp=5".

    Args:
        text: Parts separated by semicolons, each numbers and ranges, or coordinates.
        axes: By rank, one column per axis of coordinates.

    Raises:
        UserError: A part is none of these.
    """
    found: list[int] = []
    for part in (p.strip() for p in text.split(";")):
        found += ranks_at(axes, part) if "=" in part else numbers(part, option=f"--ranks {text}")
    return tuple(dict.fromkeys(found))


def axes_of(ranks: pd.DataFrame) -> pd.DataFrame:
    """By rank, one column per axis of coordinates, the outermost first; -1 where it has no place.

    Args:
        ranks: `ranks` by rank.
    """
    places = [dict(coordinates) for coordinates in ranks["coordinates"]]
    return pd.DataFrame(places, index=ranks.index).fillna(-1)


def ranks_at(axes: pd.DataFrame, coordinates: str) -> list[int]:
    """The ranks at such as `pp=5,tp=0`, ascending.

    Args:
        axes: By rank, one column per axis of coordinates.
        coordinates: Of some axes.

    Raises:
        UserError: Names the legal axes and coordinates.
    """
    legal = "; ".join(f"{axis} from {axes[axis].min()} to {axes[axis].max()}" for axis in axes)
    where = f"Coordinates {coordinates}"
    if not len(axes.columns):
        raise UserError(
            "The ranks of this capture have no coordinates", where=where, do="Name it by its number"
        )
    chosen = np.ones(len(axes), dtype=bool)
    for part in coordinates.split(","):
        axis, _, text = (p.strip() for p in part.partition("="))
        if axis not in axes:
            what = f"There is no axis {axis!r}"
        elif not text.isdecimal() or int(text) not in axes[axis].to_numpy():
            what = f"There is no coordinate {text!r} on axis {axis}"
        else:
            chosen &= (axes[axis] == int(text)).to_numpy()
            continue
        raise UserError(what, where=where, do=f"Write such as {_example(axes)}; legal are {legal}")
    if not chosen.any():
        raise UserError("No rank is at these coordinates", where=where, do=f"Legal are {legal}")
    return sorted(int(rank) for rank in axes.index[chosen])


def _example(axes: pd.DataFrame) -> str:
    return ",".join(f"{axis}={axes[axis].iloc[-1]}" for axis in axes)


def numbers(text: str, *, option: str, what: str = "rank") -> list[int]:
    """Ranks, or others of their kind, from "0,5,8-11"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            begin, end = int(first), int(last if dash else first)
            if not 0 <= end - begin < _MOST:
                raise ValueError(part)
        except ValueError:
            raise UserError(
                f"{part!r} is no {what} and no range of {what}s",
                where=option,
                do="Write such as 0,5,8-11",
            ) from None
        found += range(begin, end + 1)
    return found
