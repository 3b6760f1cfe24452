# Captures, plans and emulates the jobs of config/config.yaml: snakemake --cores all
# The stages are in workflow/rules/, what they call is in crystalllm/, and docs/workflow.md
# says what may be configured, and what runs again when something changes.
from snakemake.utils import min_version

min_version("9.27")


configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/capture.smk"
include: "workflow/rules/planning.smk"
include: "workflow/rules/emulate.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/reproduce.smk"


report: os.path.abspath(f"{OVERVIEW}/front.rst")


rule emulate_all:
    """All cases, through all stages, to the table of results and the report (default)."""
    default_target: True
    input:
        rules.verdict.output.done,
        rules.overview.output.page,
        [f"{pages(case)}/index.html" for case in CASES],


rule report_all:
    """Pictures and tables of all cases; snakemake --report report.zip report_all joins them."""
    input:
        rules.overview.output.page,
        [f"{pages(case)}/index.html" for case in CASES],


rule planning_all:
    """Runtime profiles of all jobs."""
    input:
        collect(rules.planning.output.summary, job=FOLDERS),


rule capture_all:
    """Captures of all jobs."""
    input:
        collect(rules.capture.output.structure, job=FOLDERS),
