"""Standard layouts of a step, as hints that force them, and the search for layers to split."""
