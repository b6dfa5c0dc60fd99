"""Which experts a target uses: hooks that record it, engines that run it, prompts, and the Parquet stores.

`hooks` is for serving processes and needs torch alone; nothing is imported before it is asked for.
"""
