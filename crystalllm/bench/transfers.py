"""How far the model of transfer times is off: predicted against published times."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

import crystalllm
from crystalllm.transfers import check

# Published results of nccl-tests, beside the checkout.
PUBLISHED = Path(crystalllm.__file__).parents[1].parent / "shared" / "data" / "nccl_tables.csv"


def main() -> None:
    """Prints errors per collective and size; the last line is one JSON object."""
    paths = [check.H200_PAIR]
    if PUBLISHED.is_file():
        paths.append(PUBLISHED)
    else:
        print(f"without the published tables: {PUBLISHED} is not there")
    checked = pd.concat([check.check_model(path) for path in paths], ignore_index=True)
    rest = checked[~checked["is_fitted"]]
    console = Console()
    console.print(_by_size(rest))
    found = check.summary(checked)
    for (op, is_large), row in found.iterrows():
        print(
            f"{op}, {'1 MiB and more' if is_large else 'less than 1 MiB'}: {row['rows']} rows, "
            f"median error {row['median']:.1%}, worst {row['worst']:.1%} "
            f"({row['bytes']} bytes, {row['ranks']} ranks, {row['source']})"
        )
    errors = rest["error"].abs()
    result = {
        "name": "transfers",
        "tables": [path.name for path in paths],
        "rows": len(checked),
        "rows_fitted_on": int(checked["is_fitted"].sum()),
        "median_error": round(float(errors.median()), 4),
        "worst_error": round(float(errors.max()), 4),
        "collectives": {
            f"{op} {'large' if is_large else 'small'}": {
                "rows": int(row["rows"]),
                "median": round(float(row["median"]), 4),
                "worst": round(float(row["worst"]), 4),
            }
            for (op, is_large), row in found.iterrows()
        },
    }
    print(json.dumps(result))


def _by_size(rest: pd.DataFrame) -> Table:
    table = Table("collective", "bytes", "rows", "median error", "lowest", "highest")
    for (op, num_bytes), rows in rest.groupby(["op", "bytes"]):
        errors = rows["error"]
        table.add_row(
            op,
            str(num_bytes),
            str(len(rows)),
            f"{errors.median():+.1%}",
            f"{errors.min():+.1%}",
            f"{errors.max():+.1%}",
        )
    return table
