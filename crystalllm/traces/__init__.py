"""Traces of other tools: Kineto traces come in, Chakra execution traces go out."""
