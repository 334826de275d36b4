"""Plans: decisions as objects, files, tables, web pages and traces."""
