"""Packing and unpacking: determinism, scrubbing, and packs of strangers."""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
import warnings
import zipfile
from pathlib import Path

import pytest
import small_capture
from hypothesis import given, settings
from hypothesis import strategies as st

from crystalllm import tables
from crystalllm.errors import UserError
from crystalllm.sharing import restricted
from crystalllm.sharing.pack import MANIFEST, pack
from crystalllm.sharing.scrub import Scrubber, is_secret_name
from crystalllm.sharing.unpack import unpack

# In pieces, so that scanners for secrets do not take this file for a leak.
GITHUB = "gh" + "p_" + "a1B2" * 9
HUGGING = "hf" + "_" + "Zy9X" * 8
AWS = "AK" + "IA" + "ABCDEFGH01234567"
JWT = "ey" + "Jhbjoiabc1.ey" + "Jzdwabc123.sig-na_ture"
PRIVATE = "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIabc\n-----END RSA PRIVATE" + " KEY-----"
SECRETS = (GITHUB, HUGGING, AWS, JWT, PRIVATE)


def _scrubber():
    return Scrubber(user="alice", host="alice-laptop.corp.example", home="/scratch/people/alice")


@pytest.fixture
def job(tmp_path):
    small_capture.write(tmp_path / "job" / "capture")
    return tmp_path / "job"


def test_what_is_packed_comes_back(job, tmp_path):
    manifest = pack(job, tmp_path / "a.pack", scrubber=_scrubber())
    assert manifest["version"] == 1
    assert manifest["torch"]
    assert set(manifest["files"]) == {
        f"capture/{name}"
        for name in (
            "calls.parquet",
            "groups.parquet",
            "payloads.parquet",
            "ranks.parquet",
            "structure.json",
        )
    }
    assert unpack(tmp_path / "a.pack", tmp_path / "b") == manifest
    for name in manifest["files"]:
        assert (tmp_path / "b" / name).read_bytes() == (job / name).read_bytes()
    assert restricted.is_untrusted(tmp_path / "b" / "capture")
    assert not restricted.is_untrusted(job / "capture")


def test_the_same_artifacts_give_the_same_bytes(job, tmp_path):
    small_capture.write(tmp_path / "other" / "capture")
    os.utime(tmp_path / "other" / "capture" / "calls.parquet", (1, 1))
    pack(job, tmp_path / "a.pack", scrubber=_scrubber())
    pack(tmp_path / "other", tmp_path / "b.pack", scrubber=_scrubber())
    assert (tmp_path / "a.pack").read_bytes() == (tmp_path / "b.pack").read_bytes()
    # A pack of what was unpacked is the same again: the marker stays behind.
    unpack(tmp_path / "a.pack", tmp_path / "c")
    manifest = pack(tmp_path / "c", tmp_path / "c.pack", scrubber=_scrubber())
    assert [entry["reason"] for entry in manifest["left_out"]] == [
        "says that this came from outside"
    ] * 2


def test_nothing_is_overwritten(job, tmp_path):
    (tmp_path / "a.pack").write_text("mine")
    with pytest.raises(UserError, match="not overwritten"):
        pack(job, tmp_path / "a.pack")
    pack(job, tmp_path / "b.pack")
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="not overwritten"):
        unpack(tmp_path / "b.pack", tmp_path / "b")
    assert (tmp_path / "a.pack").read_text() == "mine"


def test_other_files_and_links_stay_behind(job, tmp_path):
    (job / "rank-0.log").write_text(GITHUB)
    (job / ".work").mkdir()
    (job / ".work" / "x.json").write_text("{}")
    (job / "link.json").symlink_to("/etc/hostname")
    (job / "foreign.parquet").write_bytes(b"PAR1")
    manifest = pack(job, tmp_path / "a.pack")
    assert {entry["file"]: entry["reason"] for entry in manifest["left_out"]} == {
        "rank-0.log": "neither a table of this version nor JSON",
        "link.json": "a link",
        "foreign.parquet": "neither a table of this version nor JSON",
    }
    assert not any(".work" in name for name in manifest["files"])


