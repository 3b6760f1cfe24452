"""Rule verdict: a crash, a deviation or an invalid result is an error, once all is told."""

import pandas as pd
from stage import logged

from crystalllm.study import table


def main(snakemake):
    with logged(snakemake.log[0]):
        table.check(pd.read_csv(snakemake.input.table, sep="\t"))


main(snakemake)  # noqa: F821
