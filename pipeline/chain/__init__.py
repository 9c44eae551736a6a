"""In which order: prepare, train each phase, evaluate, export, report; each step resumable."""
