"""Slices: every role is covered, in as few runs as the devices allow."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crystalllm import cores
from crystalllm.errors import UserError
from crystalllm.planning import devices, slices

AXES = ("pp", "dp", "tp")


def world(pp, dp, tp, *, roles_of, ranks_per_node=8):
    """`ranks` of a world whose roles are what `roles_of` says of coordinates."""
    places = list(itertools.product(range(pp), range(dp), range(tp)))
    names = [roles_of(*place) for place in places]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    role = [numbers[name] for name in names]
    return pd.DataFrame(
        {
            "node": [rank // ranks_per_node for rank in range(len(places))],
            "coordinates": [list(zip(AXES, place, strict=True)) for place in places],
            "role": role,
            "representative": [role.index(r) for r in role],
        },
        index=pd.Index(range(len(places)), name="rank"),
    )


sizes = st.integers(1, 4)
# Which of the stage, the replica, the place in a group and being the first rank matters.
matters = st.tuples(*[st.booleans()] * 4)


@st.composite
def worlds(draw):
    parts = draw(matters)

    def roles_of(*place):
        return tuple(p for p, kept in zip((*place, not any(place)), parts, strict=True) if kept)

    return world(
        draw(sizes),
        draw(sizes),
        draw(sizes),
        roles_of=roles_of,
        ranks_per_node=draw(st.sampled_from([1, 2, 4, 8])),
    )


@given(worlds(), st.integers(1, 9), st.integers(1, 3))
@settings(deadline=None)
def test_every_role_runs_in_no_more_slices_than_needed(ranks, num_devices, ranks_per_role):
    chosen = slices.choose(ranks, num_devices, ranks_per_role=ranks_per_role)
    run = [rank for block in chosen for rank in block]
    assert len(run) == len(set(run))
    wanted = {r: min(n, ranks_per_role) for r, n in ranks["role"].value_counts().items()}
    assert ranks["role"][run].value_counts().to_dict() == wanted
    assert all(1 <= len(block) <= num_devices for block in chosen)
    assert len(chosen) == math.ceil(sum(wanted.values()) / num_devices)
    # The rank that speaks for a role is among those that run.
    assert set(ranks["representative"]) <= set(run)
    assert chosen == slices.choose(ranks, num_devices, ranks_per_role=ranks_per_role)


@given(worlds(), st.sampled_from(["tp", "dp", "pp", "tp+dp", "pp+tp", "node"]), st.integers(1, 16))
@settings(deadline=None)
def test_wished_blocks_run_whole(ranks, text, num_devices):
    wish = slices.read_wish(text, ranks)
    if wish.num_devices > num_devices:
        with pytest.raises(UserError, match=f"need {wish.num_devices} devices at once"):
            slices.choose(ranks, num_devices, wishes=[wish])
        return
    chosen = slices.choose(ranks, num_devices, wishes=[wish])
    assert all(len(block) <= num_devices for block in chosen)
    run = {rank for block in chosen for rank in block}
    assert set(ranks["role"][sorted(run)]) == set(ranks["role"])
    # Nobody runs without those that are wished for with him.
    for block in wish.blocks:
        assert not run & set(block) or any(set(block) <= set(ran) for ran in chosen)


@given(st.lists(st.frozensets(st.integers(0, 7), min_size=1), min_size=1, max_size=8))
@settings(deadline=None)
def test_the_fewest_sets_are_found(sets):
    found = slices.fewest(sets)
    everything = frozenset().union(*sets)
    assert frozenset().union(*found) == everything
    assert set(found) <= set(sets)
    fewer = itertools.combinations(sets, len(found) - 1)
    assert all(frozenset().union(*some) != everything for some in fewer)


def test_a_wish_comes_first_and_single_ranks_fill_up():
    ranks = world(4, 2, 2, roles_of=lambda pp, dp, tp: pp)
    wish = slices.read_wish("0,1", ranks)
    # Stage 0 is covered by the wish; of the others one rank each.
    assert slices.choose(ranks, 4, wishes=[wish]) == [(0, 1, 4, 8), (12,)]
    assert slices.choose(ranks, 2, wishes=[wish]) == [(0, 1), (4, 8), (12,)]


def test_ranks_of_a_role_spread_over_nodes():
    ranks = world(1, 8, 2, roles_of=lambda *_: "all the same", ranks_per_node=4)
    assert slices.choose(ranks, 16, ranks_per_role=4) == [(0, 4, 8, 12)]


def test_representatives_are_preferred_in_blocks():
    ranks = world(2, 4, 2, roles_of=lambda pp, dp, tp: pp)
    ranks["representative"] = [5 if role == 0 else 10 for role in ranks["role"]]
    wish = slices.read_wish("tp", ranks)
    assert slices.fulfilled(wish, ranks) == [(4, 5), (10, 11)]


def test_what_a_wish_needs():
    ranks = world(2, 4, 2, roles_of=lambda pp, dp, tp: pp, ranks_per_node=8)
    needs = {wish.text: wish.num_devices for wish in slices.usual_wishes(ranks)}
    assert needs == {"tp": 2, "dp": 4, "pp": 2, "node": 8}
    assert slices.read_wish("tp+dp", ranks).num_devices == 8
    assert slices.read_wish("3,0-1", ranks).blocks == ((0, 1, 3),)
    wish = slices.read_wish("pp=1,tp=0", ranks)
    assert (wish.blocks, wish.num_devices) == (((8, 10, 12, 14),), 4)
    assert slices.choose(ranks, 4, wishes=[wish]) == [(0,), (8, 10, 12, 14)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cp", r"no axis cp.*Use node, pp, dp, tp"),
        ("tp+", r"no axis \(empty\)"),
        ("", r"no axis \(empty\)"),
        ("0,16", "Rank 16 is not in the world.*Use ranks from 0 to 15"),
        ("3-1", "'3-1' is no rank and no range"),
        ("0-99999999999", "no range of ranks"),
        ("0,x", "'x' is no rank"),
        ("cp=0", r"no axis 'cp'.*Write such as pp=1,dp=3,tp=1"),
        ("pp=2", "no coordinate '2' on axis pp"),
    ],
)
def test_wrong_wishes_are_explained(text, message):
    ranks = world(2, 4, 2, roles_of=lambda pp, dp, tp: pp)
    with pytest.raises(UserError, match=message):
        slices.read_wish(text, ranks)


def test_one_core_is_kept_for_the_replay_where_there_are_two():
    usable = cores.separate()
    found = devices.of_this_host()
    assert found.kind == "cpu"
    assert found.model
    apart = cores.separate()
    if len(apart) == 1:
        assert (found.sandbox, found.engine) == ((apart[0],), None)
    else:
        assert (found.sandbox, found.engine) == (tuple(apart[1:]), apart[0])
    only = devices.of_this_host([usable[-1]])
    assert (only.sandbox, only.engine) == ((usable[-1],), None)
    with pytest.raises(UserError, match=r"not all there.*Use some of"):
        devices.of_this_host([max(usable) + 1])
    with pytest.raises(UserError, match="not all there"):
        devices.of_this_host([])
