"""How long transfers take: measured between real peers, from a table, or by a model."""
