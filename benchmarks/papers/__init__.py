"""Parts of `benchmarks/papers`.

trained     stability, staleness, periodic     shared_prompts    of a trainer, and of a whole step
simulated   ablation, scaling                  plans             the papers' own recipes, planned
found       what an experiment found: table, figures, picture
"""
