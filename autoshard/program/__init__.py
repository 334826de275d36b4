"""The local program: from a graph and its decisions to the program of one rank.

One walk makes a program: `walk.py`, with `graph_emitter.py` (unequal shares, too); halves: `split.py`; the program of a
rank: `localize.py`, `build_program.py`; the predicted program: `predicted_program.py`. Whose memory a tensor is:
`aliasing.py`. Copies to and from the host beside compute: `copy_schedule.py`. Seconds: `program_replay.py`. What
compiled programs do not make, or do not save: `fusion.py`, `cheap_saves.py`.
"""
