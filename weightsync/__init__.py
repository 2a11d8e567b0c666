"""Weight synchronisation: a trainer with any sharding feeds any number of receivers.

`plan` decides what travels in which bucket from which rank (pure); `sender` and `receiver` carry it out over
broadcast groups built once by `groups`.
"""
