"""The first thing to run on a new machine: numbers against one device, and a profile of a step."""
