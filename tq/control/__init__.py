"""The control plane: which consumer gets which rows. Pure state (`state`) in one shell (`controller`)."""