def _all_bytes(file):
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_secrets_of_structure_provenance_and_payloads_do_not_travel(tmp_path):
    state = {"api_key": "opensesame", "note": f"use {GITHUB} now", "size": 7, "cwd": "/home/bob/x"}
    values = [
        pickle.dumps(state),
        pickle.dumps([1, state], 2),
        b"host=alice-laptop " + AWS.encode(),
    ]
    folder = small_capture.write(tmp_path / "job" / "capture", values=values)
    structure = json.loads((folder / "structure.json").read_text())
    structure["environment"] = {
        "HF_TOKEN": "anything",
        "WANDB_API_KEY": "x" * 40,
        "DATA": "s3://me:hunter2@store/bucket",
        "HOME": "/home/bob",
        "USER": "bob",
        "STEPS": "12",
        "NUM_TOKENS": "4096",
    }
    structure["program"] = ["/home/bob/train.py", "--token", "abcdef", "--auth=xyz", "--steps", "4"]
    (folder / "structure.json").write_text(json.dumps(structure))
    table, provenance = tables.RANKS.read(folder / "ranks.parquet")
    tables.RANKS.write(
        folder / "ranks.parquet",
        table,
        provenance={**provenance, "program": ["--password", "hunter2", "/Users/bob/t.py"]},
    )

    manifest = pack(tmp_path / "job", tmp_path / "a.pack", scrubber=_scrubber())
    unpack(tmp_path / "a.pack", tmp_path / "b")
    out = tmp_path / "b" / "capture"
    found = json.loads((out / "structure.json").read_text())
    assert found["environment"] == {
        "HF_TOKEN": "<removed: secret>",
        "WANDB_API_KEY": "<removed: secret>",
        "DATA": "s3://<removed: credentials in a URL>@store/bucket",
        "HOME": "~",
        "USER": "<removed: name>",
        "STEPS": "12",
        "NUM_TOKENS": "4096",
    }
    assert found["program"] == [
        "~/train.py",
        "--token",
        "<removed: secret>",
        "--auth=<removed: secret>",
        "--steps",
        "4",
    ]
    assert tables.RANKS.provenance(out / "ranks.parquet")["program"] == [
        "--password",
        "<removed: secret>",
        "~/t.py",
    ]
    left = tables.PAYLOADS.read(out / "payloads.parquet")[0]["value"].to_pylist()
    assert [len(v) for v in left] == [len(v) for v in values]
    hidden = {
        "api_key": "x" * 10,
        "note": f"use {'x' * len(GITHUB)} now",
        "size": 7,
        "cwd": "/home/xxx/x",
    }
    assert pickle.loads(left[0]) == hidden
    assert pickle.loads(left[1]) == [1, hidden]
    assert left[2] == b"host=" + b"x" * 12 + b" " + b"x" * len(AWS)
    for content in _all_bytes(tmp_path / "a.pack").values():
        for secret in ("hunter2", "opensesame", GITHUB, AWS, "bob", "alice"):
            assert secret.encode() not in content
    counts = {(entry["where"], entry["kind"]): entry["count"] for entry in manifest["scrubbed"]}
    place = "capture/payloads.parquet, group world0#0, seq 0, rank 0"
    assert counts[place, "secret"] == counts[place, "token"] == counts[place, "home"] == 1
    assert counts["capture/structure.json.environment.HF_TOKEN", "secret"] == 1


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("around", ["{}", "a {} b", "x={};", '"{}"', "https://u:{}@h/p"])
def test_known_forms_are_found_anywhere(secret, around):
    scrubber = _scrubber()
    text = around.format(secret)
    assert secret not in scrubber.text(text, "here")
    assert scrubber.found
    for value in (text.encode(), pickle.dumps([text, {"k": (text, text.encode())}])):
        hidden = scrubber.payload(value, "here")
        assert secret.encode() not in hidden
        assert len(hidden) == len(value)


@pytest.mark.parametrize(
    "name",
    ["token", "HF_TOKEN", "apiKey", "aws_secret_access_key", "db.password", "PGPASSWORD", "x-auth"],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["key", "keys_digest", "num_tokens", "tokenizer", "keyboard", "author", "monkey", "step"],
)
def test_names_of_other_things(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/scratch/people/alice/run", "~/run"),
        ("/home/carol", "~"),
        ("file:///home/carol/x", "file://~/x"),
        ("C:\\Users\\carol\\x", "~\\x"),
        ("/root/.cache", "~/.cache"),
        ("/data/alice/x", "/data/<user>/x"),
        ("alice@alice-laptop", "<user>@<host>"),
        ("on alice-laptop.corp.example.", "on <host>."),
        ("malice, /homes/x, rooted, all_reduce root=0", None),
        ("size 4 key=all_reduce torch.Size", None),
        ("http://host:80/path?x=1", None),
    ],
)
def test_paths_and_names_of_people_and_machines(text, left):
    assert _scrubber().text(text, "here") == (text if left is None else left)


