"""Engines for targets that outgrow one process: vLLM and SGLang.

Both return, with a sequence, the experts of every token they processed, so nothing is hooked here: rows are
decoded, checked against the target's files (`rows`) and turned into traces (`replies`). `choose.EngineChoice` opens
the engine that flags ask for.
"""
