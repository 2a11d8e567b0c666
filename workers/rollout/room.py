"""How many rollouts of a user's function may begin. Pure; the planner simulates with the same rule."""

# Share of the engine's places for which calls may queue, so that a place that becomes free is filled at once
_KEPT_SHARE = 0.25


def room(*, places: int, drawing: int, calls: int, live: int, most: int) -> int:
    """Return how many rollouts may begin, given the engine's free places, a short queue of calls, and the overall
    limit.

    Rollouts inside a tool take no place.

    Args:
        places: of the engine.
        drawing: responses being generated.
        calls: waiting for the engine, or imminent.
        live: rollouts that began and have not ended; `most`: their limit.
    """
    return max(0, min(places - drawing + int(_KEPT_SHARE * places) - calls, most - live))
