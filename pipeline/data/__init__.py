"""Which images, and how one becomes a tensor; see pipeline/README.md for the flow."""
