"""What the torch patches were made for and are tested with."""

SUPPORTED = ">=2.11,<2.14"
