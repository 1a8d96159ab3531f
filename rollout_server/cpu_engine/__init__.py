"""An inference engine for small models on CPUs, embedded so that the whole ring runs without a GPU.

It speaks the part of SGLang's HTTP API that Foray uses, with SGLang's answers and most of its traps, so that everything
outside this package treats both engines alike. `serve.py` draws how the parts hang together; the deviations from
SGLang are noted where they are made (`control.py`, `answer.py`).
"""
