"""Where a storage unit keeps the values of its rows: `backend.Backend` is the interface, `load_backend` chooses.

Import the modules below for the classes. Its settings, `tq.config.BackendConfig`, need no torch.
"""