def test_class_names_and_framing_stay():
    scrubber = Scrubber(user="torch", host="builtins", home="/torch")
    value = pickle.dumps({"password": Path("torch"), "host": "builtins", "f": {1}, "g": set})
    hidden = scrubber.payload(value, "here")
    assert pickle.loads(hidden) == {
        "password": Path("xxxxx") if b"torch" not in hidden else Path("torch"),
        "host": "xxxxxxxx" if b"host\x94\x8c\x08builtins" not in hidden else "builtins",
        "f": {1},
        "g": set,
    }


_PLAIN = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=15,
)


@settings(max_examples=150, deadline=None)
@given(_PLAIN, st.sampled_from(SECRETS), st.text(), st.text(), st.integers(2, 5))
def test_a_secret_among_anything_goes_and_nothing_breaks(content, secret, before, after, protocol):
    value = pickle.dumps([content, f"{before} {secret} {after}", content], protocol)
    hidden = _scrubber().payload(value, "here")
    assert len(hidden) == len(value)
    assert secret.encode() not in hidden
    again = pickle.loads(hidden)
    assert len(again) == 3
    assert type(again[0]) is type(content)


@settings(max_examples=40, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.text(), st.lists), st.sampled_from(SECRETS))
def test_json_is_scrubbed_and_scrubbing_it_again_changes_nothing(content, secret):
    scrubber = _scrubber()
    once = scrubber.json({"a": content, "b": [secret, {"c": secret}]}, "file")
    assert secret not in json.dumps(once)
    assert scrubber.json(once, "file") == once


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_payload_keeps_its_length(value):
    for data in (value, b"\x80\x04" + value):
        assert len(_scrubber().payload(data, "here")) == len(data)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers() | st.floats(allow_nan=False) | st.binary(max_size=3)))
def test_what_holds_no_text_stays_as_it_is(content):
    value = pickle.dumps(content)
    assert _scrubber().payload(value, "here") == value


# --- packs of strangers --------------------------------------------------------


def _forge(file, *, change=lambda manifest: None, entries=None, extra=(), drop=()):
    """A copy of `file` with other entries and a manifest to match, unless `change` lies."""
    import hashlib

    content = _all_bytes(file)
    manifest = json.loads(content.pop(MANIFEST))
    content.update(entries or {})
    for name in drop:
        del content[name]
    manifest["files"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    }
    change(manifest)
    forged = file.with_name("forged.pack")
    with zipfile.ZipFile(forged, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # names that are there twice
        archive.writestr(MANIFEST, json.dumps(manifest))
        for name, data in [*content.items(), *extra]:
            archive.writestr(name, data, zipfile.ZIP_DEFLATED)
    return forged


@pytest.fixture
def packed(job, tmp_path):
    pack(job, tmp_path / "a.pack", scrubber=_scrubber())
    return tmp_path / "a.pack"


def _refused(file, match, **options):
    out = file.parent / "never"
    before = sorted(file.parent.iterdir())
    with pytest.raises(UserError, match=match) as error:
        unpack(file, out, **options)
    assert str(file) in str(error.value)
    assert sorted(file.parent.iterdir()) == before, "something was left behind"


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "/etc/evil.json",
        "capture/../../evil.json",
        "C:\\evil.json",
        "C:/evil.json",
        "capture/.hidden.json",
        "evil.py",
        "capture/",
        "a//b.json",
        "a\nb.json",
        "Ａ.json",
    ],
)
def test_names_that_lead_elsewhere_are_refused(packed, name):
    _refused(_forge(packed, entries={name: b"{}"}), "name that is not allowed")


