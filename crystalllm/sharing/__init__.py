"""One file of a job to send to somebody, and what comes from somebody else."""
