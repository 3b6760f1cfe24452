"""Axes of a world, and what moving along them does."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crystalllm.errors import UserError
from crystalllm.layout import Axis, Layout

NAMES = ("tp", "cp", "dp", "pp")


@st.composite
def layouts(draw):
    return Layout.of_sizes([(name, draw(st.integers(1, 5))) for name in NAMES])


@st.composite
def blocks(draw):
    """A layout, a group that spans some of its axes, and one of its members."""
    layout = draw(layouts())
    rank = draw(st.integers(0, layout.world_size - 1))
    spans = [draw(st.booleans()) for _ in layout.axes]
    return layout, _block(layout, rank, spans), rank


def _block(layout, rank, spans):
    place = layout.coordinates(rank)
    values = [
        range(axis.size) if wide else [x]
        for axis, wide, x in zip(layout.axes, spans, place, strict=True)
    ]
    return tuple(sorted(layout.rank(p) for p in itertools.product(*values)))


def _signature(layout, spans):
    wide = [axis for axis, is_wide in zip(layout.axes, spans, strict=True) if is_wide]
    return ",".join(f"{axis.size}:{axis.stride}" for axis in reversed(wide)) or "1"


@given(layout=layouts(), data=st.data())
def test_coordinates_and_ranks(layout, data):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    place = layout.coordinates(rank)
    assert layout.rank(place) == rank
    assert all(0 <= x < axis.size for x, axis in zip(place, layout.axes, strict=True))
    assert list(layout.named(rank).values()) == list(place)
    assert rank in layout.find(layout.named(rank))
    assert layout.world_size == prod(axis.size for axis in layout.axes)


def test_the_first_size_is_of_neighbours():
    layout = Layout.of_sizes([("tp", 4), ("cp", 1), ("dp", 2), ("pp", 3)])
    assert layout.axes == (Axis("pp", 3, 8), Axis("dp", 2, 4), Axis("tp", 4, 1))
    assert layout.named(13) == {"pp": 1, "dp": 1, "tp": 1}
    with pytest.raises(ValueError, match="does not follow"):
        Layout((Axis("dp", 2, 4), Axis("tp", 3, 1)))


@given(layout=layouts(), data=st.data())
def test_ranks_by_coordinates(layout, data):
    wanted = {
        axis.name: data.draw(st.integers(0, axis.size - 1))
        for axis in layout.axes
        if data.draw(st.booleans())
    }
    expected = [r for r in range(layout.world_size) if wanted.items() <= layout.named(r).items()]
    assert sorted(layout.find(wanted)) == expected


def test_unknown_axes_and_coordinates_are_refused():
    layout = Layout.of_sizes([("tp", 4), ("dp", 2)])
    with pytest.raises(UserError, match=r"no axis pp\. Coordinates pp=1\. Use dp \(0 to 1\), tp"):
        layout.find({"pp": 1})
    with pytest.raises(UserError, match=r"4 is outside axis tp\. Coordinates tp=4\. Use 0 to 3"):
        layout.find({"tp": 4})
    with pytest.raises(UserError, match="-1 is outside"):
        layout.find({"dp": -1})


@given(block=blocks(), data=st.data())
def test_a_group_moves_with_its_rank(block, data):
    layout, members, rank = block
    to, on = (data.draw(st.integers(0, layout.world_size - 1)) for _ in range(2))
    spans = [len({layout.coordinates(m)[i] for m in members}) > 1 for i in range(len(layout.axes))]
    moved, _ = layout.moved(members, rank, to)
    assert moved == _block(layout, to, spans), "the same block, where the other rank is"
    assert layout.moved(moved, to, rank)[0] == members, "there and back"
    assert layout.moved(moved, to, on) == layout.moved(members, rank, on), "in two steps"


@given(block=blocks(), data=st.data())
def test_a_peer_keeps_its_distance(block, data):
    layout, members, rank = block
    peer = data.draw(st.sampled_from(members))
    to = data.draw(st.integers(0, layout.world_size - 1))
    moved, other = layout.moved(members, rank, to, peer)
    step = members.index(peer) - members.index(rank)
    assert (moved.index(other) - moved.index(to) - step) % len(members) == 0
    assert layout.moved(moved, to, rank, other) == (members, peer)


def test_a_group_without_form_stays_where_it_is():
    layout = Layout.of_sizes([("tp", 4), ("dp", 4)])
    assert layout.moved((0, 5, 9), 5, 9) is not None, "9 is in it"
    assert layout.moved((0, 5, 9), 5, 6) is None
    assert layout.moved((0, 2), 0, 1) is None, "half an axis"
    assert layout.moved((0, 2), 0, 4)[0] == (4, 6)


@given(block=blocks(), data=st.data())
def test_refining_only_divides(block, data):
    layout, _, _ = block
    sizes = st.integers(1, 12)
    signatures = data.draw(
        st.lists(
            st.one_of(
                st.lists(st.tuples(sizes, sizes), min_size=1, max_size=3).map(
                    lambda parts: ",".join(f"{a}:{b}" for a, b in parts)
                ),
                st.just("1"),
                st.just("irregular:00ff"),
            ),
            max_size=4,
        )
    )
    refined = layout.refined(signatures)
    assert refined.world_size == layout.world_size
    before, after = ({axis.stride for axis in x.axes} for x in (layout, refined))
    assert before <= after
    assert len({axis.name for axis in refined.axes}) == len(refined.axes)
    for axis in refined.axes:
        if axis.name in NAMES:
            assert axis in layout.axes, "a name means the whole axis"
    assert refined.refined(signatures) == refined


def test_an_axis_is_divided_where_groups_begin_and_end():
    layout = Layout.of_sizes([("rank", 64)])
    found = layout.refined(["4:1", "2:16", "64:1"])
    assert [(a.size, a.stride) for a in found.axes] == [(2, 32), (2, 16), (4, 4), (4, 1)]
    assert layout.refined(["3:1"]) == layout, "3 does not divide 64"
    assert layout.refined(["irregular:12"]) == layout
    grid = Layout.of_sizes([("tp", 4), ("dp", 16)])
    assert [a.name for a in grid.refined(["4:1", "16:4"]).axes] == ["dp", "tp"]
    assert [a.name for a in grid.refined(["8:1"]).axes] == ["x8", "x4", "tp"]


@given(block=blocks())
def test_groups_of_the_layout_need_no_division(block):
    layout, members, _ = block
    spans = [len({layout.coordinates(m)[i] for m in members}) > 1 for i in range(len(layout.axes))]
    assert layout.refined([_signature(layout, spans)]) == layout
