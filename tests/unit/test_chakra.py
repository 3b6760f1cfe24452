"""Export of Chakra execution traces, read back with the schema that reads real ones."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile

import chakra_schema as chakra
import kineto_files as files
import networkx as nx
import pytest

from crystalllm import tables
from crystalllm.errors import UserError
from crystalllm.traces.chakra import COMM_TYPES, export
from crystalllm.traces.kineto import import_traces

COMP, SEND, RECV, COLL = 4, 5, 6, 7


def _exported(tmp_path, traces):
    paths = traces if isinstance(traces, list) else files.save(tmp_path / "in", traces)
    import_traces(paths, tmp_path / "capture")
    made = export(tmp_path / "capture", tmp_path / "et")
    return {int(p.name.split(".")[1]): chakra.read(p) for p in made}


def _check_graph(nodes):
    """Ids are unique, dependencies exist, nothing waits for itself."""
    graph = nx.DiGraph()
    graph.add_nodes_from(n.id for n in nodes)
    assert len(graph) == len(nodes)
    for node in nodes:
        assert set(node.ctrl_deps) | set(node.data_deps) <= set(graph)
        graph.add_edges_from((before, node.id) for before in {*node.ctrl_deps, *node.data_deps})
    assert nx.is_directed_acyclic_graph(graph)


@pytest.mark.parametrize(
    "name",
    [f"astra-sim/all_reduce_8npus_1MB.{r}.et" for r in range(8)]
    + [f"astra-sim/custom_ring_allreduce_8npus_1MB.{r}.et" for r in range(2)],
)
def test_schema_reads_the_traces_of_astra_sim(name):
    metadata, nodes = chakra.read(files.real(name))
    assert nodes
    assert not any(chakra.has_unknown_fields(m) for m in (metadata, *nodes))
    _check_graph(nodes)
    if "custom" not in name:
        (node,) = nodes
        assert metadata.version == "0.0.4"
        assert node.type == COLL
        found = chakra.attributes(node)
        assert found == {"is_cpu_op": False, "comm_type": 0, "comm_size": 2**20}
    else:
        assert {n.type for n in nodes} == {COMP, SEND, RECV}


def test_schema_reads_the_converted_trace_of_chakra():
    with tarfile.open(files.real("chakra/feeder_tests_trace.tar.gz")) as archive:
        (member,) = (m for m in archive if m.name.endswith(".et"))
        _, nodes = chakra.read(archive.extractfile(member).read())
    assert len(nodes) > 1000
    assert {COMP, COLL} <= {n.type for n in nodes}
    assert all(isinstance(chakra.attributes(n)["is_cpu_op"], bool) for n in nodes[:100])


def test_real_ranks_keep_their_events_sizes_and_times(tmp_path):
    found = _exported(tmp_path, [files.real("param/dlrm_kineto.tar.gz")])
    assert sorted(found) == list(range(8))
    capture = tmp_path / "capture"
    events = tables.EVENTS.read(capture / "events.parquet")[0].to_pandas()
    times = tables.EVENT_TIMES.read(capture / "event_times.parquet")[0].to_pandas()
    calls = tables.CALLS.read(capture / "calls.parquet")[0].to_pandas()
    for rank, (metadata, nodes) in found.items():
        assert metadata.version == "0.0.4"
        assert chakra.attributes(metadata)["rank"] == rank
        assert chakra.attributes(metadata)["world_size"] == 8
        _check_graph(nodes)
        mine = events[events["rank"] == rank]
        assert [n.id for n in nodes] == mine["event"].tolist()
        spent = times[times["rank"] == rank]["duration_ns"]
        assert [n.duration_micros for n in nodes] == [-(-d // 1000) for d in spent]
        assert [chakra.attributes(n)["duration_ns"] for n in nodes] == spent.tolist()
        collectives = [chakra.attributes(n) for n in nodes if n.type == COLL]
        expected = calls[calls["rank"] == rank]
        assert [c["comm_type"] for c in collectives] == [COMM_TYPES[k] for k in expected["kind"]]
        sizes = [6144 * 4, 24 * 8, 384 * 4, 3392 * 4, 394241 * 4, 6144 * 4, 112 * 4, 226960 * 4]
        assert [c["comm_size"] for c in collectives] == sizes
        assert {c["pg_name"] for c in collectives} == {"0"}
        assert chakra.attributes(metadata)["comm_group.0"] == list(range(8))
        assert not any(c["is_cpu_op"] for c in collectives)
        # Launched by a host event, but for what was launched before the profile began.
        assert [list(n.ctrl_deps) for n in nodes] == [[a] if a >= 0 else [] for a in mine["after"]]
    starts = [n.start_time_micros for _, nodes in found.values() for n in nodes]
    assert min(starts) == 0
    groups = json.loads((tmp_path / "et" / "comm_groups.json").read_text())
    assert groups == {"0": list(range(8))}


def test_messages_have_source_target_and_tag(tmp_path):
    traces = {}
    for rank in range(2):
        maker = files.Maker(rank, 2)
        words = ["", "", str(1 - rank), "3"]
        kind, end = ("send", "Dst Rank") if rank == 0 else ("recv", "Src Rank")
        operator = {"Concrete Inputs": words, "Input type": ["TensorList", "", "", ""]}
        maker.call(
            kind, 10, 90, operator="send" if rank == 0 else "recv_", operator_args=operator,
            **{end: 1 - rank},
        )  # fmt: skip
        maker.call("allgather", 110, 190, elements=(5, 10))
        maker.call("barrier", 210, 290)
        traces[rank] = maker.trace()
    found = _exported(tmp_path, traces)
    for rank, (_, nodes) in found.items():
        _check_graph(nodes)
        message, gather, barrier = (n for n in nodes if n.type != COMP)
        data = chakra.attributes(message)
        assert message.type == (SEND if rank == 0 else RECV)
        assert (data["comm_src"], data["comm_dst"], data["comm_tag"]) == (0, 1, 3)
        assert data["comm_size"] == 256
        assert chakra.attributes(gather)["comm_type"] == 2
        assert chakra.attributes(gather)["comm_size"] == 20
        assert (chakra.attributes(barrier)["comm_type"], barrier.name) == (9, "barrier")


def test_identical_tables_give_identical_bytes(tmp_path):
    import_traces(files.save(tmp_path / "in", files.all_reduces(2)), tmp_path / "capture")
    first = [p.read_bytes() for p in export(tmp_path / "capture", tmp_path / "a")]
    assert first == [p.read_bytes() for p in export(tmp_path / "capture", tmp_path / "b")]


def test_waits_of_real_streams_depend_on_their_records(tmp_path):
    name = "hta/critical_path_cuda_event_sync_multi_stream_event_sync_trace.json.gz"
    import_traces([files.real(name)], tmp_path / "capture", world_size=1)
    (path,) = export(tmp_path / "capture", tmp_path / "et")
    _, nodes = chakra.read(path)
    _check_graph(nodes)
    by_id = {n.id: n for n in nodes}
    (wait,) = (n for n in nodes if n.name == "WAIT")
    assert [by_id[i].name for i in wait.ctrl_deps] == ["RECORD"]
    assert set(wait.ctrl_deps) <= set(wait.data_deps)


def test_tables_that_do_not_fit_together_are_refused(tmp_path):
    for i, ranks in enumerate((2, 3)):
        paths = files.save(tmp_path / f"in{i}", files.all_reduces(ranks))
        import_traces(paths, tmp_path / str(i))
    (tmp_path / "0" / "calls.parquet").unlink()
    with pytest.raises(UserError, match="no calls table"):
        export(tmp_path / "0", tmp_path / "et")
    (tmp_path / "1" / "calls.parquet").rename(tmp_path / "0" / "calls.parquet")
    with pytest.raises(UserError, match="do not fit together"):
        export(tmp_path / "0", tmp_path / "et")
    (tmp_path / "1" / "events.parquet").rename(tmp_path / "0" / "events.parquet")
    with pytest.raises(UserError, match="other rows than events"):
        export(tmp_path / "0", tmp_path / "et")


def test_the_command_exports(tmp_path):
    import_traces(files.save(tmp_path / "in", files.all_reduces(2)), tmp_path / "capture")
    done = subprocess.run(
        [sys.executable, "-m", "crystalllm", "export", tmp_path / "capture", "--out", tmp_path],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(chakra.read(tmp_path / "chakra.1.et")[1]) == 24
