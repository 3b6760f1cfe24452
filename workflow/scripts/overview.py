"""Rule overview: all cases side by side."""

from pathlib import Path

import pandas as pd
from stage import logged

from crystalllm.report import overview


def main(snakemake):
    with logged(snakemake.log[0]):
        frame = pd.read_csv(snakemake.input.table, sep="\t")
        text = frame.select_dtypes(exclude="number").columns
        frame[text] = frame[text].fillna("")
        pages = dict(snakemake.params.pages)
        of_rows = [Path(pages[folder]) / "index.html" for folder in frame["results"]]
        overview.write(frame, of_rows, Path(snakemake.output.page).parent)


main(snakemake)  # noqa: F821
