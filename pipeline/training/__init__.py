"""One phase: the loop of logical steps, its optimizer, checkpoints and metrics."""
