"""Whether ranks fit into a memory, from what each of them was seen to hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crystalllm.errors import UserError


def verdict(summaries: Mapping[str, Mapping[str, Any]], limit_bytes: int) -> dict[str, Any]:
    """Yes or no over the worst of the ranks.

    Args:
        summaries: By what the rank is called (such as "role 3, rank 17"), what
            `summary.summarize` says of it.
        limit_bytes: What each rank has.

    Returns:
        - `fits`: whether no rank needs more than the limit.
        - `limit_bytes`, `peak_bytes` of the worst rank, `margin_bytes` (below zero if it
          does not fit), and `worst`, its name.
        - `is_lower_bound`: the worst rank was stopped at a limit, so that it may need
          more than its peak says.
        - `by_category` and `largest`: what holds the peak.
        - `ranks`: of each, in falling order of its peak: `name`, `peak_bytes`, `fits`,
          `is_lower_bound`.

    Raises:
        UserError: There are no summaries, or the limit is not positive.
    """
    if not summaries or limit_bytes <= 0:
        raise UserError(
            "Whether a job fits cannot be told",
            where=f"{len(summaries)} ranks, limit {limit_bytes} bytes",
            do="Pass one summary for each role at least, and a positive limit",
        )
    needs = {name: _need(summary) for name, summary in summaries.items()}
    ranked = sorted(needs, key=lambda name: -needs[name]["peak_bytes"])
    ranks = [
        {
            "name": name,
            "peak_bytes": needs[name]["peak_bytes"],
            "fits": needs[name]["peak_bytes"] <= limit_bytes,
            "is_lower_bound": needs[name]["is_lower_bound"],
        }
        for name in ranked
    ]
    worst = needs[ranked[0]]
    return {
        "fits": all(rank["fits"] for rank in ranks),
        "limit_bytes": limit_bytes,
        "worst": ranked[0],
        "margin_bytes": limit_bytes - worst["peak_bytes"],
        **worst,
        "ranks": ranks,
    }


def _need(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The most that a rank held, or would have held with the request that was refused."""
    need = {"bytes": summary["peak"]["bytes"], "of": summary["peak"]}
    for refusal in summary["out_of_memory"]:
        asked = refusal["held_bytes"] + refusal["bytes"]
        if asked > need["bytes"]:
            need = {"bytes": asked, "of": refusal}
    return {
        "peak_bytes": need["bytes"],
        "is_lower_bound": bool(summary["out_of_memory"]),
        "by_category": need["of"]["by_category"],
        "largest": need["of"]["largest"],
    }
