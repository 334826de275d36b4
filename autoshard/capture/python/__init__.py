"""Python's semantics of `forward`: what a capture guards, replays at every call, traces, or refuses by its line.

docs/python_semantics.md lists what is promised, and the tests that show it. Modules here read graphs and modules; they
do not depend on the export that runs them.
"""
