"""Training programs that know nothing of CrystalLLM."""
