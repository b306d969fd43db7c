"""How long, how many bytes, how accurate, on what: run from the repository root, rows land in bench/results/."""
