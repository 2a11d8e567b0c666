"""The data plane: storage units, which hold the rows' values."""
