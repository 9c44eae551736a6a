"""How a run meets a Ray cluster."""
