"""How many rollouts of a user's function may begin. Pure; the planner simulates with the same."""

_KEPT_SHARE = 0.25
"""Share of the engine's places for which calls may wait, so that one that gets free is filled at once."""


def room(*, places: int, drawing: int, calls: int, live: int, most: int) -> int:
    """Return how many may begin: as many as the engine, and a few calls that wait for it, have room for; and as may run
    at all. One in a tool takes no place.

    Args:
        places: of the engine.
        drawing: responses that it generates.
        calls: that wait for it, or are about to come.
        live: rollouts that began and have not ended; `most`: of them at a time.
    """
    return max(0, min(places - drawing + int(_KEPT_SHARE * places) - calls, most - live))
