"""The control plane: who gets which row next. Pure state (`state`) in one shell (`controller`)."""
