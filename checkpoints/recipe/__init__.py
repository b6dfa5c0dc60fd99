"""The recipe that rebuilds every file in ``checkpoints/`` from the Python standard library's own text.

Run it from the root of the repository::

    python -m checkpoints.recipe            # all stages, each skipped when its output is complete
    python -m checkpoints.recipe target     # one stage
"""