def test_links_doubles_markers_and_strangers_are_refused(packed):
    link = zipfile.ZipInfo("capture/link.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    _refused(_forge(packed, extra=[(link, b"/etc/passwd")]), "something else than files")
    _refused(_forge(packed, extra=[("capture/ranks.parquet", b"x")]), "a name twice")
    _refused(_forge(packed, extra=[("capture/Ranks.parquet", b"x")]), "a name twice")
    _refused(_forge(packed, extra=[("capture/ranks.parquet/x.json", b"x")]), "a name twice")
    _refused(_forge(packed, entries={"capture/untrusted.json": b"{}"}), "vouches for itself")
    _refused(_forge(packed, extra=[("capture/more.json", b"{}")]), "what its manifest says")
    _refused(_forge(packed, entries={"a.json": b"{"}), "cannot be read")
    _refused(_forge(packed, entries={"a.parquet": b"PAR1"}), "does not know")
    _refused(_forge(packed, drop=["capture/structure.json"]), "no capture")


def test_sizes_digests_and_versions_are_checked(packed):
    def newer(manifest):
        manifest["version"] = 2

    def other_digest(manifest):
        manifest["files"]["capture/ranks.parquet"]["sha256"] = "0" * 64

    def other_size(manifest):
        manifest["files"]["capture/ranks.parquet"]["bytes"] += 1

    _refused(_forge(packed, change=newer), "newer version.*known up to 1")
    _refused(_forge(packed, change=other_digest), "is damaged.*ranks.parquet")
    _refused(_forge(packed, change=other_size), "ranks.parquet")
    for broken in ("format", "version", "files"):
        _refused(
            _forge(packed, change=lambda manifest, key=broken: manifest.pop(key)), "manifest|ver"
        )
    _refused(packed, "more space than allowed", limit_bytes=1000)
    bomb = _forge(packed, entries={"zeros.json": b"0" * 10_000_000})
    assert bomb.stat().st_size < 100_000
    _refused(bomb, "more space than allowed", limit_bytes=1_000_000)


def test_an_entry_that_unpacks_to_more_than_it_says_is_refused(packed):
    zeros = b'{"a": "' + b"0" * 100_000 + b'"}'

    def smaller(manifest):
        manifest["files"]["zeros.json"]["bytes"] = 100

    data = bytearray(_forge(packed, entries={"zeros.json": zeros}, change=smaller).read_bytes())
    size = len(zeros).to_bytes(4, "little")
    forged = packed.with_name("lying.pack")
    forged.write_bytes(bytes(data).replace(size, (100).to_bytes(4, "little")))
    _refused(forged, "damaged|manifest")


def test_payloads_that_could_run_code_are_refused_unless_trusted(packed, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.system, ("exit 1",)

    folder = small_capture.write(tmp_path / "evil", values=[pickle.dumps(Attack())])
    forged = _forge(
        packed, entries={"capture/payloads.parquet": (folder / "payloads.parquet").read_bytes()}
    )
    _refused(
        forged, r"posix\.system.*forged\.pack, capture/payloads\.parquet, group world0#0, seq 0"
    )
    unpack(forged, tmp_path / "b", trust=True)
    assert not restricted.is_untrusted(tmp_path / "b" / "capture")


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_damaged_packs_are_refused_and_leave_nothing(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    small_capture.write(folder / "job")
    pack(folder / "job", folder / "a.pack", scrubber=_scrubber())
    whole = (folder / "a.pack").read_bytes()
    if data.draw(st.booleans()):
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        broken = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            broken[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / "a.pack").write_bytes(broken)
    before = sorted(folder.iterdir())
    try:
        unpack(folder / "a.pack", folder / "out")
    except UserError as error:
        assert str(folder / "a.pack") in str(error)  # noqa: PT017
        assert sorted(folder.iterdir()) == before
    else:  # a byte that means nothing, such as a date
        assert (folder / "out" / "structure.json").exists()


def test_what_is_no_pack_is_refused(tmp_path, packed):
    for content in (b"", b"PK\x05\x06" + b"\0" * 18, b"text", io.BytesIO().getvalue()):
        file = tmp_path / "no.pack"
        file.write_bytes(content)
        _refused(file, "damaged|manifest")
    with pytest.raises(UserError, match="no such file"):
        unpack(tmp_path / "missing", tmp_path / "x")
    with pytest.raises(UserError, match="no capture"):
        pack(tmp_path, tmp_path / "x.pack")
