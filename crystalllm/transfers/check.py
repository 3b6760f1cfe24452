"""The model against published tables: what it predicts of each row, and how far that is off.

The hardware of a table is what its columns gpu and network say: line rates are those
of data sheets, and few parameters are fitted, each on few rows (`_FITTED`), which are
marked and left out of what is said of the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from crystalllm.config import Cluster, Gpu, Link, Nodes
from crystalllm.errors import UserError
from crystalllm.placement import Placement
from crystalllm.shipped import NVLINK_4
from crystalllm.transfers import model, nccl_tests

# Two H200 of one node, measured with CUDA graphs of 20 calls, so that no launch is in the
# times: torch 2.11, NCCL 2.28.9, NVLS off, medians of seven graphs. Nothing was fitted on it.
H200_PAIR = Path(__file__).with_name("h200_pair.csv")

# From here on bandwidth counts, below it latency.
LARGE_BYTES = 1 << 20

# One direction of a GPU's NVLink: 300 GB/s (NVIDIA's A100 datasheet, 600 both ways),
# 450 GB/s (H100 and H200: 900), 900 GB/s (GB200: 1800).
_NVLINK_3 = Link(scope="node", bandwidth_bytes_per_s=300e9, latency_s=0.6e-6, efficiency=0.77)
_NVLINK_5 = Link(scope="node", bandwidth_bytes_per_s=900e9, latency_s=0.6e-6, efficiency=0.93)
_NVLINKS = {
    "A100-80": _NVLINK_3,
    "A100-SXM4-40": _NVLINK_3,
    "H100-SXM": NVLINK_4,
    "H200-SXM": NVLINK_4,
    "GB200": _NVLINK_5,
}
# GPUs that NVLink joins: a rack of GB200 is as one node.
_DOMAIN = {"GB200": 72}


def _network(gbits_per_gpu: float, latency_us: float, efficiency: float = 0.92) -> Link:
    return Link(
        scope="cluster",
        bandwidth_bytes_per_s=gbits_per_gpu * 1e9 / 8,
        latency_s=latency_us * 1e-6,
        efficiency=efficiency,
    )


# By the column network; line rates as it says, of eight GPUs. That of the unstated one is
# a guess, which its efficiency takes up.
_NETWORKS = {
    "EFA 3200Gb/s": _network(400, 27),
    "EFA 3200Gb/s ring": _network(400, 27),
    "EFA 400Gb/s": _network(50, 75),
    "GCP a3-mega 8x200G (TCPXO)": _network(200, 60),
    "IB NDR 8x400G + SHARP": _network(400, 5),
    "NVLink3 / cloud NIC (unstated)": _network(200, 10, 0.64),
    "NVL72+IB": _network(400, 5),
}

# What was fitted, and on which rows: a part of the column source, ranks, and the sizes.
_FITTED = (
    # efficiency of NVLink 3, 4 and 5
    ("ND_A100_v4", 8, 1 << 33, 1 << 33),
    ("NVLS off", 8, 1 << 33, 1 << 33),
    ("GB200 1 rack", 72, 1 << 32, 1 << 32),
    # efficiency of a 400 Gb/s adapter, taken for all networks whose rate is known
    ("4x p5en", 32, 1 << 32, 1 << 32),
    # latencies of networks
    ("2x p5.48xlarge", 16, 0, 1 << 10),
    ("2x p4de", 16, 0, 1 << 10),
    ("a3mega", 16, 0, 1 << 10),
    # latency and efficiency of the unstated network
    ("nccl_32.log", 32, 0, 1 << 40),
)


def check_model(path: Path) -> pd.DataFrame:
    """Predicts every row of a CSV file of published times.

    Args:
        path: With the columns of `nccl_tests` and source, gpu and network.

    Returns:
        One row per row of the file: `source`, `op`, `gpu`, `network`, `ranks`, `nodes`,
        `bytes`, `published_us`, `predicted_us`, `error` (predicted over published, less
        one), `algorithm`, `is_large` (1 MiB or more) and `is_fitted`.

    Raises:
        UserError: The file is missing or damaged, or names hardware that is not known.
    """
    rows = nccl_tests.read(path)
    table = pd.read_csv(path, skip_blank_lines=True)
    missing = {"source", "gpu", "network"} - set(table.columns)
    if missing:
        raise UserError(
            "A table does not say what it was measured on",
            where=f"File {path}: no column {', '.join(sorted(missing))}",
            do="Pass a table with source, gpu and network",
        )
    found = []
    for row, about in zip(rows, table.itertuples(index=False), strict=True):
        cluster, placement = _hardware(row, about)
        # A row of sendrecv is a message between the two ranks that are farthest apart.
        kind = row.kind
        if kind == nccl_tests.MESSAGE:
            kind = "send"
            placement = Placement(2, min(placement.nodes, 2))
        predicted = model.estimate(kind, row.num_bytes, placement, cluster)
        us = predicted.seconds * 1e6
        found.append(
            {
                "source": about.source,
                "op": row.kind,
                "gpu": about.gpu,
                "network": about.network,
                "ranks": row.placement.ranks,
                "nodes": row.placement.nodes,
                "bytes": row.num_bytes,
                "published_us": row.ns / 1e3,
                "predicted_us": us,
                "error": us / (row.ns / 1e3) - 1,
                "algorithm": f"{predicted.algorithm}/{predicted.protocol}",
                "is_large": row.num_bytes >= LARGE_BYTES,
                "is_fitted": any(
                    part in about.source
                    and ranks == row.placement.ranks
                    and low <= row.num_bytes <= high
                    for part, ranks, low, high in _FITTED
                ),
            }
        )
    return pd.DataFrame(found)


def summary(checked: pd.DataFrame) -> pd.DataFrame:
    """Errors of the rows that nothing was fitted on, per collective, small and large apart.

    Args:
        checked: From `check_model`.

    Returns:
        By `op` and `is_large`: `rows`, `median` and `worst` (sizes of errors), and of the
        worst row `source`, `ranks` and `bytes`.
    """
    rest = checked[~checked["is_fitted"]].assign(size=checked["error"].abs())
    grouped = rest.groupby(["op", "is_large"])["size"]
    found = grouped.agg(rows="size", median="median", worst="max")
    where = rest.loc[grouped.idxmax(), ["source", "ranks", "bytes"]]
    return pd.concat([found, where.set_index(found.index)], axis=1)


def _hardware(row: nccl_tests.Row, about: Any) -> tuple[Cluster, Placement]:
    """The cluster of a row, and the placement on what NVLink joins."""
    if about.gpu not in _NVLINKS:
        raise UserError(
            f"The NVLink of {about.gpu} is not known",
            where=row.where,
            do="Use one of " + ", ".join(_NVLINKS),
        )
    domain = _DOMAIN.get(about.gpu, 0)
    nodes = -(-row.placement.ranks // domain) if domain else row.placement.nodes
    node = _NVLINKS[about.gpu]
    # Tables of rings say so.
    if "ring" in about.network or "NVLS off" in about.source:
        node = node.model_copy(update={"reduces_in_switch": False})
    links = {"nvlink": node}
    if nodes > 1:
        if about.network not in _NETWORKS:
            raise UserError(
                f"The network {about.network} is not known",
                where=row.where,
                do="Use one of " + ", ".join(_NETWORKS),
            )
        links["network"] = _NETWORKS[about.network]
    gpus = -(-row.placement.ranks // nodes)
    cluster = Cluster(
        nodes=[Nodes(count=nodes, gpus_per_node=gpus, gpu=_gpu(about.gpu))], links=links
    )
    return cluster, Placement(row.placement.ranks, nodes)


def _gpu(name: str) -> Gpu:
    """Only its name counts here."""
    return Gpu(model=name, memory_bytes=1, peak_flops={})
