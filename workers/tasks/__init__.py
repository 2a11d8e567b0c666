"""Column tasks: everything between rollout and the update, from columns of rows to new columns."""
