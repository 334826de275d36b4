"""Standard layouts of a step, as hints that force them, and the search for the layers that they split."""
