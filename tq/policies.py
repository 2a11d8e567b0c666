"""How ready parcels become leases. Pure; a parcel is the smallest thing handed out: one row, or one whole group.

Legend: a parcel is `(rows)`, a tuple of row indices in ascending order.
"""

from collections.abc import Sequence

Parcel = tuple[int, ...]


def deal_round(parcels: Sequence[Parcel], num_ranks: int) -> list[list[Parcel]]:
    """Share a round's parcels among data-parallel ranks, in order, sizes as even as parcels allow.

    Args:
        parcels: of one round, in data order.
        num_ranks: ranks of the gang.

    Returns:
        One list per rank; the first ranks get the longer lists, the last may be empty.
    """
    base, extra = divmod(len(parcels), num_ranks)
    shares = []
    start = 0
    for rank in range(num_ranks):
        end = start + base + (1 if rank < extra else 0)
        shares.append(list(parcels[start:end]))
        start = end
    return shares
