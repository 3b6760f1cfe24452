"""The rendezvous store: what a rank finds there when everybody else has been."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist

from crystalllm.warm import RankError


def _store():
    return dist.TCPStore("master", 1234, 8, False, datetime.timedelta(seconds=5))


def test_counters_are_full_and_own_keys_are_there(virtual):
    def program():
        store = _store()
        store.set("a", "1")
        counted = store.add("arrived", 1)
        store.wait(["a", "arrived"])
        deleted = store.delete_key("a")
        return counted, store.get("arrived"), deleted, store.check(["a"]), store.num_keys()

    assert virtual(program, rank=3, backend=None) == (8, b"8", True, False, 1)


def test_a_peers_key_is_mine_under_its_number(virtual):
    def program():
        store = _store()
        store.set("rank/3/address", "here")
        return store.get("rank/5/address"), store.check(["rank/7/address"])

    assert virtual(program, rank=3, backend=None) == (b"here", True)


def test_a_key_that_nobody_sets_is_an_error_at_once(virtual):
    def program():
        start = time.perf_counter()
        try:
            dist.TCPStore("master", 1234, 8).get("nobody")
        finally:
            assert time.perf_counter() - start < 1

    with pytest.raises(RankError, match=r"No virtual peer sets .* Rank 3, .*'nobody'.* Capture"):
        virtual(program, rank=3, backend=None)


def test_stores_of_one_endpoint_share_their_keys(virtual):
    def program():
        first, second = _store(), _store()
        other = dist.TCPStore("elsewhere", 1234, 8)
        first.set("k", "v")
        prefixed = dist.PrefixStore("p", first)
        prefixed.set("k", "w")
        return second.get("k"), second.get("p/k"), other.check(["k"]), prefixed.get("k")

    assert virtual(program, backend=None) == (b"v", b"w", False, b"w")


def test_the_rest_of_the_interface(virtual):
    def program():
        store = _store()
        store.multi_set(["a", "b"], ["1", "2"])
        store.append("a", "9")
        swapped = store.compare_set("b", "2", "3")
        kept = store.compare_set("b", "2", "4")
        store.queue_push("q", "first")
        return store.multi_get(["a", "b"]), swapped, kept, store.queue_pop("q"), store.host

    got = virtual(program, backend=None)
    assert got == ([b"19", b"3"], b"3", b"3", b"first", "master")


@pytest.mark.parametrize("method", ["env://", "tcp://nowhere:9", "file:///nowhere/rendezvous"])
def test_every_init_method(virtual, method):
    def program():
        dist.init_process_group("gloo", init_method=method, rank=5, world_size=8)
        return dist.get_rank(), dist.get_world_size()

    assert virtual(program, rank=5, backend=None) == (5, 8)


def test_a_rank_other_than_the_launchers_is_refused(virtual):
    def program():
        dist.init_process_group("gloo", rank=4, world_size=8)

    with pytest.raises(RankError, match=r"claims group rank 4, the member list says 5"):
        virtual(program, rank=5, backend=None)
