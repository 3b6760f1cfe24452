"""Damaged, foreign and older artifacts: an error that names file and reason, never another."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_capture
from hypothesis import given, settings
from hypothesis import strategies as st

from crystalllm import artifacts, tables
from crystalllm.errors import UserError
from crystalllm.inspect import Capture
from crystalllm.sharing import restricted
from crystalllm.show import show

FILES = {
    "calls": tables.CALLS,
    "ranks": tables.RANKS,
    "groups": tables.GROUPS,
    "payloads": tables.PAYLOADS,
}


def _zero(type):
    if pa.types.is_map(type) or pa.types.is_list(type):
        return []
    if pa.types.is_dictionary(type) or pa.types.is_string(type):
        return "a"
    return b"a" if pa.types.is_binary(type) else False if pa.types.is_boolean(type) else 0


def _write(table, path, rows=3):
    table.write(path, {c.name: [_zero(c.type)] * rows for c in table.columns}, provenance={"a": 1})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Bytes of every kind of artifact."""
    folder = tmp_path_factory.mktemp("whole")
    small_capture.write(folder)
    content = {name: (folder / f"{name}.parquet").read_bytes() for name in FILES}
    return {**content, "structure": (folder / "structure.json").read_bytes()}


def _damage(data, content):
    if data.draw(st.booleans()):
        return content[: data.draw(st.integers(0, len(content) - 1))]
    broken = bytearray(content)
    for _ in range(data.draw(st.integers(1, 6))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    return bytes(broken)


def _read_all(folder):
    show(folder)
    show(folder, rank=0)
    restricted.check_table(folder / "payloads.parquet")
    for name, table in FILES.items():
        for values in table.read(folder / f"{name}.parquet")[0].columns:
            values.to_pylist()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_damage_is_found_or_harmless(whole, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    victim = data.draw(st.sampled_from(sorted(whole)))
    for name, content in whole.items():
        path = folder / (f"{name}.json" if name == "structure" else f"{name}.parquet")
        path.write_bytes(_damage(data, content) if name == victim else content)
    try:
        _read_all(folder)
    except UserError as error:
        assert str(folder) in str(error)  # noqa: PT017


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200), head=st.sampled_from([b"", b"PAR1", b"{", b"[", b"PK"]))
def test_foreign_files_are_refused(tmp_path_factory, content, head):
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "structure.json").write_bytes(head + content)
    (folder / "ranks.parquet").write_bytes(head + content)
    with pytest.raises(UserError, match=r"structure\.json"):
        artifacts.read_structure(folder)
    with pytest.raises(UserError, match=r"ranks\.parquet"):
        tables.RANKS.read(folder / "ranks.parquet")


@settings(max_examples=100, deadline=None)
@given(
    key=st.sampled_from(["world_size", "program", "fingerprint", "period", "prologue_marks"]),
    value=st.none()
    | st.booleans()
    | st.floats()
    | st.just(-1)
    | st.dictionaries(st.text(), st.none()),
)
def test_structures_of_other_versions_are_refused(tmp_path_factory, key, value):
    folder = _structure(tmp_path_factory.mktemp("structure"), key, value)
    with pytest.raises(UserError, match=rf"structure\.json, keys {key}"):
        Capture(folder).structure  # noqa: B018


def _structure(folder, key, value):
    structure = {
        "world_size": 8,
        "program": [],
        "fingerprint": "",
        "period": 1,
        "prologue_marks": 1,
        key: value,
    }
    (folder / "structure.json").write_text(json.dumps(structure))
    return folder


def test_deep_json_is_refused(tmp_path):
    (tmp_path / "structure.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UserError, match=r"structure\.json"):
        artifacts.read_structure(tmp_path)


@pytest.mark.parametrize("table", tables.ALL, ids=lambda t: t.name)
def test_every_table_survives_its_file_and_refuses_others(table, tmp_path):
    path = tmp_path / "t.parquet"
    _write(table, path)
    assert table.read(path)[1] == table.provenance(path) == {"a": 1}
    assert tables.table_in(path) is table
    first = table.columns[0].name
    assert table.read(path, columns=[first])[0].column_names == [first]
    other = next(t for t in tables.ALL if t is not table)
    with pytest.raises(UserError, match=f"{table.name}/{table.version} instead of {other.name}"):
        other.read(path)


def _change(path, change):
    table = pq.read_table(path)
    pq.write_table(change(table), path)


def _metadata(content, /, **changes):
    names = {"table": b"crystalllm.table", "provenance": b"crystalllm.provenance"}
    changed = {names[key]: value for key, value in changes.items()}
    return content.replace_schema_metadata({**content.schema.metadata, **changed})


@pytest.mark.parametrize("broken", [b"{", b"\xff", b"[1]", b"null", b"[" * 100_000, b""])
def test_broken_provenance_is_refused(tmp_path, broken):
    path = tmp_path / "ranks.parquet"
    _write(tables.RANKS, path)
    _change(path, lambda table: _metadata(table, provenance=broken))
    for read in (tables.RANKS.read, tables.RANKS.provenance):
        with pytest.raises(UserError, match=r"cannot be read.*ranks\.parquet"):
            read(path)


def test_older_versions_and_other_columns_are_refused(tmp_path):
    path = tmp_path / "ranks.parquet"
    cases = {
        "ranks/1 instead of ranks/2": lambda t: _metadata(t, table=b"ranks/1"),
        r"missing \['role'\]": lambda t: t.drop_columns(["role"]),
        r"another type \['role'\]": lambda t: t.set_column(3, "role", pa.array(["a"] * 3)),
        r"twice \['role'\]": lambda t: t.append_column("role", t["role"]),
        "none instead of": lambda t: t.replace_schema_metadata(None),
    }
    for match, change in cases.items():
        _write(tables.RANKS, path)
        _change(path, change)
        with pytest.raises(UserError, match=match):
            tables.RANKS.read(path)
    with pytest.raises(UserError, match="no ranks table here"):
        tables.RANKS.read(tmp_path / "missing.parquet")
    with pytest.raises(UserError, match="cannot be read"):
        tables.RANKS.read(tmp_path)


@pytest.mark.parametrize("table", tables.ALL, ids=lambda t: t.name)
def test_missing_values_are_refused(table, tmp_path):
    path = tmp_path / "t.parquet"
    for i, column in enumerate(table.columns):
        _write(table, path)
        nulls = [None] * 3
        inner = [[None]] * 3 if pa.types.is_list(column.type) else nulls
        if pa.types.is_map(column.type):
            inner = [[("a", None)]] * 3
        for values in (nulls, inner):
            array = pa.array(values, type=column.type)
            _change(path, lambda t, i=i, c=column, a=array: t.set_column(i, c.name, a))
            with pytest.raises(UserError, match=rf"lacks values.*columns {column.name}"):
                table.read(path)
