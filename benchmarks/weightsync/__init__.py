"""Parts of `benchmarks/weightsync`: a real agent, trainer ranks and generators, each in a process of its own.

cluster     starts, orders and kills the processes        part, part_*   what is measured
trainer     a rank: masters, sender, broadcaster          masters        its weights, and how to prove them
generator   a receiver whose engine computes              raw_gloo       what the broadcast is held against
"""
