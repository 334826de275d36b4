"""Python's semantics of `forward`: what a capture guards, does again at every call, traces, or refuses by its line.

docs/python_semantics.md says what is promised, and which tests show it. Modules here read graphs and modules; they know
nothing of the export that runs them.
"""
