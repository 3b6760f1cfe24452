"""What deviates: a run from its baseline, a rank from its peers, a run from another one."""
