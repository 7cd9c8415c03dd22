"""What ``doctor`` finds out about code that others compiled. Reads files only: imports and runs nothing of them."""
