"""Plans: what was decided, as objects, files, tables, web pages and traces."""
